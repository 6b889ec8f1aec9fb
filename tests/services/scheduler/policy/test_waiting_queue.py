"""Slack classes: the clock moves jobs at the right time, like a full re-sort would. The aged get a share."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.batch_builder import Job
from services.scheduler.policy.contract import Task
from services.scheduler.policy.options import TwoQueueOptions
from services.scheduler.policy.research.ecoserve.planner import AgingTurns
from services.scheduler.policy.waiting_queue import WaitingQueue

EDGES_S = (0.2, 0.5, 2.0)


def job_of(number: int, due_s: float = float("inf"), size: int = 0, priority: int = 0) -> Job:
    task = Task((f"r{number}", 0), 1 + size, 10, float(number), priority=priority)
    return Job(task, 0, None, due_s=due_s)


def rank(job: Job) -> tuple[Any, ...]:
    return (-job.task.prompt_tokens, *job.task.order)


steps_of = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "wait"]), st.floats(0, 8), st.integers(0, 5), st.integers(-1, 1)
    ),
    max_size=60,
)


@given(steps=steps_of)
def test_it_is_always_as_if_sorted_anew(steps: list[tuple[str, float, int, int]]) -> None:
    queue = WaitingQueue(rank, EDGES_S, aging_s=1.0)
    now_s, alive = 0.0, []
    for number, (step, value, size, priority) in enumerate(steps):
        if step == "add":
            alive.append(job_of(number, now_s + value - 2, size, priority))
            queue.add(alive[-1], now_s)
        elif step == "remove" and alive:
            queue.remove(alive.pop(size % len(alive)))
        else:
            now_s += value / 4
            queue.advance(now_s)
        queue.check_integrity()
        queue.advance(now_s)
        for job in alive:
            left_s = job.due_s - now_s
            nearest = min(abs(left_s - edge) for edge in EDGES_S)
            assert nearest < 1e-6 or job.slack_class == sum(left_s >= edge for edge in EDGES_S)
        assert list(queue) == sorted(alive, key=lambda job: (job.task.priority, job.slack_class, rank(job)))
        assert queue.first() is next(iter(queue), None)
        first = min((job.task.priority for job in alive), default=0)
        best = [job for job in alive if job.task.priority == first]
        overdue = [job for job in best if now_s > job.due_s + 1.0 + 1e-6]
        oldest = queue.oldest_overdue()
        assert oldest is None or oldest in best
        assert not overdue or (oldest is not None and oldest.task.order <= overdue[0].task.order)


def test_one_call_moves_a_bounded_number() -> None:
    queue = WaitingQueue(rank, EDGES_S)
    for number in range(1000):
        queue.add(job_of(number, 10.0), 0.0)
    queue.advance(9.9)
    urgent = len(next(queue.classes()))
    assert 0 < urgent < 100
    for _ in range(100):
        queue.advance(9.9)
    assert len(next(queue.classes())) == 1000


def test_left_behind_times_do_not_pile_up() -> None:
    queue = WaitingQueue(rank, EDGES_S, aging_s=1.0)
    for number in range(2000):
        job = job_of(number, 1000.0)
        queue.add(job, 0.0)
        queue.remove(job)
        queue.check_integrity()


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


def test_after_four_times_the_age_nobody_may_pass() -> None:
    turns = AgingTurns(TwoQueueOptions(aging_s=10.0))
    job = Job(Task(("a", 0), 1, 1, 0.0), 0, None, deadline_s=5.0)
    assert not turns.is_starving(job, 45.0) and turns.is_starving(job, 45.1)
