"""Turns among tenants: the bound of VTC, weights and classes, and nothing saved up by one that is away."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.contract import (
    BY_WORK,
    Task,
    level_of,
    priority_in,
    turn_at,
)
from services.scheduler.policy.fleet_queue import Feed, FleetQueue
from services.scheduler.policy.tenants import TenantTurns
from shared.messages.sequence import ServiceClass, Tenant
from tests.shared.messages.builders import predicted

A, B = Tenant(name="a"), Tenant(name="b")


def task(name: str, answer: int = 50, priority: int = 0, arrival_s: float = 0.0) -> Task:
    return Task((name, 0), 20, 4000, arrival_s, prediction=predicted(answer), priority=priority)


def queue_of(*waiting: tuple[Tenant, Task]) -> FleetQueue:
    made = FleetQueue(BY_WORK)
    made.on_measured(1000.0, 0.01, 1000)
    for tenant, one in waiting:
        made.add(one, tenant)
    made.check_integrity()
    return made


def names(queue: FleetQueue, count: int = 64) -> list[str]:
    return [key[0] for key in queue.next(count)]


WEIGHTS = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 0.5}
TENANTS = [Tenant(name=name, weight=weight) for name, weight in WEIGHTS.items()]


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from(TENANTS), st.integers(1, 900)),
            st.tuples(st.just("start")),
            st.tuples(st.just("end"), st.integers(0, 30), st.integers(0, 900)),
            st.tuples(st.just("leave"), st.integers(0, 30)),
        ),
        max_size=120,
    )
)
def test_between_two_that_wait_all_the_time_service_differs_by_no_more_than_the_bound(
    events: list[tuple[object, ...]],
) -> None:
    """What was charged while both waited, each by its weight, differs by at most twice the largest charge and
    the largest correction that came on top (VTC, lemma 4.3 and theorem 4.4)."""
    queue = queue_of()
    charged = {tenant.name: 0.0 for tenant in TENANTS}
    since: dict[tuple[str, str], tuple[float, float]] = {}
    running: list[tuple[str, float]] = []
    waiting: dict[str, str] = {}
    largest = corrections = 0.0
    weights = {tenant.name: tenant.weight for tenant in TENANTS}

    def charge(name: str, service_s: float) -> None:
        charged[name] += service_s / weights[name]

    for number, event in enumerate(events):
        if event[0] == "add":
            tenant, answer = event[1], event[2]
            assert isinstance(tenant, Tenant) and isinstance(answer, int)
            queue.add(task(f"{number:03d}", answer, arrival_s=float(number)), tenant)
            waiting[f"{number:03d}"] = tenant.name
        elif event[0] == "start" and len(queue):
            (key,) = queue.next(1)
            name = waiting.pop(key[0])
            before = dict(queue.turns.charged_s())[name]
            queue.start(key)
            cost = (dict(queue.turns.charged_s())[name] - before) * weights[name]
            largest = max(largest, cost / weights[name])
            charge(name, cost)
            running.append((key[0], cost))
        elif event[0] == "end" and running:
            at, answer = event[1], event[2]
            assert isinstance(at, int) and isinstance(answer, int)
            started, _ = running.pop(at % len(running))
            before_all = dict(queue.turns.charged_s())
            queue.end((started, 0), answer, cached_tokens=answer % 20)
            for name, counter_s in queue.turns.charged_s():
                moved = counter_s - before_all[name]
                corrections += abs(moved)
                charged[name] += moved
        elif event[0] == "leave" and waiting:
            at = event[1]
            assert isinstance(at, int)
            gone = sorted(waiting)[at % len(waiting)]
            del waiting[gone]
            queue.remove((gone, 0))
        queue.check_integrity()
        present = set(waiting.values())
        for one, other in product(charged, charged):
            if not (one < other and {one, other} <= present):
                since.pop((one, other), None)
                continue
            first = since.setdefault((one, other), (charged[one], charged[other]))
            gap = (charged[one] - first[0]) - (charged[other] - first[1])
            assert abs(gap) <= 2 * largest + corrections + 1e-9


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 900)), max_size=40))
def test_who_is_told_to_be_next_is_who_goes_next(asked: list[tuple[Tenant, int]]) -> None:
    queue = queue_of(*((tenant, task(f"{at:02d}", answer)) for at, (tenant, answer) in enumerate(asked)))
    for key in queue.next(len(asked) + 1):
        assert queue.next(1) == [key]
        queue.start(key)
    assert not len(queue) and queue.next(1) == []


def test_one_that_floods_waits_for_one_that_asks_now_and_then() -> None:
    queue = queue_of(*((A, task(f"a{n}")) for n in range(9)))
    for _ in range(4):
        queue.start(queue.next(1)[0])
    queue.add(task("b0", answer=900), B)
    assert names(queue)[0] == "b0", "it is lifted to a's counter, and was served longer ago"
    queue.start(("b0", 0))
    assert names(queue, 3) == ["a4", "a5", "a6"], "one long answer is worth many short ones"


def test_what_one_did_not_use_is_not_saved_up() -> None:
    turns = TenantTurns()
    turns.join(A)
    turns.start("a", 5.0)
    turns.join(B)
    for _ in range(100):
        turns.join(A)
        turns.start("a", 1.0)
    turns.leave("b")
    turns.join(A)
    turns.start("a", 1.0)
    turns.join(A)
    turns.join(B)
    counters = dict(turns.charged_s())
    assert counters["b"] >= 5.0 and counters["a"] - counters["b"] <= 101.0


def test_weights_share_what_there_is() -> None:
    heavy = Tenant(name="h", weight=3.0)
    queue = queue_of(*((tenant, task(f"{tenant.name}{n}")) for n in range(30) for tenant in (A, heavy)))
    first = [name[0] for name in names(queue, 40)]
    assert 28 <= first.count("h") <= 31


def test_better_classes_go_first() -> None:
    tenants = [Tenant(name=str(each), service_class=each) for each in ServiceClass]
    queue = queue_of(*((tenant, task(f"{tenant.name}{n}")) for tenant in reversed(tenants) for n in range(2)))
    found = [name.rstrip("01") for name in names(queue)]
    assert found == [str(each) for each in ServiceClass for _ in range(2)]


def test_what_turned_out_otherwise_is_put_right() -> None:
    queue = queue_of((A, task("a", answer=900)), (B, task("b", answer=900)))
    queue.start(("a", 0))
    queue.start(("b", 0))
    queue.end(("a", 0), answer_tokens=1, cached_tokens=16)
    queue.refund(("b", 0))
    counters = dict(queue.turns.charged_s())
    assert 0 < counters["a"] < 0.01 and counters["b"] == 0
    queue.add(task("c", answer=10), A)
    queue.start(("c", 0))
    before = dict(queue.turns.charged_s())["a"]
    queue.on_predicted(("c", 0), predicted(900))
    assert dict(queue.turns.charged_s())["a"] > before, "it takes longer than was thought"


def test_a_priority_counts_among_ones_own_and_lets_nobody_pass_others() -> None:
    queue = queue_of((A, task("a0")), (A, task("a1", priority=-5)), (A, task("a2", priority=7)))
    assert names(queue) == ["a1", "a0", "a2"]
    assert queue.rank(("a1", 0))[0] == -5
    queue.add(task("b0"), B)
    assert queue.rank(("a1", 0))[0] == queue.rank(("b0", 0))[0] == turn_at(0, 0.0), "turns count"


def test_who_comes_passes_what_waits_at_workers() -> None:
    feed = Feed(places=2)
    feed.join("w")
    queue = FleetQueue(BY_WORK, feed=feed)
    queue.on_measured(1000.0, 0.01, 1000)
    queue.add(task("c", answer=900), Tenant(name="c"))
    for number in range(6):
        queue.add(task(f"a{number}", answer=900), A)
    for name in ("a0", "a1", "a2"):
        feed.add("w", (name, 0), queue.start((name, 0)), 20)
    feed.discard("w", ("a0", 0))
    queue.add(task("b0", answer=900), B)
    assert names(queue)[0] == "b0"
    ahead = feed.ahead(queue.rank(("b0", 0)))
    assert ahead is not None and ahead.crowds[0].worker_id == "w", "it passes those that wait there"
    assert feed.ahead(queue.rank(("a3", 0))) is None
    feed.check_integrity()


@given(st.integers(-(2**31) + 1, 2**31 - 1), st.sampled_from(list(ServiceClass)), st.floats(0, 1e9))
def test_a_class_outweighs_priorities_and_turns(
    priority: int, service_class: ServiceClass, counter_s: float
) -> None:
    level = {"guaranteed": -1, "standard": 0, "sheddable": 1}[service_class]
    whole = priority_in(service_class, priority)
    turn = turn_at(whole, counter_s)
    assert level_of(whole) == level == level_of(turn)
    assert turn <= turn_at(whole, counter_s + 1.0)
    assert priority_in(ServiceClass.GUARANTEED, priority) < priority_in(ServiceClass.STANDARD, -(2**31))
