"""Blocks leave a pool, cached prefixes first, and come back; each tier lends its own."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.core.block_manager import Tiers
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.peers.lending.core.grants import Freed
from services.worker.peers.lending.core.lendable_memory import Stock, lend
from shared.blocks import chain, root
from shared.messages.lending import KvTier
from tests.services.worker.kv.rig import MemoryMover
from tests.services.worker.peers.lending.builders import PlainVault


def test_kept_blocks_stay_and_too_small_a_part_is_refused() -> None:
    pool = BlockPool(10, 4)
    assert lend(pool, most_blocks=20, least_blocks=9, keep_blocks=2) == []
    taken = lend(pool, most_blocks=20, least_blocks=1, keep_blocks=2)
    assert (len(taken), pool.total_blocks, pool.withdrawn_blocks, pool.free_blocks) == (8, 2, 8, 2)
    for wrong in (pool.release, pool.withdraw):
        with pytest.raises(ValueError, match="not taken"):
            wrong(taken[:1])
    pool.readmit(taken)
    with pytest.raises(ValueError, match="not withdrawn"):
        pool.readmit(taken[:1])
    assert (pool.total_blocks, pool.free_blocks) == (10, 10)


def test_cached_prefixes_are_evicted_and_used_blocks_are_not() -> None:
    mover = MemoryMover()
    cache = PrefixCache(BlockPool(6, 2), Tiers(host_blocks=8), mover, CostGate())
    names = chain(root(b"f"), bytes(4 * 2 * 4), 2)
    blocks = cache.allocate(4)
    for at, (block, name) in enumerate(zip(blocks, names, strict=True)):
        mover.device[block] = name
        assert cache.publish(block, name, names[at - 1] if at else None)
    assert lend(cache, most_blocks=3, least_blocks=3, keep_blocks=0) == [], "a sequence uses four"
    with pytest.raises(ValueError, match="name"):
        cache.withdraw(blocks[:1])
    cache.release(blocks)
    taken = lend(cache, most_blocks=5, least_blocks=5, keep_blocks=1)
    assert (len(taken), cache.total_blocks, cache.counts["evicted_device"]) == (5, 1, 3)
    cache.check_integrity([*[]] if not taken else [])
    cache.readmit(taken)
    assert cache.total_blocks == 6
    hit = cache.acquire(names, 4)
    assert hit.loaded[1] > 0 or hit.blocks, "the host tier still has what was evicted"
    cache.check_integrity(hit.blocks)


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "lend", "back"]), st.integers(0, 9)), max_size=60))
def test_blocks_are_conserved(moves: list[tuple[str, int]]) -> None:
    pool = BlockPool(16, 4)
    held: list[int] = []
    lent: list[int] = []
    for verb, number in moves:
        if verb == "take" and pool.can_allocate(number):
            held += pool.allocate(number)
        elif verb == "take":
            with pytest.raises(ValueError, match="free"):
                pool.allocate(number)
        elif verb == "give":
            pool.release(held[:number])
            del held[:number]
        elif verb == "lend":
            lent += lend(pool, number, 1, 3)
            assert pool.free_blocks >= 3 or not number or pool.withdrawn_blocks == len(lent)
        elif verb == "back":
            pool.readmit(lent[:number])
            del lent[:number]
        pool.check_integrity(held)
        assert pool.total_blocks == 16 - len(lent) == len(held) + pool.free_blocks


async def test_each_tier_lends_its_own_blocks_and_only_the_device_keeps_some() -> None:
    vault = PlainVault()
    stock = Stock(vault, keep_blocks=18, host_blocks=3, block_tokens=16)
    device = await stock.take(KvTier.DEVICE, 9, 1)
    host = await stock.take(KvTier.HOST, 9, 1)
    assert (len(device), len(host), stock.host_free_blocks) == (2, 3, 0)
    assert await stock.take(KvTier.HOST, 1, 1) == []
    await stock.put_back([Freed(KvTier.HOST, tuple(host[:2])), Freed(KvTier.DEVICE, tuple(device))])
    assert (vault.pool.withdrawn_blocks, stock.host_free_blocks) == (0, 2)
    assert await stock.take(KvTier.HOST, 3, 3) == [], "fewer are of no use"


async def test_returned_blocks_may_be_kept() -> None:
    vault = PlainVault()
    stock = Stock(vault, 0, 0, 16)
    blocks = await stock.take(KvTier.DEVICE, 3, 1)
    assert await stock.take(KvTier.HOST, 1, 1) == [] and stock.host is None

    def keep_one(back: Sequence[int]) -> list[int]:
        return list(back[1:])

    await stock.put_back([Freed(KvTier.DEVICE, tuple(blocks))], keep_one)
    assert vault.pool.withdrawn_blocks == 1
