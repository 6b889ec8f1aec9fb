"""Deadlines by measured speeds."""

import pytest

from services.scheduler.policy.contract import Task
from services.scheduler.policy.lengths import WorkerSpeeds


def test_the_first_measurement_counts_whole_later_ones_are_smoothed() -> None:
    speeds = WorkerSpeeds()
    speeds.on_measured(0.0, 0.0)
    before = speeds.work_s(100, 100)
    speeds.on_measured(1000.0, 0.010)
    assert speeds.work_s(100, 100) == pytest.approx(1.1) and before != speeds.work_s(100, 100)
    speeds.on_measured(0.0, 0.020)
    assert speeds.decode_step_s == pytest.approx(0.012) and speeds.prefill_tokens_per_s == 1000.0


def test_a_deadline_is_the_scale_times_the_work_unless_the_task_has_its_own() -> None:
    speeds = WorkerSpeeds()
    speeds.on_measured(1000.0, 0.010)
    task = Task(("a", 0), 500, 100, 7.0)
    assert speeds.deadline_s(task, 50, 2.0) == pytest.approx(7 + 2 * (0.5 + 0.5))
    assert speeds.deadline_s(Task(("a", 0), 500, 100, 7.0, deadline_s=9.0), 50, 2.0) == 9.0
