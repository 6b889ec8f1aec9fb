"""The worker's pool as lending uses it: each call runs on the engine's thread, between two iterations."""

import asyncio
from collections.abc import Sequence

from services.worker.lending.lendable import LendablePool, lend
from services.worker.runner import Runner


class PoolVault:
    """Of one worker, whose engine thread owns `pool`."""

    def __init__(self, runner: Runner, pool: LendablePool) -> None:
        self._runner = runner
        self._pool = pool

    async def lend(self, most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
        """See `lendable.lend`. Raises Overloaded."""
        taken = self._runner.ask(lambda core, _: lend(self._pool, most_blocks, least_blocks, keep_blocks))
        return await asyncio.wrap_future(taken)

    async def readmit(self, blocks: Sequence[int]) -> None:
        """These are free here again. Raises Overloaded."""
        await asyncio.wrap_future(self._runner.ask(lambda core, _: self._pool.readmit(blocks)))
