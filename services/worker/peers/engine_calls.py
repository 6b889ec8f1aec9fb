"""The worker's own blocks as lending and migration use them: each call runs on the engine's thread.

`PoolDoor` moves blocks out of the pool for a loan, and back. `CacheDoor` allocates blocks for a fetch. They
belong to the fetch until their bytes are verified and published, or the fetch returns them. Blocks have
exactly one owner at any time, even when a caller stops waiting (see `Door`). Knows no link and no grant.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.worker.core.steps import StepCore
from services.worker.door import Door
from services.worker.kv.core.borrowed_pool import OwnPool
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.peers.lending.core.lendable_memory import lend
from shared.blocks import BlockHash


class PoolDoor:
    """`Vault` over the pool that the engine's thread owns."""

    def __init__(self, door: Door, pool: OwnPool) -> None:
        self._door = door
        self._pool = pool

    async def lend(self, most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
        return await self._door.take(
            lambda core, _: lend(self._pool, most_blocks, least_blocks, keep_blocks), self._pool.readmit
        )

    async def readmit(self, blocks: Sequence[int]) -> None:
        await asyncio.wrap_future(self._door.give(lambda core, _: self._pool.readmit(blocks)))


class BorrowedReader(Protocol):
    """Reads the bytes of borrowed blocks, on the engine's thread."""

    def read(self, core: StepCore, now_s: float, blocks: Sequence[int], rows: npt.NDArray[np.uint8]) -> int:
        """Copy blocks into `rows` `[n, record_bytes]`, and return how many."""
        ...


class CacheDoor:
    """The prefix cache, called on the engine's thread. `reader` None: the worker borrows nothing."""

    def __init__(self, door: Door, cache: PrefixCache, reader: BorrowedReader | None = None) -> None:
        self._door = door
        self._cache = cache
        self._reader = reader

    def known_blocks(self, names: Sequence[BlockHash]) -> "Future[int]":
        """Return how many leading names are on the device. Raises Overloaded."""
        return self._door.ask(lambda core, _: self._cache.known_blocks(names))

    def hold(self, names: Sequence[BlockHash], timeout_s: float) -> list[int]:
        """Call `PrefixCache.hold` from a thread that may block. Raises Overloaded and DeadlineExceeded."""
        return self._door.take_within(
            lambda core, _: self._cache.hold(names), self._cache.release, timeout_s=timeout_s
        )

    def read_borrowed(
        self, names: Sequence[BlockHash], record_bytes: int, timeout_s: float
    ) -> npt.NDArray[np.uint8]:
        """Return the bytes `[n, record_bytes]` of the leading blocks that creditors hold.

        Blocks the calling thread. Raises Overloaded and DeadlineExceeded."""
        rows = np.empty((len(names), record_bytes), dtype=np.uint8)
        reader = self._reader
        if reader is None or not names:
            return rows[:0]

        def read(core: StepCore, now_s: float) -> int:
            blocks = self._cache.borrowed(names)
            return reader.read(core, now_s, blocks, rows) if blocks else 0

        return rows[: self._door.take_within(read, lambda count: None, timeout_s=timeout_s)]

    def let_go(self, blocks: Sequence[int]) -> None:
        """Release blocks from `hold`."""
        if blocks:
            self._door.give(lambda core, _: self._cache.release(blocks))

    def known_shadows(self, names: Sequence[BlockHash]) -> "Future[int]":
        """Return how many leading names are stored in any tier. Raises Overloaded."""
        return self._door.ask(lambda core, now_s: self._cache.shadows.known(names, now_s))

    async def shadow_room(self, blocks: int, kept: Sequence[BlockHash]) -> list[int]:
        """Return up to `blocks` host slots, within the limit for shadows. Raises Overloaded."""
        shadows = self._cache.shadows
        return await self._door.take(
            lambda core, now_s: shadows.room(blocks, now_s, kept),
            lambda places: shadows.fill(places, (), None, 0.0),
        )

    def fill_shadows(
        self, places: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        """Store the first `len(names)` slots under their names, and free the others."""
        return self._door.give(lambda core, now_s: self._cache.shadows.fill(places, names, parent, now_s))

    async def make_room(self, blocks: int) -> list[int]:
        """Return blocks to receive into, or none when fewer than twice as many are available.

        The margin keeps the scheduler's plans from failing for lack of blocks. Raises Overloaded."""

        def allocate() -> list[int]:
            return self._cache.allocate(blocks) if self._cache.can_allocate(2 * blocks) else []

        return await self._door.take(lambda core, _: allocate(), self._cache.release)

    def take_in(
        self, blocks: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        """Publish the first `len(names)` blocks, which follow `parent`, and release the others.

        Returns how many leading names are on the device now."""

        def store() -> int:
            before = parent
            for block, name in zip(blocks, names, strict=False):
                self._cache.publish(block, name, before)
                before = name
            self._cache.release(blocks)
            kept = self._cache.hold(names)
            self._cache.release(kept)
            return len(kept)

        return self._door.give(lambda core, _: store())
