"""Orders of the queue before the workers."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement.core.fleet import FleetCapacity
from services.placement.core.order import NOT_CACHED, ORDERS, Waiting, arrange, distance, find_order
from services.placement.policy.fit import PrefixAware
from shared.errors import ConfigError
from tests.services.placement.rig import BLOCK, chain, item, news, report

waitings = st.lists(st.builds(Waiting, st.floats(0, 100), st.integers(0, 3)), max_size=12)


@given(waiting=waitings, name=st.sampled_from(sorted(ORDERS)))
def test_every_prompt_is_taken_once_and_equal_ones_as_they_came(waiting: list[Waiting], name: str) -> None:
    order = arrange(waiting, find_order(name))
    assert sorted(order) == list(range(len(waiting)))
    ranks = [ORDERS[name](waiting[at]) for at in order]
    assert ranks == sorted(ranks)
    for earlier, later in pairwise(order):
        assert ORDERS[name](waiting[earlier]) != ORDERS[name](waiting[later]) or earlier < later


def test_the_papers_weights() -> None:
    waiting = [Waiting(9.0, 3), Waiting(4.0, 1), Waiting(2.0, 0), Waiting(5.0, 2)]
    assert arrange(waiting, ORDERS["policy"]) == [0, 1, 2, 3]
    assert arrange(waiting, ORDERS["fcfs"]) == [0, 3, 1, 2]
    assert arrange(waiting, ORDERS["fpf"]) == [2, 1, 3, 0]
    assert arrange(waiting, ORDERS["relaxed_fpf"]) == [1, 3, 0, 2]


def test_distance_is_that_of_what_is_cached_where_most_is() -> None:
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
    asked = [
        item("far", size=2 * BLOCK, limit=4 * BLOCK, prefixes=(chain(9),)),
        item("old", size=2 * BLOCK, limit=4 * BLOCK, prefixes=(chain(2),)),
        item("near", size=2 * BLOCK, limit=4 * BLOCK, prefixes=(chain(1),)),
    ]
    waited = [9.0, 8.0, 2.0]
    items = tuple(
        type(one)(**{**{f: getattr(one, f) for f in one.__struct_fields__}, "waited_s": waited_s})
        for one, waited_s in zip(asked, waited, strict=True)
    )
    answers = fleet.place(items, frozenset(), PrefixAware(), 0.0)
    fleet.check_integrity()
    assert [at for at, chosen in enumerate(answers) if chosen] == [first]
