"""The fleet's queue: by arrival or by work, how long the oldest can be passed, and how workers are fed."""

from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.contract import (
    BY_WORK,
    PASSING_SHARE,
    PolicySettings,
    QueueRule,
    Task,
    queue_rule,
)
from services.scheduler.policy.first_come import VllmPolicy
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES, Feed, FleetQueue
from services.scheduler.policy.kvasir import KvasirPolicy
from services.scheduler.policy.lengths import WorkerSpeeds
from services.scheduler.policy.waiting_queue import PassingBudget
from shared.messages.sequence import NOBODY, SequenceKey, Tenant
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
    assert of_kvasir.passing_share == PASSING_SHARE
    assert names(queue(*tasks, rule=of_kvasir).next(3)) == "sml"
    assert names(queue(*tasks, rule=of_kvasir).next(2)) == "sm"


def test_a_late_prediction_changes_the_place_of_one_that_waits() -> None:
    made = queue(task("a", 0.0, 50), task("b", 1.0, 100))
    made.on_predicted(("b", 0), predicted(5))
    made.on_predicted(("nobody", 0), predicted(5))
    assert names(made.next(2)) == "ba"


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
    assert not feed.has_freed()
    feed.discard("w0", ("r1", 0))
    feed.discard("w0", ("r1", 0))
    assert feed.has_freed() and not feed.has_freed()
    assert feed.ahead((50.0,)) is not None
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
    assert ahead is not None
    assert 0 < len(ahead.only) <= 64 and len(ahead.crowds) <= 128
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
