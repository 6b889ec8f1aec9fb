"""Where fetched blocks go: to the device, for a sequence that moves here, or to the host, as shadows.

A shelf says what is there, gives room, has verified bytes written into it by the transfer engine, and takes
what has arrived in under its names. Places that were given are the fetcher's until `take_in`.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from services.worker.kv.tiers.host import HostTier
from services.worker.kv.tiers.records import RecordRow, Records
from services.worker.kv.transfers import Route, TransferEngine
from services.worker.peers.engine_calls import CacheDoor
from shared.blocks import BlockHash


class Shelf(Protocol):
    """One kind of place."""

    route: Route
    batch_blocks: int
    """Fetched with one question."""

    async def known(self, names: Sequence[BlockHash]) -> int:
        """How many of these need not be fetched, from the first on. Raises Overloaded."""
        ...

    async def make_room(self, blocks: int, before: Sequence[BlockHash]) -> list[int]:
        """Up to so many places; `before` precedes what is to come. Raises Overloaded."""
        ...

    def write(
        self, rows: Sequence[RecordRow], places: Sequence[int], names: Sequence[BlockHash], within_s: float
    ) -> int:
        """Verified bytes; how many were written. Not for the event loop. Raises KvasirError."""
        ...

    def take_in(
        self, places: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        """The first `len(names)` have arrived and follow `parent`; the rest is given back. How many of
        `names` are stored now, from the first on."""
        ...


class DeviceShelf:
    """Blocks of the worker's own KV."""

    route = Route.PULL

    def __init__(
        self, cache: CacheDoor, transfers: TransferEngine, records: Records, batch_blocks: int
    ) -> None:
        """`records`: written by `transfers` alone."""
        self._cache, self._transfers, self.records = cache, transfers, records
        self.batch_blocks = batch_blocks

    async def known(self, names: Sequence[BlockHash]) -> int:
        return await asyncio.wrap_future(self._cache.known_blocks(names))

    async def make_room(self, blocks: int, before: Sequence[BlockHash]) -> list[int]:
        return await self._cache.make_room(blocks)

    def write(
        self, rows: Sequence[RecordRow], places: Sequence[int], names: Sequence[BlockHash], within_s: float
    ) -> int:
        def copy() -> int:
            self.records.write(rows, places)
            return len(rows)

        size_bytes = sum(row.nbytes for row in rows)
        return self._transfers.run(self.route, copy, 0, size_bytes=size_bytes, within_s=within_s)

    def take_in(
        self, places: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        return self._cache.take_in(places, names, parent)


SHADOW_BATCH_BLOCKS = 32
"""Few: whoever moves waits behind one such question, and so does the engine for a core."""


class HostShelf:
    """Slots of the host tier, as far as shadows may have them."""

    route = Route.SHADOW
    batch_blocks = SHADOW_BATCH_BLOCKS

    def __init__(self, cache: CacheDoor, transfers: TransferEngine, host: HostTier) -> None:
        self._cache, self._transfers, self._host = cache, transfers, host

    async def known(self, names: Sequence[BlockHash]) -> int:
        return await asyncio.wrap_future(self._cache.known_shadows(names))

    async def make_room(self, blocks: int, before: Sequence[BlockHash]) -> list[int]:
        return await self._cache.shadow_room(blocks, before)

    def write(
        self, rows: Sequence[RecordRow], places: Sequence[int], names: Sequence[BlockHash], within_s: float
    ) -> int:
        def copy() -> int:
            for row, place, name in zip(rows, places, names, strict=False):
                self._host.row(place)[:] = row
                self._host.seal(place, name)
            return len(rows)

        size_bytes = sum(row.nbytes for row in rows)
        return self._transfers.run(self.route, copy, 0, size_bytes=size_bytes, within_s=within_s)

    def take_in(
        self, places: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        return self._cache.fill_shadows(places, names, parent)
