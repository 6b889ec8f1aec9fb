"""The worker's pool as lending uses it: each call runs on the engine's thread, between two iterations."""

import asyncio
from collections.abc import Sequence

from services.worker.door import Door
from services.worker.peers.lending.core.lendable_memory import LendablePool, lend


class PoolVault:
    """Of one worker, whose engine thread owns `pool`."""

    def __init__(self, door: Door, pool: LendablePool) -> None:
        self._door = door
        self._pool = pool

    async def lend(self, most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
        """See `lendable.lend`. Raises Overloaded."""
        return await self._door.take(
            lambda core, _: lend(self._pool, most_blocks, least_blocks, keep_blocks), self._pool.readmit
        )

    async def readmit(self, blocks: Sequence[int]) -> None:
        """These are free here again."""
        await asyncio.wrap_future(self._door.give(lambda core, _: self._pool.readmit(blocks)))
