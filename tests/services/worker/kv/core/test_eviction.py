"""Every order gives up each node once, whole chains deepest first, and in the order its name promises."""

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
from services.worker.kv.core.radix_tree import Node, Tier


def node(name: str, *, used: int = 0, inserted: int = 0, hits: int = 0, parent: Node | None = None) -> Node:
    made = Node(name.encode(), parent)
    made.used, made.inserted, made.hits = used, inserted, hits
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


def owned(name: str, tenant: str, used: int) -> Node:
    made = node(name, used=used)
    made.tenant = tenant
    return made


def test_who_has_more_than_his_share_gives_up_what_is_his() -> None:
    few = [owned(f"a{n}", "a", used=n) for n in range(3)]
    many = [owned(f"b{n}", "b", used=10 + n) for n in range(9)]
    order = order_of(Lru, *few, *many)
    assert order.first() is many[0]
    told = [each.name.decode() for each in order.preview()]
    gone = emptied(order)
    assert gone == told
    assert gone[:6] == [f"b{n}" for n in range(6)], "until both have as much"
    assert gone[6:] == ["a0", "b6", "a1", "b7", "a2", "b8"]


def test_who_has_not_come_for_long_has_no_share() -> None:
    order = order_of(Lru, owned("a", "a", used=0), *(owned(f"b{n}", "b", used=9000 + n) for n in range(3)))
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
