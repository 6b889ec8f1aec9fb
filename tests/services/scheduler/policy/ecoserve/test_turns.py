"""A share of the admissions, counted over plans."""

import pytest

from services.scheduler.policy.contract import Task
from services.scheduler.policy.job_table import Job
from services.scheduler.policy.options import TwoQueueOptions
from services.scheduler.policy.waiting_queue import AgingTurns


@pytest.mark.parametrize(("share", "expected"), [(0.25, 25), (0.5, 50), (1.0, 100)])
def test_the_aged_get_their_share_and_no_more(share: float, expected: int) -> None:
    turns, taken = AgingTurns(TwoQueueOptions(aging_share=share)), 0
    for _ in range(100):
        if turns.is_due():
            turns.take()
            taken += 1
        else:
            turns.count()
    assert taken == pytest.approx(expected, abs=2)


def test_nobody_saves_up_turns() -> None:
    turns = AgingTurns(TwoQueueOptions(aging_share=0.25))
    for _ in range(1000):
        turns.count()
    taken = 0
    while turns.is_due():
        turns.take()
        taken += 1
    assert taken <= 2


def test_after_four_times_the_age_nobody_may_pass() -> None:
    turns = AgingTurns(TwoQueueOptions(aging_s=10.0))
    job = Job(Task(("a", 0), 1, 1, 0.0), 0, None, deadline_s=5.0)
    assert not turns.is_starving(job, 45.0) and turns.is_starving(job, 45.1)
