"""Destinations of fetched blocks: the device, for a sequence that moves here, or the host, for shadows.

A shelf calls the cache on the engine's thread, and writes bytes through the transfer engine. Blocks have
exactly one owner at any time, even when a caller stops waiting (see `Door`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import ClassVar

from services.worker.door import Door
from services.worker.kv.store import KvStore
from services.worker.kv.tiers.records import RecordRow, Records
from services.worker.kv.transfers import Route
from shared.blocks import BlockHash


class Shelf(ABC):
    """One kind of destination. Places belong to the fetch until `take_in`."""

    route: ClassVar[Route]

    def __init__(self, door: Door, store: KvStore, batch_blocks: int) -> None:
        """`batch_blocks`: blocks fetched by one request."""
        self.batch_blocks = batch_blocks
        self._door = door
        self._cache = store.cache
        self._transfers = store.transfers

    @abstractmethod
    def known(self, names: Sequence[BlockHash]) -> "Future[int]":
        """Return how many leading names need not be fetched. Raises Overloaded."""

    @abstractmethod
    async def make_room(self, blocks: int, before: Sequence[BlockHash]) -> list[int]:
        """Return up to `blocks` places; `before` names the blocks that precede them. Raises Overloaded."""

    @abstractmethod
    def take_in(
        self, places: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        """Store the first `len(names)` places, which follow `parent`, and give the others back.

        Returns how many leading names are stored now."""

    @abstractmethod
    def _copy(self, rows: Sequence[RecordRow], places: Sequence[int], names: Sequence[BlockHash]) -> None:
        """Write bytes into places, on the thread that copies."""

    def write(
        self, rows: Sequence[RecordRow], places: Sequence[int], names: Sequence[BlockHash], within_s: float
    ) -> int:
        """Write verified bytes; return how many blocks. Blocks its thread. Raises KvasirError."""

        def copy() -> int:
            self._copy(rows, places, names)
            return len(rows)

        size_bytes = sum(row.nbytes for row in rows)
        return self._transfers.run(self.route, copy, 0, size_bytes=size_bytes, within_s=within_s)


class DeviceShelf(Shelf):
    """Device blocks, for a sequence that moves here."""

    route = Route.PULL

    def __init__(self, door: Door, store: KvStore, batch_blocks: int, records: Records) -> None:
        """`records`: only the transfer engine writes them."""
        super().__init__(door, store, batch_blocks)
        self.records = records

    def known(self, names: Sequence[BlockHash]) -> "Future[int]":
        return self._door.ask(lambda core, _: self._cache.known_blocks(names))

    async def make_room(self, blocks: int, before: Sequence[BlockHash]) -> list[int]:
        """Return blocks, or none when fewer than twice as many are available.

        The margin keeps the scheduler's plans from failing for lack of blocks."""

        def allocate() -> list[int]:
            return self._cache.allocate(blocks) if self._cache.can_allocate(2 * blocks) else []

        return await self._door.take(lambda core, _: allocate(), self._cache.release)

    def take_in(
        self, places: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        def store() -> int:
            before = parent
            for block, name in zip(places, names, strict=False):
                self._cache.publish(block, name, before)
                before = name
            self._cache.release(places)
            kept = self._cache.hold(names)
            self._cache.release(kept)
            return len(kept)

        return self._door.give(lambda core, _: store())

    def _copy(self, rows: Sequence[RecordRow], places: Sequence[int], names: Sequence[BlockHash]) -> None:
        self.records.write(rows, places)


SHADOW_BATCH_BLOCKS = 32
"""Small: a move waits behind one such request, and it takes processor time from the engine."""


class HostShelf(Shelf):
    """Host slots, within the limit for shadows."""

    route = Route.SHADOW

    def __init__(self, door: Door, store: KvStore) -> None:
        super().__init__(door, store, SHADOW_BATCH_BLOCKS)
        self._host = store.host

    def known(self, names: Sequence[BlockHash]) -> "Future[int]":
        return self._door.ask(lambda core, now_s: self._cache.shadows.known(names, now_s))

    async def make_room(self, blocks: int, before: Sequence[BlockHash]) -> list[int]:
        shadows = self._cache.shadows
        return await self._door.take(
            lambda core, now_s: shadows.room(blocks, now_s, before),
            lambda places: shadows.fill(places, (), None, 0.0),
        )

    def take_in(
        self, places: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None
    ) -> "Future[int]":
        return self._door.give(lambda core, now_s: self._cache.shadows.fill(places, names, parent, now_s))

    def _copy(self, rows: Sequence[RecordRow], places: Sequence[int], names: Sequence[BlockHash]) -> None:
        for row, place, name in zip(rows, places, names, strict=False):
            self._host.row(place)[:] = row
            self._host.seal(place, name)
