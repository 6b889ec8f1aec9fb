"""Who waits, who is next and for how long: slack classes, priorities, and foreseen waits."""

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy import BUILT_IN
from services.scheduler.policy.batch_builder import Job
from services.scheduler.policy.contract import BY_WORK, PolicySettings, QueueRule, Task
from services.scheduler.policy.estimates import DrainRate
from services.scheduler.policy.fleet_queue import FleetQueue, ForeseenWait
from services.scheduler.policy.options import TwoQueueOptions
from services.scheduler.policy.research.ecoserve.planner import AgingTurns
from services.scheduler.policy.waiting_queue import WaitingQueue
from shared.messages.sequence import ServiceClass, Tenant
from tests.services.scheduler.policy.batch_rig import rig, truth
from tests.shared.messages.builders import predicted

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


every_policy = pytest.mark.parametrize("name", sorted(BUILT_IN))
priorities_of = st.lists(st.integers(-3, 3), min_size=2, max_size=12)


@every_policy
@settings(max_examples=40)
@given(priorities=priorities_of, slots=st.integers(1, 4), predicts=st.booleans(), lag=st.integers(0, 2))
def test_of_equals_the_lower_starts_first(
    name: str, priorities: list[int], slots: int, predicts: bool, lag: int
) -> None:
    """And of one priority whoever came first."""
    limits = PolicySettings(max_batch_sequences=slots, token_budget=32)
    bench = rig(BUILT_IN[name], limits, blocks=40, lag=lag)
    if predicts:
        bench.predict = truth
    for number, priority in enumerate(priorities):
        bench.now_s += 0.001
        bench.arrive(f"r{number:02}", 12, 10, 10, priority=priority)
    bench.finish()
    numbers = [int(key[0][1:]) for key in bench.started]
    assert numbers == sorted(range(len(priorities)), key=lambda at: (priorities[at], at))


@every_policy
@given(sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=3, max_size=8))
@settings(max_examples=25)
def test_one_that_came_last_passes_all_that_wait(name: str, sizes: list[tuple[int, int]]) -> None:
    """However long the others are, or late: one place, and it is the next to have it."""
    limits = PolicySettings(max_batch_sequences=1, token_budget=32)
    bench = rig(BUILT_IN[name], limits, blocks=40, lag=0)
    bench.predict = truth
    for number, (prompt, answer) in enumerate(sizes):
        bench.arrive(f"r{number:02}", prompt, answer, answer, priority=5)
    bench.turn()
    before = len(bench.started)
    bench.now_s += 1e4
    bench.arrive("urgent", 30, 30, 30, priority=-1)
    bench.finish()
    assert bench.started.index(("urgent", 0)) <= before


@pytest.mark.parametrize("rule", [BY_WORK, QueueRule()])
@given(waiting=st.lists(st.tuples(st.integers(-3, 3), *[st.integers(1, 500)] * 2), min_size=1, max_size=30))
def test_the_fleets_queue_goes_by_priority(rule: QueueRule, waiting: list[tuple[int, int, int]]) -> None:
    """Whatever work they are, and however much may pass; ranks, which are compared with those of workers,
    say the same."""
    queue = FleetQueue(rule)
    for number, (priority, prompt, answer) in enumerate(waiting):
        queue.add(Task((f"r{number}", 0), prompt, 500, float(number), priority=priority))
        queue.on_predicted((f"r{number}", 0), predicted(answer))
    ranks = []
    went = []
    while len(queue):
        key = queue.next(1)[0]
        ranks.append(queue.start(key))
        went.append(waiting[int(key[0][1:])][0])
    assert went == sorted(went) and [rank[0] for rank in ranks] == went


A, B = Tenant(name="a"), Tenant(name="b")
HEAVY = Tenant(name="heavy", weight=4.0)
FIRST = Tenant(name="first", service_class=ServiceClass.GUARANTEED)
LAST = Tenant(name="last", service_class=ServiceClass.SHEDDABLE)
TENANTS = [A, B, HEAVY, FIRST, LAST]


def waiting(*work: tuple[Tenant, float], workers: int = 1) -> ForeseenWait:
    """By a fleet that does a second's work in a second."""
    made = ForeseenWait()
    for number, (tenant, work_s) in enumerate(work):
        made.add((f"r{number}", 0), tenant, 0, work_s)
    made.on_tick(0.0, workers)
    return made


def test_one_waits_for_all_of_its_own_and_for_others_as_long_as_its_turn_takes() -> None:
    found = waiting((A, 30.0), (A, 10.0), workers=2)
    assert found.wait_s(A, 0, 2.0) == pytest.approx(20.0)
    assert found.wait_s(B, 0, 2.0) == pytest.approx(1.0), "the flood is not b's affair"
    assert found.wait_s(HEAVY, 0, 2.0) == pytest.approx(0.25) and found.longest_s() == pytest.approx(20.0)


def test_better_classes_go_first_and_worse_ones_do_not_count() -> None:
    found = waiting((FIRST, 5.0), (A, 7.0), (LAST, 100.0))
    assert found.wait_s(FIRST, 0, 1.0) == pytest.approx(5.0)
    assert found.wait_s(A, 0, 1.0) == pytest.approx(12.0)
    assert found.wait_s(LAST, 0, 1.0) == pytest.approx(112.0)


