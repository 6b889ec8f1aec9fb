"""The ladder: the cheapest rung that is enough, its order where costs are equal, each rung switchable."""

from dataclasses import replace
from math import isfinite
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.relief import (
    LADDER,
    TIE_SHARE,
    MemoryPressure,
    ReliefSpeeds,
    Rung,
    Victim,
    next_relief,
)

SPEEDS = ReliefSpeeds(4000, 0.02, 2000, 1000, remote_attention_s=1e-5, stall_s=0.0005)
_KNOWN: dict[str, Any] = {"host_tier_blocks": 100, "growable_blocks": 20, "lendable_blocks": 50}
_KNOWN |= {"room_blocks": 60, "victim": Victim(blocks=40, tokens=640, remaining_tokens=100)}
_KNOWN |= {"frees_within_steps": 30, "frees_blocks": 12}
ALL = MemoryPressure(4, 16, 8, 100, SPEEDS, is_linked=True, **_KNOWN)


def chosen(pressure: MemoryPressure, *off: str) -> str | None:
    relief = next_relief(pressure, frozenset(off))
    return None if relief.chosen is None else relief.chosen.rung


def test_each_rung_is_taken_when_the_cheaper_ones_are_switched_off() -> None:
    """On this machine; the order is that of the costs, not of the ladder."""
    off: list[str] = []
    while (rung := chosen(ALL, *off)) is not None:
        off.append(rung)
    assert set(off) == set(LADDER)
    assert off.index(Rung.MIGRATE) < off.index(Rung.SWAP) < off.index(Rung.RECOMPUTE)


@pytest.mark.parametrize("rung", LADDER)
def test_a_rung_that_is_switched_off_is_not_even_weighed(rung: str) -> None:
    relief = next_relief(ALL, frozenset({rung}))
    assert rung not in {offer.rung for offer in relief.offers}


def test_measured_costs_decide_not_the_order() -> None:
    hot = replace(ALL, speeds=replace(SPEEDS, stall_s=0.0))
    assert chosen(hot) == Rung.EXPAND, "no stall: the layers cost nothing"
    stalling = replace(hot, speeds=replace(SPEEDS, stall_s=0.05))
    assert chosen(stalling) != Rung.EXPAND


def test_a_slow_link_makes_it_move_by_tokens_and_no_link_rules_borrowing_out() -> None:
    slow = replace(ALL, speeds=replace(SPEEDS, link_blocks_per_s=1))
    (offer,) = [o for o in next_relief(slow).offers if o.rung == Rung.MIGRATE]
    assert offer.reason == "by tokens"
    alone = replace(ALL, is_linked=False)
    assert Rung.BORROW not in {o.rung for o in next_relief(alone).offers}


def test_blocks_beyond_the_need_are_worth_nothing() -> None:
    """A large request costs more to move; it is worth it only where so many blocks are needed."""
    off = tuple(rung for rung in LADDER if rung not in {Rung.MIGRATE, Rung.EXPAND})
    assert chosen(replace(ALL, needed_blocks=1, growable_blocks=1), *off) == Rung.MIGRATE
    cheap_layer = replace(ALL, needed_blocks=1, growable_blocks=1, speeds=replace(SPEEDS, stall_s=1e-5))
    assert chosen(cheap_layer, *off) == Rung.EXPAND
    assert chosen(replace(cheap_layer, needed_blocks=40), *off) == Rung.MIGRATE


def test_nothing_left_means_wait_and_the_log_says_what_was_weighed() -> None:
    bare = MemoryPressure(needed_blocks=1, block_tokens=16, running=1, horizon_steps=1, speeds=SPEEDS)
    assert next_relief(bare).chosen is None and next_relief(bare).reason == "wait of nothing"
    assert next_relief(ALL).reason.startswith("borrow of expand 20 blocks for 400 ms (0.5 ms a step), ")
    with pytest.raises(ValueError, match="nobody needs"):
        next_relief(replace(bare, needed_blocks=0))


def test_what_was_never_measured_is_not_counted_on() -> None:
    unknown = replace(ALL, speeds=ReliefSpeeds(), growable_blocks=0)
    assert next_relief(unknown).offers == ()


speeds = st.builds(ReliefSpeeds, *[st.sampled_from([0.0, 1e-4, 0.01, 1.0, 500.0, 1e5])] * 6)
counts = st.integers(0, 100)
pressures = st.builds(
    MemoryPressure,
    needed_blocks=st.integers(1, 60),
    block_tokens=st.sampled_from([1, 16]),
    running=counts,
    horizon_steps=counts,
    speeds=speeds,
    host_tier_blocks=counts,
    growable_blocks=counts,
    lendable_blocks=counts,
    room_blocks=counts,
    is_linked=st.booleans(),
    victim=st.none() | st.builds(Victim, st.integers(1, 100), st.integers(1, 2000), counts),
    frees_within_steps=st.none() | counts,
    frees_blocks=counts,
)


@given(pressures, st.frozensets(st.sampled_from(LADDER)))
def test_the_choice_is_offered_and_none_is_cheaper(pressure: MemoryPressure, off: frozenset[str]) -> None:
    relief = next_relief(pressure, off)
    assert next_relief(pressure, off) == relief, "deterministic"
    assert [of.rung for of in relief.offers] == [r for r in LADDER if r in {o.rung for o in relief.offers}]
    for offer in relief.offers:
        assert offer.rung not in off and offer.blocks > 0 and offer.cost_s >= 0 and isfinite(offer.cost_s)
        assert offer.rung in relief.reason
    if relief.chosen is None:
        assert not relief.offers
        return
    needed = pressure.needed_blocks
    costs_s = [offer.cost_s / min(offer.blocks, needed) for offer in relief.offers]
    chosen_s = relief.chosen.cost_s / min(relief.chosen.blocks, needed)
    assert chosen_s <= min(costs_s) * (1 + TIE_SHARE) + 1e-6
