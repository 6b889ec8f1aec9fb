"""The books: what is used stays with its beginning, slots are conserved; tables of blocks."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.core.block_manager import Inventory, Tiers
from services.worker.kv.core.block_pool import BlockPool, block_table, first_borrowed, joined
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


IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(tables=st.lists(st.tuples(st.booleans(), IDS), max_size=6))
def test_tables_and_lists_are_joined_in_order(tables: list[tuple[bool, list[int]]]) -> None:
    made = [block_table(ids) if is_table else ids for is_table, ids in tables]
    flat = joined(made)
    assert flat.dtype == np.int32
    assert flat.tolist() == [each for _, ids in tables for each in ids]


def test_a_table_grows_while_what_was_joined_is_kept() -> None:
    table = block_table([4, 2])
    before = joined([table])
    first_borrowed(table, 3)
    table.extend([9])
    table[0] = 5
    assert before.tolist() == [4, 2] and table.tolist() == [5, 2, 9]


@given(ids=IDS, own_blocks=st.integers(0, 2**31 - 1))
def test_the_first_borrowed_block(ids: list[int], own_blocks: int) -> None:
    """Against the plain search."""
    expected = next((at for at, block in enumerate(ids) if block >= own_blocks), len(ids))
    assert first_borrowed(block_table(ids), own_blocks) == expected
