"""The fleet's queue: the order of requests and tenants, how long one can be passed, how workers are fed."""

from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from services.scheduler.core.backlog import Feed
from services.scheduler.policy.contract import (
    BY_WORK,
    PASSING_SHARE,
    PolicySettings,
    QueueRule,
    Task,
    level_of,
    priority_in,
    queue_rule,
    turn_at,
)
from services.scheduler.policy.estimates import WorkerSpeeds
from services.scheduler.policy.first_come import VllmPolicy
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES, FleetQueue
from services.scheduler.policy.kvasir import KvasirPolicy
from services.scheduler.policy.waiting_queue import PassingBudget
from shared.messages.sequence import NOBODY, SequenceKey, ServiceClass, Tenant
from tests.shared.messages.builders import predicted

MEMORY_TOKENS = 1000


def task(name: str, arrival_s: float, answer: int, prompt: int = 10) -> Task:
    return Task((name, 0), prompt, 4000, arrival_s, prediction=predicted(answer))


def queue(*tasks: Task, rule: QueueRule = BY_WORK) -> FleetQueue:
    made = FleetQueue(rule)
    made.on_measured(1000.0, 0.01, MEMORY_TOKENS)
    for one in tasks:
        made.add(one)
    made.check_integrity()
    return made


def names(keys: list[SequenceKey]) -> str:
    return "".join(key[0] for key in keys)


def test_by_arrival_or_by_work_as_the_policy_wants_it() -> None:
    tasks = [task("l", 0.0, 300), task("s", 1.0, 10), task("m", 2.0, 100)]
    assert names(queue(*tasks, rule=queue_rule(VllmPolicy, PolicySettings())).next(3)) == "lsm"
    of_kvasir = queue_rule(partial(KvasirPolicy), PolicySettings())
    assert of_kvasir.passing_share == PASSING_SHARE and names(queue(*tasks, rule=of_kvasir).next(3)) == "sml"
    assert names(queue(*tasks, rule=of_kvasir).next(2)) == "sm"


def test_a_late_prediction_changes_the_place_of_one_that_waits() -> None:
    made = queue(task("a", 0.0, 50), task("b", 1.0, 100))
    made.on_predicted(("b", 0), predicted(5))
    made.on_predicted(("nobody", 0), predicted(5))
    assert names(made.next(2)) == "ba"


def test_the_expected_wait_counts_only_what_goes_before() -> None:
    made = queue(task("m", 0.0, 300), task("l", 1.0, 3000))
    made.foreseen.on_tick(0.0, 1)
    medium_s, long_s = (made.work_s(each) / made.foreseen.rate.per_worker for each in made)
    waits_s = [made.wait_s(task("n", 2.0, answer), NOBODY) for answer in (10, 600, 4000)]
    assert waits_s == pytest.approx([0.0, medium_s, medium_s + long_s])
    assert made.wait_s(structs.replace(task("n", 2.0, 4000), priority=-1), NOBODY) == 0


def test_what_passes_the_oldest_is_bounded_and_asking_changes_nothing() -> None:
    made = queue(task("o", 0.0, 3000), *(task(f"{n:02d}", 1.0 + n, 400) for n in range(40)))
    told = made.next(41)
    assert told == made.next(41) and 0 < told.index(("o", 0)) < 20
    for key in told:
        assert made.next(1) == [key]
        made.start(key)
        made.check_integrity()
    assert len(made) == 0


@given(
    answers=st.lists(st.integers(1, 900), min_size=2, max_size=60),
    share=st.sampled_from([0.0, 0.2, PASSING_SHARE, 0.7]),
)
def test_nobody_waits_for_more_than_the_bound(answers: list[int], share: float) -> None:
    """Work that passes the oldest is at most share / (1 - share) of what starts in the order of arrival, and
    a few starts more."""
    budget = PassingBudget(share)
    made = FleetQueue(BY_WORK, budget)
    made.on_measured(1000.0, 0.01, MEMORY_TOKENS)
    speeds = WorkerSpeeds()
    speeds.on_measured(1000.0, 0.01)
    work_s = {}
    for index, answer in enumerate(answers):
        one = task(f"{index:03d}", float(index), answer)
        work_s[one.key] = speeds.occupied_s(one.prompt_tokens, answer, MEMORY_TOKENS)
        made.add(one)
    passed_s = oldest_s = 0.0
    while len(made):
        oldest = next(iter(made)).key
        (key,) = made.next(1)
        made.start(key)
        if key == oldest:
            oldest_s += work_s[key]
        else:
            passed_s += work_s[key]
        most_s = share / (1 - share) * oldest_s + 9 * max(work_s.values())
        assert passed_s <= most_s + 1e-6


def fed(*ranks: float, worker_id: str = "w0", feed: Feed | None = None) -> Feed:
    made = feed or Feed()
    made.join(worker_id)
    for number, rank in enumerate(ranks):
        made.add(worker_id, (f"r{number}", 0), (rank,), 5)
        made.check_integrity()
    return made


