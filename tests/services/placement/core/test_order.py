"""Orders in which waiting prompts are placed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement.core.fleet import FleetCapacity
from services.placement.core.order import NOT_CACHED, ORDERS, arrange, distance, find_order
from services.placement.policy.fit import PrefixAware
from shared.errors import ConfigError
from tests.services.placement.rig import BLOCK, chain, item, news, report


@given(
    waiting=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 3)), max_size=12),
    name=st.sampled_from(sorted(ORDERS)),
)
def test_every_prompt_is_taken_once_and_equal_ones_in_the_given_order(
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
    [
        ("policy", [0, 1, 2, 3]),
        ("fcfs", [0, 3, 1, 2]),
        ("fpf", [2, 1, 3, 0]),
        ("relaxed_fpf", [1, 3, 0, 2]),
    ],
)
def test_the_papers_weights(name: str, order: list[int]) -> None:
    items = [item("a", waited_s=waited_s) for waited_s in (9.0, 4.0, 2.0, 5.0)]
    assert arrange(items, [3, 1, 0, 2], find_order(name)) == order


def test_the_distance_is_the_tier_at_the_worker_with_the_longest_prefix() -> None:
    asked = item("a", size=100)
    assert distance(asked, []) == NOT_CACHED
    assert distance(asked, [(0, 0, 0), (24, 0, 0)]) == NOT_CACHED, "a shared system prompt is no hit"
    assert distance(asked, [(0, 80, 0), (64, 0, 0)]) == 1
    assert distance(asked, [(80, 0, 0), (0, 80, 0)]) == 0
    assert distance(asked, [(16, 0, 64)]) == 2


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
