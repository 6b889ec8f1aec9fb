"""What leaves and what is loaded: every order keeps its promise, and the gate's choice is the cheapest."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.kv.core.eviction import (
    ORDERS,
    EvictionOrder,
    Fifo,
    Frequent,
    Lru,
    ReuseHistory,
    order_maker,
)
from services.worker.kv.core.load_policy import (
    DROPPED,
    HOST,
    PEERS,
    PROBE_BLOCKS,
    RETRY_LOOKUPS,
    CostGate,
    KvPlace,
)
from services.worker.kv.core.radix_tree import Node, Tier


def node(name: str, *, parent: Node | None = None, **fields: Any) -> Node:
    made = Node(name.encode(), parent)
    made.used = made.inserted = made.hits = 0
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def emptied(order: EvictionOrder) -> list[str]:
    """Names in the order in which they go."""
    gone: list[str] = []
    while (victim := order.pop()) is not None:
        gone.append(victim.name.decode())
    return gone


def order_of(kind: type[EvictionOrder], *nodes: Node, gap: int = 0) -> EvictionOrder:
    history = ReuseHistory()
    history.on_used(0, gap)
    order = kind(history)
    for each in nodes:
        order.add(each)
    return order


class Order(RuleBasedStateMachine):
    """Nodes come, are used, and go: none is lost, none goes twice."""

    kind = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.order = order_maker(self.kind, 3)(Tier.HOST, ReuseHistory())
        self.inside: set[Node] = set()
        self.nodes = [node(str(index)) for index in range(8)]
        self.now = 0

    @rule(index=st.integers(0, 7))
    def add(self, index: int) -> None:
        self.now += 1
        self.nodes[index].used = self.now
        self.nodes[index].hits += 1
        self.order.add(self.nodes[index])
        self.inside.add(self.nodes[index])

    @rule(index=st.integers(0, 7))
    def discard(self, index: int) -> None:
        self.order.discard(self.nodes[index])
        self.inside.discard(self.nodes[index])

    @precondition(lambda self: self.inside)
    @rule()
    def pop(self) -> None:
        victim = self.order.pop()
        assert victim in self.inside
        if self.kind == "lru":
            assert victim.used == min(each.used for each in self.inside)
        self.inside.remove(victim)

    @precondition(lambda self: not self.inside)
    @rule()
    def pop_nothing(self) -> None:
        assert self.order.pop() is None

    @invariant()
    def same(self) -> None:
        assert len(self.order) == len(self.inside)
        assert all((each in self.order) == (each in self.inside) for each in self.nodes)


@pytest.mark.parametrize("name", ORDERS)
def test_nodes_are_conserved(name: str) -> None:
    machine = type(f"Order_{name}", (Order,), {"kind": name})
    case = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(max_examples=20)
    case("runTest").runTest()


def test_lru_goes_by_the_last_use_and_fifo_by_the_first() -> None:
    nodes = (node("a", inserted=1, used=9), node("b", inserted=2, used=5), node("c", inserted=3, used=7))
    assert emptied(order_of(Lru, *nodes)) == ["b", "c", "a"]
    assert emptied(order_of(Fifo, *nodes)) == ["a", "b", "c"]


@pytest.mark.parametrize("kind", [Lru, Fifo, Frequent])
def test_of_one_prompt_the_deepest_goes_first(kind: type[EvictionOrder]) -> None:
    first = node("first")
    second = node("second", parent=first)
    third = node("third", parent=second)
    assert emptied(order_of(kind, second, first, third)) == ["third", "second", "first"]


def test_a_use_is_worth_the_mean_gap_between_uses() -> None:
    used = node("used", used=0, hits=1)
    for gap, expected in ((50, ["fresh", "used"]), (30, ["used", "fresh"])):
        assert emptied(order_of(Frequent, used, node("fresh", used=40), gap=gap)) == expected


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30))
def test_without_uses_frequent_is_lru(times: list[int]) -> None:
    nodes = [node(str(index), used=used) for index, used in enumerate(times)]
    assert emptied(order_of(Frequent, *nodes)) == emptied(order_of(Lru, *nodes))


def test_a_node_that_is_ranked_often_does_not_fill_the_memory() -> None:
    order = order_of(Lru)
    each = node("a")
    for used in range(10_000):
        each.used = used
        order.add(each)
    assert sum(len(heap) for heap in order._heaps.values()) < 100


def test_who_has_more_than_his_share_gives_up_what_is_his() -> None:
    few = [node(f"a{n}", tenant="a", used=n) for n in range(3)]
    many = [node(f"b{n}", tenant="b", used=10 + n) for n in range(9)]
    order = order_of(Lru, *few, *many)
    assert order.first() is many[0]
    told = [each.name.decode() for each in order.preview()]
    gone = emptied(order)
    assert gone == told
    assert gone[:6] == [f"b{n}" for n in range(6)], "until both have as much"
    assert gone[6:] == ["a0", "b6", "a1", "b7", "a2", "b8"]


def test_who_has_not_come_for_long_has_no_share() -> None:
    order = order_of(
        Lru, node("a", tenant="a", used=0), *(node(f"b{n}", tenant="b", used=9000 + n) for n in range(3))
    )
    assert emptied(order)[0] == "a"


def test_the_gap_is_the_mean_of_the_first_uses_and_follows_later_ones() -> None:
    history = ReuseHistory()
    for gap in (10, 20, 30):
        history.on_used(100, 100 + gap)
    assert history.mean_gap == 20
    for _ in range(20_000):
        history.on_used(0, 500)
    assert 495 < history.mean_gap < 500


def test_a_dropped_block_that_comes_back_was_used_before() -> None:
    history = ReuseHistory()
    dropped = node("a", hits=2)
    history.on_stored(dropped, 7)
    dropped.hits = 2
    history.on_dropped(dropped)
    again, other = node("a"), node("b")
    history.on_stored(again, 57)
    history.on_stored(other, 57)
    assert (again.hits, again.used, again.inserted) == (3, 57, 57)
    assert (other.hits, other.used) == (0, 57)
    assert history.mean_gap == 50


def test_how_many_come_back_is_known_of_many_and_counts_each_once() -> None:
    history = ReuseHistory()
    nodes = [node(str(number)) for number in range(300)]
    for number, each in enumerate(nodes):
        assert (history.returning is None) == (number < 256)
        history.on_stored(each, number)
    for each in nodes[:30]:  # Used again on the device, then dropped, and stored once more.
        history.on_returned()
        each.hits = 1
        history.on_dropped(each)
        history.on_stored(node(each.name.decode()), 400)
    for each in nodes[30:60]:
        history.on_dropped(each)
        history.on_stored(node(each.name.decode()), 400)
    assert history.returning == 60 / 300
    for number in range(8192):
        history.on_stored(node(f"new {number}"), 500)
    assert history.returning is not None and 0 < history.returning < 60 / 4096


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
    saved = gate.saved_s[Tier.DEVICE], gate.saved_s[Tier.HOST], gate.spent_s[Tier.HOST]
    assert saved == pytest.approx((0.005, 0.010, 0.006 + 1e-5))


def test_patience_grows_with_what_recomputing_would_take() -> None:
    gate = CostGate()
    assert gate.most_s(10) == 1.0
    gate.on_prefilled(10, 0.1)
    assert gate.most_s(10) == pytest.approx(0.2)
    assert gate.most_s(0) == 0.05


@given(SPEED, SPEED, SPEED, st.floats(0, 1), st.booleans())
def test_a_block_goes_where_it_is_expected_to_cost_least(
    host_s: float, peer_s: float, recompute_s: float, returning: float, has_peers: bool
) -> None:
    gate = gate_of(host_s, 1.0, recompute_s)
    gate.profile(Tier.PEER, peer_s)
    cost_s: dict[KvPlace, float] = {
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