def test_a_few_wait_at_each_worker_and_whoever_comes_before_them_all_joins_them() -> None:
    feed = fed(10.0, 11.0, 12.0)
    ahead = feed.ahead((50.0,))
    assert ahead is not None and ahead.places == FEED_SEQUENCES
    assert [(one.worker_id, one.places, one.tokens) for one in ahead.crowds] == [("w0", 1, 15)]
    feed.add("w0", ("r3", 0), (13.0,), 5)
    assert feed.ahead((50.0,)) is None
    better = feed.ahead((9.0,))
    assert better is not None and better.closed == () and better.crowds[0].places == 1
    before = feed.has_freed
    feed.discard("w0", ("r1", 0))
    feed.discard("w0", ("r1", 0))
    assert (before, feed.has_freed) == (False, True) and feed.ahead((50.0,)) is not None
    feed.leave("w0")
    feed.check_integrity()
    assert feed.ahead() is None and feed.waiting("w0") == frozenset()


def test_not_even_the_best_crowd_a_worker_without_end() -> None:
    crowd = fed(*(100.0 - number for number in range(8 * FEED_SEQUENCES)))
    assert crowd.ahead((0.0,)) is None


def test_a_question_names_few_workers_however_many_there_are() -> None:
    feed = fed(*range(FEED_SEQUENCES))
    for number in range(1, 1000):
        fed(*range(FEED_SEQUENCES if number % 2 else 2), worker_id=f"w{number}", feed=feed)
    ahead = feed.ahead((50.0,))
    assert ahead is not None and 0 < len(ahead.only) <= 64 and len(ahead.crowds) <= 128
    assert all(int(worker_id[1:]) % 2 == 0 for worker_id in ahead.only)


def test_without_places_nobody_waits_where_there_is_no_memory_and_nobody_is_shut_out() -> None:
    feed = fed(feed=Feed(places=0))
    for number in range(20):
        feed.add("w0", (f"r{number}", 0), (1.0 + number,), 5)
    ahead = feed.ahead((0.5,))
    assert ahead is not None and ahead.closed == () and ahead.places == 0
    assert [crowd.places for crowd in ahead.crowds] == [0]


def test_a_turn_is_explained_by_what_each_was_served_and_what_the_others_next_would_take() -> None:
    made = queue(task("a", 0.0, 100))
    assert made.explain(("a", 0)) is None, "nobody else waits"
    made.add(task("b", 1.0, 300), Tenant(name="other"))
    made.start(("a", 0))
    made.add(task("c", 2.0, 50))
    told = made.explain(("b", 0))
    assert told is not None and told.tenant == "other"
    assert [name for name, _ in told.served_s] == ["other", NOBODY.name], "who was served less comes first"
    assert dict(told.served_s)["other"] < dict(told.served_s)[NOBODY.name]
    costs_s = dict(told.costs_s)
    assert costs_s["other"] == made.work_s(task("b", 1.0, 300)) > costs_s[NOBODY.name] > 0


A, B = Tenant(name="a"), Tenant(name="b")


def asked(name: str, answer: int = 50, priority: int = 0, arrival_s: float = 0.0) -> Task:
    return Task((name, 0), 20, 4000, arrival_s, prediction=predicted(answer), priority=priority)


def queue_of(*waiting: tuple[Tenant, Task]) -> FleetQueue:
    made = FleetQueue(BY_WORK)
    made.on_measured(1000.0, 0.01, 1000)
    for tenant, one in waiting:
        made.add(one, tenant)
    made.check_integrity()
    return made


def order(queue: FleetQueue, count: int = 64) -> list[str]:
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
def test_between_two_that_always_wait_service_differs_by_the_bound(events: list[tuple[object, ...]]) -> None:
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
            queue.add(asked(f"{number:03d}", answer, arrival_s=float(number)), tenant)
            waiting[f"{number:03d}"] = tenant.name
        elif event[0] == "start" and len(queue):
            (key,) = queue.next(1)
            name = waiting.pop(key[0])
            before = dict(queue.charged_s())[name]
            queue.start(key)
            cost = (dict(queue.charged_s())[name] - before) * weights[name]
            largest = max(largest, cost / weights[name])
            charge(name, cost)
            running.append((key[0], cost))
        elif event[0] == "end" and running:
            at, answer = event[1], event[2]
            assert isinstance(at, int) and isinstance(answer, int)
            started, _ = running.pop(at % len(running))
            before_all = dict(queue.charged_s())
            queue.end((started, 0), answer, cached_tokens=answer % 20)
            for name, counter_s in queue.charged_s():
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
def test_who_is_told_to_be_next_is_who_goes_next(wanted: list[tuple[Tenant, int]]) -> None:
    queue = queue_of(*((tenant, asked(f"{at:02d}", answer)) for at, (tenant, answer) in enumerate(wanted)))
    for key in queue.next(len(wanted) + 1):
        assert queue.next(1) == [key]
        queue.start(key)
    assert not len(queue) and queue.next(1) == []


