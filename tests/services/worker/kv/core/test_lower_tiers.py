"""Copies behind the sequences' backs, for which nothing waits; and what a clean stop leaves on disk."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.tier_copier import StoredBlock
from shared.blocks import BlockHash
from tests.services.worker.kv.rig import BLOCK_TOKENS, Rig, names_of, tokens_of


def held_down(rig: Rig) -> list[BlockHash]:
    """A prompt that is on the host alone."""
    tokens = tokens_of(1, 2, 3, 4)
    rig.serve(tokens)
    rig.cache.release(rig.cache.allocate(rig.pool.total_blocks))
    return names_of(tokens)


@pytest.fixture
def rig() -> Rig:
    return Rig(4, 4, 4, "lru")


def test_what_was_stored_before_is_found_if_its_beginning_is(rig: Rig) -> None:
    first, second = names_of(tokens_of(1, 2, 3, 4))
    assert rig.cache.restore([StoredBlock(second, first, 1, 0)]) == 0
    other = Rig(4, 4, 4, "lru")
    stored = [StoredBlock(second, first, 1, 0), StoredBlock(first, b"", 0, 3)]
    assert other.cache.restore(stored) == 2
    assert other.cache.has_disk
    assert other.cache.prefetch([first, second], 1) == 1
    assert other.cache.prefetch([first], 1) == 0, "it is being read already"
    ((place, _, name, ended),) = other.mover.reads
    assert (place, name) == (3, first)
    ended(True)
    assert not other.cache.reading
    other.cache.check_integrity([])


def prompt(number: int, blocks: int = 4) -> bytes:
    """So many blocks; prompts of one number share their beginnings, others nothing."""
    return tokens_of(*[number] * BLOCK_TOKENS * blocks)


def flush(rig: Rig, most: int = 1000) -> tuple[int, int]:
    done: list[StoredBlock] = []

    def write(node: StoredBlock, tier: Tier, source: int) -> bool:
        assert tier is not Tier.DEVICE or source < rig.pool.ids, "its bytes are another worker's"
        assert (rig.mover.device if tier is Tier.DEVICE else rig.mover.host)[source] == node.name
        rig.mover.disk[node.place] = node
        done.append(node)
        return True

    return rig.cache.flush(write, lambda: len(done) < most)


def restored(rig: Rig) -> Rig:
    """The next life: the disk as the last one left it."""
    places = [node.places[Tier.DISK] for node in rig.cache._books.tree]
    again = Rig(16, 4, rig.cache._books.disk.total, "lru")
    again.mover.disk = {place: rig.mover.disk[place] for place in places if place is not None}
    kept = len(again.mover.disk)
    assert again.cache.restore(again.mover.disk.values()) == kept, "all that is on disk can be found again"
    return again


def found(rig: Rig, number: int) -> int:
    return len(rig.acquire(names_of(prompt(number)), 4).blocks)


def test_what_was_wanted_last_is_found_again() -> None:
    rig = Rig(16, 4, 8, "lru")
    rig.serve(prompt(0), prompt(1), prompt(2))
    assert flush(rig) == (8, 0)
    again = restored(rig)
    assert [found(again, number) for number in (2, 1, 0)] == [4, 4, 0]


def test_what_is_on_disk_and_colder_makes_room() -> None:
    rig = Rig(16, 4, 4, "lru")
    rig.serve(prompt(0))
    assert flush(rig) == (4, 0)
    rig.serve(prompt(1, 3))
    assert flush(rig) == (3, 0)
    again = restored(rig)
    assert [found(again, number) for number in (1, 0)] == [3, 1]


def test_what_lies_at_a_creditor_is_left_there() -> None:
    """A worker that had borrowed ended with an error instead of a flush."""
    rig = Rig(4, 0, 8, "lru")
    rig.borrow(3)
    rig.serve(prompt(0, 7))
    assert rig.cache.idle_borrowed_blocks == 3
    assert flush(rig) == (4, 0)
    assert found(restored(rig), 0) == 4


def test_ended_early_it_leaves_the_beginnings_of_what_is_wanted_most() -> None:
    rig = Rig(16, 4, 8, "lru")
    rig.serve(prompt(0), prompt(1))
    assert flush(rig, most=3) == (3, 5)
    assert found(restored(rig), 1) == 3


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=20),
    st.integers(1, 12),
    st.integers(0, 9),
)
@settings(max_examples=150)
def test_whatever_was_served_the_books_balance_and_all_that_is_left_can_be_found(
    served: list[tuple[int, int]], disk_blocks: int, most: int
) -> None:
    rig = Rig(6, 4, disk_blocks, "lru")
    rig.serve(*(prompt(number, length) for number, length in served))
    kept = list(rig.cache._worth_keeping())
    assert len(kept) <= disk_blocks
    assert all(node.parent is None or node.parent in kept[:at] for at, node in enumerate(kept))
    flush(rig, most)
    rig.cache.check_integrity([])
    restored(rig)
