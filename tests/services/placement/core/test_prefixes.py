"""What placement makes of news of prefixes, and orders in which waiting prompts are placed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement.core.fleet import FleetCapacity
from services.placement.core.orders import NOT_CACHED, ORDERS, arrange, distance, find_order
from services.placement.core.prefix_index import NOTHING, PrefixIndex
from services.placement.policy.fit import PrefixAware
from shared.errors import ConfigError
from shared.messages.prefixes import MOST_CHAIN_BLOCKS
from tests.services.placement.rig import BLOCK, chain, item, news, report


def test_a_prompt_is_counted_from_its_beginning_by_tier() -> None:
    index = PrefixIndex()
    index.on_news(news(1, 1, 2, 3, 5, tiers=bytes([0, 1, 2, 0])))
    assert index.cached("w0", [chain(1, 2, 3, 4, 5)], 0.0) == (16, 16, 16)
    assert index.cached("w0", [chain(4, 1)], 0.0) == NOTHING
    assert index.cached("w1", [chain(1)], 0.0) == NOTHING and index.cached("w0", [], 0.0) == NOTHING
    assert index.cached("w0", [chain(9), chain(1, block_tokens=32)], 0.0) == (32, 0, 0)


def test_a_gap_is_asked_for_again_and_again_and_later_news_wait() -> None:
    index = PrefixIndex(retry_s=0.5)
    index.on_news(news(1, 1))
    index.on_news(news(3, 3, removed=(1,)))
    assert index.cached("w0", [chain(1)], 0.0) == (16, 0, 0), "not before what came in between"
    ((worker, question),) = index.questions(1.0)
    assert (worker, question.since_seq, question.incarnation) == ("w0", 1, 1)
    assert not list(index.questions(1.4)) and len(list(index.questions(1.5))) == 1
    index.on_answer(news(0, 7, full=True))
    assert index.blocks("w0") == 1, "an old answer changes nothing"
    index.on_answer(news(2, 2))
    assert not list(index.questions(9.0))
    assert index.cached("w0", [chain(2)], 0.0) == index.cached("w0", [chain(3)], 0.0) == (16, 0, 0)
    assert index.cached("w0", [chain(1)], 0.0) == NOTHING
    index.check_integrity()


def test_a_reader_that_starts_late_asks_for_everything() -> None:
    index = PrefixIndex()
    index.on_news(news(40, 1))
    ((_, question),) = index.questions(0.0)
    assert question.since_seq == 0
    index.on_answer(news(41, 1, 2, full=True))
    assert index.blocks("w0") == 2
    index.on_news(news(42, removed=(1, 2)))
    assert index.blocks("w0") == 0


def test_a_worker_that_is_heard_of_is_asked_once() -> None:
    index = PrefixIndex(retry_s=0.5)
    index.expect("w0", [chain(9)], 0.0)
    assert not list(index.questions(0.0)), "nobody is heard of"
    index.on_worker("w0", 3)
    assert [(q.incarnation, q.since_seq) for _, q in index.questions(0.0)] == [(3, 0)]
    index.on_answer(news(0, full=True, incarnation=3))
    index.on_worker("w0", 3)
    assert not list(index.questions(9.0))
    assert index.cached("w0", [chain(9)], 1.0) == (16, 0, 0), "what was expected still is"
    index.on_news(news(1, 4, incarnation=3))
    assert index.blocks("w0") == 1


def test_a_new_incarnation_has_nothing_and_an_old_one_is_not_listened_to() -> None:
    index = PrefixIndex()
    index.on_news(news(1, 1, 2, incarnation=5))
    index.on_worker("w0", 6)
    index.on_news(news(1, 3, incarnation=6))
    index.on_news(news(2, 4, incarnation=5))
    index.on_answer(news(9, 4, full=True, incarnation=5))
    assert index.blocks("w0") == 1
    index.forget("w0")
    assert index.blocks("w0") == 0


def test_what_was_placed_is_expected_for_a_while() -> None:
    index = PrefixIndex(expect_s=5.0)
    index.expect("w0", [chain(1, 2)], 0.0)
    assert index.cached("w0", [chain(1, 2, 3)], 4.0) == (32, 0, 0)
    index.on_news(news(1, 1))
    assert index.cached("w0", [chain(1, 2, 3)], 4.0) == (32, 0, 0), "news that came early change nothing"
    index.on_tick(5.0)
    assert index.cached("w0", [chain(1, 2, 3)], 5.0) == (16, 0, 0)
    index.check_integrity()


def test_everything_is_bounded() -> None:
    index = PrefixIndex()
    long = chain(*range(2000))
    for number in range(80):
        index.expect("w0", [chain(*range(number * 256, number * 256 + 300))], 0.0)
        index.on_news(news(2 + number, number))
        index.check_integrity()
    assert sum(index.cached("w0", [long], 0.0)) <= MOST_CHAIN_BLOCKS * 16


@given(
    waiting=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 3)), max_size=12),
    name=st.sampled_from(sorted(ORDERS)),
)
def test_every_prompt_is_taken_once_and_equal_ones_in_turn(
    waiting: list[tuple[float, int]], name: str
) -> None:
    items = [item("a", waited_s=waited_s) for waited_s, _ in waiting]
    order = arrange(items, [n for _, n in waiting], find_order(name))
    assert sorted(order) == list(range(len(waiting)))
    ranks = [ORDERS[name](*waiting[at]) for at in order]
    assert ranks == sorted(ranks)
    for (first, one), (second, other) in pairwise(zip(ranks, order, strict=True)):
        assert first != second or one < other


@pytest.mark.parametrize(
    ("name", "order"),
    [("policy", [0, 1, 2, 3]), ("fcfs", [0, 3, 1, 2]), ("fpf", [2, 1, 3, 0]), ("relaxed_fpf", [1, 3, 0, 2])],
)
def test_the_papers_weights(name: str, order: list[int]) -> None:
    items = [item("a", waited_s=waited_s) for waited_s in (9.0, 4.0, 2.0, 5.0)]
    assert arrange(items, [3, 1, 0, 2], find_order(name)) == order


def test_the_distance_is_the_tier_at_the_worker_with_the_longest_prefix() -> None:
    asked = item("a", size=100)
    assert distance(asked, []) == NOT_CACHED
    assert distance(asked, [(0, 0, 0), (24, 0, 0)]) == NOT_CACHED, "a shared system prompt is no hit"
    assert distance(asked, [(0, 80, 0), (64, 0, 0)]) == 1
    assert distance(asked, [(80, 0, 0), (0, 80, 0)]) == 0 and distance(asked, [(16, 0, 64)]) == 2


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="relaxed_fpf"):
        find_order("lifo")


@pytest.mark.parametrize(("name", "first"), [("fcfs", 0), ("fpf", 2), ("relaxed_fpf", 1)])
def test_the_fleet_places_in_that_order(name: str, first: int) -> None:
    fleet = FleetCapacity(order=find_order(name))
    fleet.on_reported(report("w0", total=4), 0.0)
    fleet.prefixes.on_news(news(1, 1, 2, tiers=bytes([0, 1])))
    far, old, near = ((9, 9.0), (2, 8.0), (1, 2.0))
    items = tuple(
        item(str(block), 2 * BLOCK, 4 * BLOCK, prefixes=(chain(block),), waited_s=waited_s)
        for block, waited_s in (far, old, near)
    )
    answers = fleet.place(items, frozenset(), PrefixAware(), 0.0)
    fleet.check_integrity()
    assert [at for at, chosen in enumerate(answers) if chosen] == [first]
