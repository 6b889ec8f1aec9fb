"""Copies behind the sequences' backs: what is lost meanwhile was copied for nothing, and nothing waits.

What a clean stop leaves on disk: the blocks wanted last, each with its beginning, within its slots.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.lower_tiers import worth_keeping
from services.worker.kv.core.prefix_cache import PrefixCache, Tiers
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.tier_copier import StoredBlock
from shared.blocks import BlockHash, chain
from tests.services.worker.kv.rig import BLOCK_TOKENS, ROOT, MemoryMover, Rig


def tokens_of(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def names_of(tokens: bytes) -> list[BlockHash]:
    return chain(ROOT, tokens, BLOCK_TOKENS)


def held_down(rig: Rig) -> list[BlockHash]:
    """A prompt that is on the host alone."""
    tokens = tokens_of(1, 2, 3, 4)
    rig.run(tokens)
    for blocks in rig.held:
        rig.cache.release(blocks)
    rig.held.clear()
    rig.cache.release(rig.cache.allocate(rig.pool.total_blocks))
    return names_of(tokens)


@pytest.fixture
def rig() -> Rig:
    return Rig(4, 4, 4, "lru")


def test_a_write_in_flight_keeps_nothing_on_the_device(rig: Rig) -> None:
    held_down(rig)
    assert rig.cache.save(4) == 2
    assert rig.cache.free_blocks + rig.cache.evictable_blocks == 4
    assert rig.cache.can_allocate(4)


def test_a_block_is_written_once(rig: Rig) -> None:
    names = held_down(rig)
    assert rig.cache.save(4) == 2 and rig.cache.save(4) == 0
    for _, node in rig.mover.writes:
        rig.cache.on_written(node.name, node.place, ok=True)
    assert rig.cache.save(4) == 0
    assert len(names) == 2 and rig.cache.counts["write_failures"] == 0
    rig.cache.check_integrity([])


def test_a_failed_write_gives_its_slot_back(rig: Rig) -> None:
    held_down(rig)
    rig.cache.save(4)
    for _, node in rig.mover.writes:
        rig.cache.on_written(node.name, node.place, ok=False)
    assert rig.cache.counts["write_failures"] == 2
    rig.cache.check_integrity([])


def test_a_copy_of_a_block_that_is_gone_is_dropped(rig: Rig) -> None:
    held_down(rig)
    rig.cache.save(4)
    writes = list(rig.mover.writes)
    for first in (11, 21, 31):  # push it out of host and device while it is written
        rig.run(tokens_of(*range(first, first + 8)))
        for blocks in rig.held:
            rig.cache.release(blocks)
        rig.held.clear()
    for _, node in writes:
        rig.cache.on_written(node.name, node.place, ok=True)
    rig.cache.check_integrity([])


def test_what_was_stored_before_is_found_if_its_beginning_is(rig: Rig) -> None:
    first, second = names_of(tokens_of(1, 2, 3, 4))
    assert rig.cache.restore([StoredBlock(second, first, 1, 0)]) == 0
    other = Rig(4, 4, 4, "lru")
    stored = [StoredBlock(second, first, 1, 0), StoredBlock(first, b"", 0, 3)]
    assert other.cache.restore(stored) == 2
    assert other.cache.has_disk
    assert other.cache.prefetch([first, second], 1) == 1
    assert other.cache.prefetch([first], 1) == 0, "it is being read already"
    ((place, target, name),) = other.mover.reads
    assert (place, name) == (3, first)
    other.cache.on_read(name, target, ok=True)
    assert not other.cache.is_reading
    other.cache.check_integrity([])


def test_a_read_that_failed_loses_the_copy(rig: Rig) -> None:
    (name,) = names_of(tokens_of(1, 2))
    rig.cache.restore([StoredBlock(name, b"", 0, 2)])
    rig.cache.prefetch([name], 1)
    rig.cache.on_read(name, rig.mover.reads[0][1], ok=False)
    assert rig.cache.counts["copies_lost"] == 1
    assert rig.cache.acquire([name], 1).loaded[Tier.DISK] == 0
    rig.cache.check_integrity([])


NAMES = [bytes([family, depth]) * 8 for family in range(6) for depth in range(4)]


def family(number: int) -> list[bytes]:
    return NAMES[4 * number : 4 * number + 4]


def cache(
    mover: MemoryMover, *, disk_blocks: int, device_blocks: int = 16, host_blocks: int = 4
) -> PrefixCache:
    tiers = Tiers(host_blocks, disk_blocks, "lru")
    return PrefixCache(BlockPool(device_blocks, 2), tiers, mover, CostGate())


def serve(made: PrefixCache, mover: MemoryMover, number: int, length: int) -> None:
    """One sequence of so many blocks of a family, from its start to its end."""
    names = family(number)[:length]
    held = list(made.acquire(names, length).blocks)
    for at in range(len(held), length):
        (block,) = made.allocate(1)
        mover.device[block] = names[at]
        made.publish(block, names[at], names[at - 1] if at else None)
        held.append(block)
    made.release(held)


def flush(made: PrefixCache, mover: MemoryMover, most: int = 1000) -> tuple[int, int]:
    done: list[StoredBlock] = []

    def write(node: StoredBlock, tier: Tier, source: int) -> bool:
        assert (mover.device if tier is Tier.DEVICE else mover.host)[source] == node.name
        mover.disk[node.place] = node
        done.append(node)
        return True

    return made.flush(write, lambda: len(done) < most)


def restored(mover: MemoryMover, made: PrefixCache, disk_blocks: int) -> PrefixCache:
    """The next life: the disk as the last one left it."""
    on_disk = [node for node in made._books.tree if node.places[Tier.DISK] is not None]
    again = cache(mover, disk_blocks=disk_blocks)
    kept = [mover.disk[place] for node in on_disk if (place := node.places[Tier.DISK]) is not None]
    assert again.restore(kept) == len(on_disk), "everything on disk can be found again"
    return again


def test_what_was_wanted_last_is_found_again() -> None:
    mover = MemoryMover()
    made = cache(mover, disk_blocks=8)
    for number in (0, 1, 2):
        serve(made, mover, number, 4)
    assert flush(made, mover) == (8, 0)
    again = restored(mover, made, 8)
    assert [len(again.acquire(family(number), 4).blocks) for number in (2, 1, 0)] == [4, 4, 0]


def test_what_is_on_disk_and_colder_makes_room() -> None:
    mover = MemoryMover()
    made = cache(mover, disk_blocks=4)
    serve(made, mover, 0, 4)
    assert flush(made, mover) == (4, 0)
    serve(made, mover, 1, 3)
    assert flush(made, mover) == (3, 0)
    again = restored(mover, made, 4)
    assert [len(again.acquire(family(number), 4).blocks) for number in (1, 0)] == [3, 1]


def test_ended_early_it_leaves_the_beginnings_of_what_is_wanted_most() -> None:
    mover = MemoryMover()
    made = cache(mover, disk_blocks=8)
    serve(made, mover, 0, 4)
    serve(made, mover, 1, 4)
    assert flush(made, mover, most=3) == (3, 5)
    assert len(restored(mover, made, 8).acquire(family(1), 4).blocks) == 3


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=20),
    st.integers(1, 12),
    st.integers(0, 9),
)
@settings(max_examples=150, deadline=None)
def test_whatever_was_served_the_books_balance_and_all_that_is_left_can_be_found(
    served: list[tuple[int, int]], disk_blocks: int, most: int
) -> None:
    mover = MemoryMover()
    made = cache(mover, disk_blocks=disk_blocks, device_blocks=6)
    for number, length in served:
        serve(made, mover, number, length)
    kept = worth_keeping(made._books)
    assert len(kept) <= disk_blocks
    assert all(node.parent is None or node.parent in kept[:at] for at, node in enumerate(kept))
    flush(made, mover, most)
    made.check_integrity([])
    restored(mover, made, disk_blocks)
