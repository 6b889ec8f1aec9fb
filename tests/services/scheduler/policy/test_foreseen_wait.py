"""The wait that is foreseen: sums that do not drift, nobody charged for another's flood, true in a model."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.foreseen_wait import DrainRate, ForeseenWait
from shared.messages.sequence import ServiceClass, Tenant

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
    assert found.wait_s(HEAVY, 0, 2.0) == pytest.approx(0.25)
    assert found.longest_s() == pytest.approx(20.0)


def test_better_classes_go_first_and_worse_ones_do_not_count() -> None:
    found = waiting((FIRST, 5.0), (A, 7.0), (LAST, 100.0))
    assert found.wait_s(FIRST, 0, 1.0) == pytest.approx(5.0)
    assert found.wait_s(A, 0, 1.0) == pytest.approx(12.0)
    assert found.wait_s(LAST, 0, 1.0) == pytest.approx(112.0)


def test_within_a_tenant_a_lower_priority_number_does_not_wait_for_a_higher_one() -> None:
    found = waiting((A, 8.0))
    found.add(("urgent", 0), A, -1, 2.0)
    assert found.wait_s(A, -1, 1.0) == pytest.approx(2.0)
    assert found.wait_s(A, 1, 1.0) == pytest.approx(10.0)


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
def test_who_has_nothing_waiting_waits_for_no_more_of_a_flood_than_its_turn(
    flood: list[float], work_s: float, weight: float
) -> None:
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
