"""Lendable memory of one worker: takes blocks out of its pools for a debtor, and puts them back."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from services.worker.door import Door
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import OwnPool
from services.worker.peers.lending.core.grants import Freed, lend
from shared.messages.lending import KvTier


class Stock:
    """The engine's pool, through its `door`, and a pool of host blocks that are only lent.

    `keep_blocks` of the device stay free, none of the host."""

    def __init__(self, door: Door, pool: OwnPool, keep_blocks: int, host_blocks: int) -> None:
        self._door = door
        self._pool = pool
        self._keep_blocks = keep_blocks
        self.host = BlockPool(host_blocks, 1) if host_blocks else None

    @property
    def host_free_blocks(self) -> int:
        return 0 if self.host is None else self.host.free_blocks

    async def take(self, tier: KvTier, most_blocks: int, least_blocks: int) -> list[int]:
        """Take up to `most_blocks` out of a tier's pool, or none below `least_blocks`. Raises Overloaded."""
        if tier is KvTier.DEVICE:
            return await self.lend(most_blocks, least_blocks, self._keep_blocks)
        return [] if self.host is None else lend(self.host, most_blocks, least_blocks, 0)

    async def lend(self, most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
        """`grants.lend` from the device's pool, on the engine's thread. Raises Overloaded."""
        return await self._door.take(
            lambda core, _: lend(self._pool, most_blocks, least_blocks, keep_blocks), self._pool.readmit
        )

    async def put_back(self, freed: Iterable[Freed], keep: Callable[[Sequence[int]], list[int]]) -> None:
        """Put blocks back. `keep` gets the device blocks first, and returns those it does not need."""
        device: list[int] = []
        for part in freed:
            if part.tier is KvTier.DEVICE:
                device += part.blocks
            elif self.host is not None:
                self.host.readmit(part.blocks)
        if back := keep(device):
            await asyncio.wrap_future(self._door.give(lambda core, _: self._pool.readmit(back)))
