"""Destinations of fetched blocks: the device, for a sequence that moves here, or the host, for shadows.

A shelf knows which blocks are present, gives places for new ones, writes verified bytes into them through the
transfer engine, and stores them under their names. Places belong to the fetch until `take_in`.
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
    """One kind of destination."""

    route: Route
    batch_blocks: int
    """Blocks fetched by one request."""

    async def known(self, names: Sequence[BlockHash]) -> int:
        """Return how many leading names need not be fetched. Raises Overloaded."""
        ...

    async def make_room(self, blocks: int, before: Sequence[BlockHash]) -> list[int]:
        """Return up to `blocks` places; `before` names the blocks that precede them. Raises Overloaded."""
        ...

    def write(
        self, rows: Sequence[RecordRow], places: Sequence[int], names: Sequence[BlockHash], within_s: float
    ) -> int:
        """Write verified bytes; return how many blocks. Blocks its thread. Raises KvasirError."""
        ...

    def take_in(
        self, places: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        """Store the first `len(names)` places, which follow `parent`, and give the others back.

        Returns how many leading names are stored now."""
        ...


class DeviceShelf:
    """Device blocks, for a sequence that moves here."""

    route = Route.PULL

    def __init__(
        self, cache: CacheDoor, transfers: TransferEngine, records: Records, batch_blocks: int
    ) -> None:
        """`records`: only `transfers` writes them."""
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
"""Small: a move waits behind one such request, and it takes processor time from the engine."""


class HostShelf:
    """Host slots, within the limit for shadows."""

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
