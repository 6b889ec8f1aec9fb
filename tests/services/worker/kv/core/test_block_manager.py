"""The books: what hangs on what goes with it, what is used stays, and slots are conserved."""

from collections.abc import Iterator

import pytest

from services.worker.kv.core.block_manager import Inventory, Tiers
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.eviction import Lru, ReuseHistory, SlotPool, order_maker
from services.worker.kv.core.radix_tree import Node, Tier


def books_of(device: int = 4, host: int = 2, disk: int = 2) -> Inventory:
    return Inventory(BlockPool(device, 2), Tiers(host, disk), order_maker("lru"))


@pytest.fixture
def books() -> Iterator[Inventory]:
    made = books_of()
    yield made
    made.check_integrity([])


def grown(books: Inventory, tier: Tier, *names: bytes) -> list[Node]:
    """A chain of blocks in one tier."""
    nodes: list[Node] = []
    for name in names:
        node = books.enter(name, nodes[-1] if nodes else None)
        place = books.pool.allocate(1)[0] if tier is Tier.DEVICE else books.slot(tier)
        assert place is not None
        books.put(node, tier, place)
        nodes.append(node)
    return nodes


def test_a_used_block_keeps_its_beginning(books: Inventory) -> None:
    first, second, third = grown(books, Tier.DEVICE, b"a", b"b", b"c")
    books.hold(second)
    assert books.evictable == 1
    assert books.pop_device() is third
    assert books.pop_device() is None
    books.remove(third, Tier.DEVICE)
    books.let_go(second)
    assert (first.busy, books.evictable) == (0, 2)


def test_a_used_block_that_lost_its_copies_goes_when_its_user_does(books: Inventory) -> None:
    first, second = grown(books, Tier.DISK, b"a", b"b")
    books.hold(first)
    books.remove(first, Tier.DISK)
    assert books.tree.match([b"a", b"b"]) == []
    assert books.tree.find(b"b") is second
    books.let_go(first)
    assert len(books.tree) == 0


def test_copies_that_the_device_has_as_well_go_first() -> None:
    books = books_of()
    (alone,) = grown(books, Tier.HOST, b"a")
    (both,) = grown(books, Tier.DEVICE, b"b")
    place = books.slot(Tier.HOST)
    assert place is not None
    books.put(both, Tier.HOST, place)
    books.check_integrity([])
    assert books.slot(Tier.HOST) == place
    assert both.places[Tier.HOST] is None
    assert alone.places[Tier.HOST] is not None


def test_what_is_needed_is_not_given_up(books: Inventory) -> None:
    grown(books, Tier.HOST, b"a")
    grown(books, Tier.HOST, b"b")
    assert books.slot(Tier.HOST, {b"a", b"b"}) is None
    place = books.slot(Tier.HOST, {b"a"})
    assert place is not None
    assert books.tree.find(b"b") is None
    assert books.counts["lost_unsaved"] == 1
    books.host.give(place)


def test_certain_slots_can_be_claimed_once() -> None:
    shelf = SlotPool(5, Lru(ReuseHistory()))
    shelf.claim([4, 0])
    shelf.check_integrity([0, 4])
    for wrong in ([0], [1, 1], [5]):
        with pytest.raises(ValueError, match="not free"):
            shelf.claim(wrong)
    shelf.check_integrity([0, 4])
