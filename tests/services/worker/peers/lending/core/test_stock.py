"""Both tiers that a worker lends out of: each hands out and takes back its own."""

from collections.abc import Sequence

from services.worker.peers.lending.core.grants import Freed
from services.worker.peers.lending.core.lendable_memory import Stock
from shared.messages.lending import KvTier
from tests.services.worker.peers.lending.test_service import PlainVault


async def test_each_tier_lends_its_own_and_only_the_device_keeps_some() -> None:
    vault = PlainVault()
    stock = Stock(vault, keep_blocks=18, host_blocks=3, block_tokens=16)
    device = await stock.take(KvTier.DEVICE, 9, 1)
    host = await stock.take(KvTier.HOST, 9, 1)
    assert (len(device), len(host), stock.host_free_blocks) == (2, 3, 0)
    assert await stock.take(KvTier.HOST, 1, 1) == []
    await stock.put_back([Freed(KvTier.HOST, tuple(host[:2])), Freed(KvTier.DEVICE, tuple(device))])
    assert (vault.pool.withdrawn_blocks, stock.host_free_blocks) == (0, 2)
    assert await stock.take(KvTier.HOST, 3, 3) == [], "fewer are of no use"


async def test_what_the_engine_cannot_take_now_it_gets_later_and_some_is_kept() -> None:
    vault = PlainVault()
    stock = Stock(vault, 0, 0, 16)
    blocks = await stock.take(KvTier.DEVICE, 3, 1)
    assert await stock.take(KvTier.HOST, 1, 1) == [] and stock.host is None

    def keep_one(back: Sequence[int]) -> list[int]:
        return list(back[1:])

    vault.overloaded = True
    await stock.put_back([Freed(KvTier.DEVICE, tuple(blocks))], keep_one)
    assert vault.pool.withdrawn_blocks == 3
    vault.overloaded = False
    await stock.put_back([])
    assert vault.pool.withdrawn_blocks == 1