def test_one_that_floods_waits_for_one_that_asks_now_and_then() -> None:
    queue = queue_of(*((A, asked(f"a{n}")) for n in range(9)))
    for _ in range(4):
        queue.start(queue.next(1)[0])
    queue.add(asked("b0", answer=900), B)
    assert order(queue)[0] == "b0", "it is lifted to a's counter, and was served longer ago"
    queue.start(("b0", 0))
    assert order(queue, 3) == ["a4", "a5", "a6"], "one long answer is worth many short ones"


def test_what_one_did_not_use_is_not_saved_up() -> None:
    queue = queue_of((A, asked("a", answer=900)), (B, asked("b")))
    queue.remove(("b", 0))
    for number in range(100):
        queue.add(asked(f"a{number}"), A)
        queue.start((f"a{number}", 0))
        queue.end((f"a{number}", 0), None)
    before = dict(queue.charged_s())
    queue.add(asked("c"), A)
    queue.add(asked("d"), B)
    counters = dict(queue.charged_s())
    assert before["b"] < counters["b"] <= counters["a"], "it is lifted to what waits"


def test_weights_share_what_there_is() -> None:
    heavy = Tenant(name="h", weight=3.0)
    queue = queue_of(*((tenant, asked(f"{tenant.name}{n}")) for n in range(30) for tenant in (A, heavy)))
    first = [name[0] for name in order(queue, 40)]
    assert 28 <= first.count("h") <= 31


def test_better_classes_go_first() -> None:
    tenants = [Tenant(name=str(each), service_class=each) for each in ServiceClass]
    queue = queue_of(*((tenant, asked(f"{tenant.name}{n}")) for tenant in tenants[::-1] for n in range(2)))
    found = [name.rstrip("01") for name in order(queue)]
    assert found == [str(each) for each in ServiceClass for _ in range(2)]


def test_what_turned_out_otherwise_is_put_right() -> None:
    queue = queue_of((A, asked("a", answer=900)), (B, asked("b", answer=900)))
    queue.start(("a", 0))
    queue.start(("b", 0))
    queue.end(("a", 0), answer_tokens=1, cached_tokens=16)
    queue.refund(("b", 0))
    counters = dict(queue.charged_s())
    assert 0 < counters["a"] < 0.01 and counters["b"] == 0
    queue.add(asked("c", answer=10), A)
    queue.start(("c", 0))
    before = dict(queue.charged_s())["a"]
    queue.on_predicted(("c", 0), predicted(900))
    assert dict(queue.charged_s())["a"] > before, "it takes longer than was thought"


def test_a_priority_counts_among_ones_own_and_lets_nobody_pass_others() -> None:
    queue = queue_of((A, asked("a0")), (A, asked("a1", priority=-5)), (A, asked("a2", priority=7)))
    assert order(queue) == ["a1", "a0", "a2"] and queue.rank(("a1", 0))[0] == -5
    queue.add(asked("b0"), B)
    assert queue.rank(("a1", 0))[0] == queue.rank(("b0", 0))[0] == turn_at(0, 0.0), "turns count"


def test_who_comes_passes_what_waits_at_workers() -> None:
    feed = Feed(places=2)
    feed.join("w")
    queue = FleetQueue(BY_WORK)
    feed.on_left = queue.begin
    queue.on_measured(1000.0, 0.01, 1000)
    queue.add(asked("c", answer=900), Tenant(name="c"))
    for number in range(6):
        queue.add(asked(f"a{number}", answer=900), A)
    for name in ("a0", "a1", "a2"):
        feed.add("w", (name, 0), queue.start((name, 0)), 20)
    feed.discard("w", ("a0", 0))
    queue.add(asked("b0", answer=900), B)
    assert order(queue)[0] == "b0"
    ahead = feed.ahead(queue.rank(("b0", 0)))
    assert ahead is not None and ahead.crowds[0].worker_id == "w", "it passes those that wait there"
    assert feed.ahead(queue.rank(("a3", 0))) is None
    feed.check_integrity()


@given(st.integers(-(2**31) + 1, 2**31 - 1), st.sampled_from(list(ServiceClass)), st.floats(0, 1e9))
def test_a_class_outweighs_priorities(priority: int, service_class: ServiceClass, counter_s: float) -> None:
    level = {"guaranteed": -1, "standard": 0, "sheddable": 1}[service_class]
    whole = priority_in(service_class, priority)
    turn = turn_at(whole, counter_s)
    assert level_of(whole) == level == level_of(turn) and turn <= turn_at(whole, counter_s + 1.0)
    assert priority_in(ServiceClass.GUARANTEED, priority) < priority_in(ServiceClass.STANDARD, -(2**31))
