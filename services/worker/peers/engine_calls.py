"""The worker's own blocks as lending and migration use them: each call runs on the engine's thread.

`PoolDoor` takes blocks out of the pool for a loan and brings them back. `CacheDoor` gets memory for blocks
that are being fetched: allocated, and nobody's yet, until their bytes are there and verified and they get
their names, or go back. What a call hands over has one owner at every moment, whoever stops waiting for it
(see `Door`). Knows no link and no grant.
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
        """See `lendable.lend`. Raises Overloaded."""
        return await self._door.take(
            lambda core, _: lend(self._pool, most_blocks, least_blocks, keep_blocks), self._pool.readmit
        )

    async def readmit(self, blocks: Sequence[int]) -> None:
        """These are free here again."""
        await asyncio.wrap_future(self._door.give(lambda core, _: self._pool.readmit(blocks)))


class BorrowedReader(Protocol):
    """Who gets at the bytes of borrowed blocks: on the engine's thread."""

    def read(self, core: StepCore, now_s: float, blocks: Sequence[int], rows: npt.NDArray[np.uint8]) -> int:
        """Into `rows` `[n, record_bytes]`; of how many."""
        ...


class CacheDoor:
    """Over the prefix cache that the engine's thread owns. `reader` None: nothing is borrowed."""

    def __init__(self, door: Door, cache: PrefixCache, reader: BorrowedReader | None = None) -> None:
        self._door = door
        self._cache = cache
        self._reader = reader

    def known_blocks(self, names: Sequence[BlockHash]) -> "Future[int]":
        """How many of these, from the first on, are on the device. Raises Overloaded."""
        return self._door.ask(lambda core, _: self._cache.known_blocks(names))

    def hold(self, names: Sequence[BlockHash], timeout_s: float) -> list[int]:
        """See `PrefixCache.hold`; not for the event loop. Raises Overloaded and DeadlineExceeded."""
        return self._door.take_within(
            lambda core, _: self._cache.hold(names), self._cache.release, timeout_s=timeout_s
        )

    def read_borrowed(
        self, names: Sequence[BlockHash], record_bytes: int, timeout_s: float
    ) -> npt.NDArray[np.uint8]:
        """The bytes of consecutive blocks that creditors hold, up to the first that is not one:
        `[n, record_bytes]`. Not for the event loop. Raises Overloaded and DeadlineExceeded."""
        rows = np.empty((len(names), record_bytes), dtype=np.uint8)
        reader = self._reader
        if reader is None or not names:
            return rows[:0]

        def read(core: StepCore, now_s: float) -> int:
            blocks = self._cache.borrowed(names)
            return reader.read(core, now_s, blocks, rows) if blocks else 0

        return rows[: self._door.take_within(read, lambda count: None, timeout_s=timeout_s)]

    def let_go(self, blocks: Sequence[int]) -> None:
        """Held before."""
        if blocks:
            self._door.give(lambda core, _: self._cache.release(blocks))

    def known_shadows(self, names: Sequence[BlockHash]) -> "Future[int]":
        """How many of these, from the first on, are stored anywhere here; see there. Raises Overloaded."""
        return self._door.ask(lambda core, now_s: self._cache.shadows.known(names, now_s))

    async def shadow_room(self, blocks: int, kept: Sequence[BlockHash]) -> list[int]:
        """Slots of the host, as far as shadows may have more; see there. Raises Overloaded."""
        shadows = self._cache.shadows
        return await self._door.take(
            lambda core, now_s: shadows.room(blocks, now_s, kept),
            lambda places: shadows.fill(places, (), None, 0.0),
        )

    def fill_shadows(
        self, places: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        """The first `len(names)` of these slots have arrived; see there."""
        return self._door.give(lambda core, now_s: self._cache.shadows.fill(places, names, parent, now_s))

    async def make_room(self, blocks: int) -> list[int]:
        """Blocks to receive into; none when they would have to be taken from somebody. As many again stay
        free, so that plans that count on them are not refused. Raises Overloaded."""

        def allocate() -> list[int]:
            return self._cache.allocate(blocks) if self._cache.can_allocate(2 * blocks) else []

        return await self._door.take(lambda core, _: allocate(), self._cache.release)

    def take_in(
        self, blocks: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        """The first `len(names)` of these have arrived and follow `parent`: they are stored from now on. The
        rest is given back. How many of `names` are on the device now, from the first on."""

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
