"""The gate's choice is the cheapest of all, and a tier that loses is left alone until it recovers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.core.load_policy import (
    DROPPED,
    HOST,
    PEERS,
    PROBE_BLOCKS,
    RETRY_LOOKUPS,
    CostGate,
    Place,
)
from services.worker.kv.core.radix_tree import Tier

LOWER = st.sampled_from([Tier.HOST, Tier.DISK])
SPEED = st.floats(1e-6, 10)


def gate_of(host_s: float, disk_s: float, recompute_s: float) -> CostGate:
    """Seconds per block, each measured."""
    gate = CostGate()
    gate.on_loaded(Tier.HOST, 1, host_s)
    gate.on_loaded(Tier.DISK, 1, disk_s)
    gate.on_prefilled(1, recompute_s)
    return gate


@given(SPEED, SPEED, SPEED, st.lists(LOWER, max_size=20))
def test_no_other_choice_is_cheaper(
    host_s: float, disk_s: float, recompute_s: float, tiers: list[Tier]
) -> None:
    block_s = {Tier.HOST: host_s, Tier.DISK: disk_s}
    chosen = gate_of(host_s, disk_s, recompute_s).worth_loading(tiers)

    def cost_s(loaded: int) -> float:
        return sum(block_s[tier] for tier in tiers[:loaded]) + recompute_s * (len(tiers) - loaded)

    assert cost_s(chosen) <= min(map(cost_s, range(len(tiers) + 1))) * (1 + 1e-9)


@given(SPEED, SPEED, SPEED, st.floats(0, 1), st.booleans())
def test_a_block_goes_where_it_is_expected_to_cost_least(
    host_s: float, peer_s: float, recompute_s: float, returning: float, has_peers: bool
) -> None:
    gate = gate_of(host_s, 1.0, recompute_s)
    gate.profile(Tier.PEER, peer_s)
    cost_s: dict[Place, float] = {
        HOST: host_s + returning * host_s,
        PEERS: returning * peer_s,
        DROPPED: returning * recompute_s,
    }
    places = (HOST, PEERS, DROPPED) if has_peers else (HOST, DROPPED)
    chosen = gate.cheapest(places, returning)
    assert cost_s[chosen] <= min(cost_s[place] for place in places) * (1 + 1e-9)


def test_the_first_place_is_used_while_a_cost_is_unknown() -> None:
    gate = gate_of(host_s=1.0, disk_s=1.0, recompute_s=1e-6)
    assert gate.cheapest((HOST, DROPPED), None) is HOST
    assert gate.cheapest((HOST, DROPPED), 0.5) is DROPPED
    assert gate.cheapest((PEERS, DROPPED)) is PEERS
    fresh = CostGate()
    fresh.profile(Tier.HOST, 1.0)
    assert fresh.cheapest((HOST, DROPPED), 0.5) is HOST


def test_what_nobody_measured_is_tried_with_a_few_blocks() -> None:
    gate = CostGate()
    assert gate.worth_loading([Tier.DISK] * 20) == 20
    gate.on_prefilled(1, 0.001)
    assert gate.worth_loading([Tier.DISK] * 20) == PROBE_BLOCKS
    gate.on_loaded(Tier.HOST, 1, 1e-5)
    assert gate.worth_loading([Tier.HOST] * 10 + [Tier.DISK] * 20) == 10 + PROBE_BLOCKS


def test_a_tier_that_lost_is_probed_again_and_used_when_it_recovered() -> None:
    gate = gate_of(host_s=1e-5, disk_s=1.0, recompute_s=0.001)
    assert gate.losing == (Tier.DISK,)
    chosen = [gate.worth_loading([Tier.DISK] * 10) for _ in range(RETRY_LOOKUPS + 1)]
    assert chosen == [0] * RETRY_LOOKUPS + [PROBE_BLOCKS]
    assert gate.refused_blocks[Tier.DISK] == 10 * RETRY_LOOKUPS + 10 - PROBE_BLOCKS
    gate.on_loaded(Tier.DISK, PROBE_BLOCKS, 1e-4)
    assert gate.worth_loading([Tier.DISK] * 10) == 10
    assert not gate.losing


def test_a_probe_that_loses_again_is_not_repeated_at_once() -> None:
    gate = gate_of(host_s=1e-5, disk_s=1.0, recompute_s=0.001)
    for _ in range(RETRY_LOOKUPS):
        gate.worth_loading([Tier.DISK])
    gate.on_wasted(Tier.DISK, 0.002, abandoned=True)
    assert gate.worth_loading([Tier.DISK] * 4) == 0


def test_a_damaged_block_says_nothing_of_the_speed() -> None:
    gate = gate_of(host_s=1e-5, disk_s=1e-4, recompute_s=0.001)
    gate.on_wasted(Tier.DISK, 9.0, abandoned=False)
    assert gate.worth_loading([Tier.DISK] * 4) == 4
    assert gate.spent_s[Tier.DISK] == pytest.approx(9.0 + 1e-4)


def test_each_tier_knows_what_it_saved_and_cost() -> None:
    gate = gate_of(host_s=1e-5, disk_s=1e-4, recompute_s=0.001)
    gate.on_loaded(Tier.DEVICE, 5, 0.0)
    gate.on_loaded(Tier.HOST, 10, 0.002)
    gate.spent_s[Tier.HOST] += 0.004
    assert gate.saved_s[Tier.DEVICE] == pytest.approx(0.005)
    assert gate.saved_s[Tier.HOST] == pytest.approx(0.010)
    assert gate.spent_s[Tier.HOST] == pytest.approx(0.006 + 1e-5)


def test_patience_grows_with_what_recomputing_would_take() -> None:
    gate = CostGate()
    assert gate.most_s(10) == 1.0
    gate.on_prefilled(10, 0.1)
    assert gate.most_s(10) == pytest.approx(0.2)
    assert gate.most_s(0) == 0.05
