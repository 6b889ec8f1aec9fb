"""Copies behind the sequences' backs: what is lost meanwhile was copied for nothing, and nothing waits."""

import pytest

from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.tier_copier import StoredBlock
from shared.blocks import BlockHash, chain
from tests.services.worker.kv.core.test_prefix_cache import BLOCK_TOKENS, ROOT, Rig


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