def test_within_a_tenant_a_lower_priority_number_does_not_wait_for_a_higher_one() -> None:
    found = waiting((A, 8.0))
    found.add(("urgent", 0), A, -1, 2.0)
    assert found.wait_s(A, -1, 1.0) == pytest.approx(2.0) and found.wait_s(A, 1, 1.0) == pytest.approx(10.0)


def test_nobody_can_say_without_a_worker_and_nobody_waits_where_nobody_does() -> None:
    assert waiting((A, 8.0), workers=0).wait_s(A, 0, 1.0) is None
    assert waiting(workers=0).wait_s(A, 0, 1.0) == 0.0


@given(
    events=st.lists(
        st.tuples(
            st.sampled_from(["add", "remove"]),
            st.integers(0, 20),
            st.sampled_from(TENANTS),
            st.integers(-1, 1),
            st.floats(0.0, 1e6),
        ),
        max_size=80,
    ),
    asked=st.sampled_from(TENANTS),
    work_s=st.floats(0.0, 1e3),
)
def test_sums_keep_to_what_is_there_and_more_waiting_never_shortens_a_wait(
    events: list[tuple[str, int, Tenant, int, float]], asked: Tenant, work_s: float
) -> None:
    found = ForeseenWait()
    found.on_tick(0.0, 3)
    there: set[int] = set()
    for what, number, tenant, priority, amount_s in events:
        before_s = found.wait_s(asked, 0, work_s)
        if what == "add" and number not in there:
            found.add((str(number), 0), tenant, priority, amount_s)
            there.add(number)
            after_s = found.wait_s(asked, 0, work_s)
            assert before_s is not None and after_s is not None
            assert after_s >= before_s - 1e-6 * (1 + before_s)
        elif what == "remove":
            found.remove((str(number), 0))
            there.discard(number)
        found.check_integrity()
        assert len(found) == len(there)
    for number in there:
        found.remove((str(number), 0))
    assert found.wait_s(asked, 0, work_s) == 0.0 and found.longest_s() == 0.0


@given(
    flood=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=30),
    work_s=st.floats(0.1, 100.0),
    weight=st.floats(0.1, 10.0),
)
def test_who_has_nothing_waiting_waits_for_one_turn(flood: list[float], work_s: float, weight: float) -> None:
    found = waiting(*((A, one_s) for one_s in flood))
    wait_s = found.wait_s(Tenant(name="b", weight=weight), 0, work_s)
    assert wait_s is not None and wait_s <= min(sum(flood), work_s / weight) + 1e-6


@pytest.mark.parametrize(("workers", "factor"), [(1, 1.0), (1, 0.2), (3, 0.5), (2, 4.0)])
def test_under_overload_the_wait_foreseen_is_the_wait_that_comes(workers: int, factor: float) -> None:
    """Workers that do `factor` of the work in a second that they are taken to do: at first nobody knows, and
    after a minute what is foreseen is what happens."""
    found, tick_s, work_s = ForeseenWait(), 0.02, 0.5
    queue: deque[tuple[str, float, float]] = deque()
    now_s, backlog_s, errors, number = 0.0, 0.0, [], 0
    while now_s < 120.0:
        now_s += tick_s
        backlog_s += tick_s * workers * factor
        while backlog_s >= work_s and queue:
            backlog_s -= work_s
            name, came_s, foreseen_s = queue.popleft()
            found.remove((name, 0))
            found.rate.end(work_s)
            if came_s > 60.0:
                took_s, own_s = now_s - came_s, work_s / (workers * factor)
                errors.append(abs(took_s - own_s - foreseen_s) / took_s)
        while number * work_s < 3.0 * now_s * workers * factor:
            number += 1
            wait_s = found.wait_s(A, 0, work_s)
            assert wait_s is not None
            if wait_s <= 10.0:
                queue.append((f"r{number}", now_s, wait_s))
                found.add((f"r{number}", 0), A, 0, work_s)
        found.on_tick(now_s, workers)
    errors.sort()
    assert errors[len(errors) // 2] < 0.1 and errors[-1] < 0.35


def test_a_stall_is_forgotten_while_nobody_waits() -> None:
    """It refused for ever after: a rate was kept until workers were full again, and ended something."""
    rate, now_s = DrainRate(), 0.0

    def pass_s(seconds: float, *, is_waited: bool) -> None:
        nonlocal now_s
        until_s = now_s + seconds
        while now_s < until_s:
            now_s += 0.5
            rate.on_tick(now_s, 4, is_waited=is_waited)

    pass_s(2.0, is_waited=True)
    rate.end(1.0)
    pass_s(80.0, is_waited=True)
    rate.end(1.0)
    pass_s(0.5, is_waited=True)
    assert rate.per_worker < 0.05
    pass_s(300.0, is_waited=False)
    assert rate.per_worker == pytest.approx(1.0, abs=0.05)


@given(
    steps=st.lists(
        st.tuples(st.floats(0.0, 1e4), st.floats(0.0, 1e3), st.integers(0, 64), st.booleans()), max_size=60
    )
)
def test_a_rate_is_positive_and_finite_whatever_happens(steps: list[tuple[float, float, int, bool]]) -> None:
    rate, now_s = DrainRate(), 0.0
    for passed_s, work_s, workers, is_waited in steps:
        now_s += passed_s
        rate.end(work_s)
        rate.on_tick(now_s, workers, is_waited=is_waited)
        assert 0.0 < rate.per_worker < float("inf")
