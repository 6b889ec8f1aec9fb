"""The taking side of migration: fetches blocks by name into the prefix cache, in batches, beside the engine.

A batch is allocated, filled by the link's thread, and verified block by block. Only then is it published, so
a fetch that stops anywhere leaves complete blocks or none, and the target computes the rest. Each source gets
one request at a time. Shadows (`PullBlocks.is_shadow`) go to the host in small batches with pauses, so that
other fetches can go in between. Decides nothing about sequences.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np

from services.worker.core.settings import TransferConfig
from services.worker.door import Door
from services.worker.kv.store import CacheableEngine, KvStore
from services.worker.kv.tiers.records import RecordRow, Records
from services.worker.kv.transfers import Route, Throttle
from services.worker.peers.migration.source import BLOCKS, GivenBlocks, WantedBlocks
from services.worker.peers.registry import Registry
from services.worker.peers.transport.base import bytes_of
from services.worker.peers.transport.link import PeerLink
from shared.blocks import BlockHash, chain, root
from shared.clock import Clock, monotonic_s
from shared.errors import DeadlineExceeded, InvalidMessage, KvasirError
from shared.messages.base import decode
from shared.messages.moves import BlocksPulled, PullBlocks


class Shelf(ABC):
    """One kind of destination: the device, for a sequence that moves here, or the host, for shadows.

    A shelf calls the cache on the engine's thread, and writes bytes through the transfer engine. Places
    belong to the fetch until `take_in`; blocks have one owner even when a caller stops waiting (`Door`)."""

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


_FAILED_S = 60.0
"""Time for which the heartbeat reports a failed link as speed 0."""


@dataclass(slots=True)
class _Way:
    """The link to one incarnation of a worker, if dialled, and whose turn it is."""

    incarnation: int
    lock: asyncio.Lock
    used_s: float
    link: PeerLink | None = None
    failed_s: float = float("-inf")
    """When the last move failed."""
    rests_until_s: float = float("-inf")
    """Shadows have used their share of the link until then."""


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Verified blocks that follow `parent`, in scratch memory, and the places reserved for them."""

    parent: BlockHash | None
    names: Sequence[BlockHash] = ()
    rows: Sequence[RecordRow] = ()
    places: Sequence[int] = ()
    link_s: float = 0.0
    """Time in which they were read and sent."""


class Target:
    """Fetches blocks for one worker, from workers whose store has the same fingerprint."""

    def __init__(
        self,
        registry: Registry,
        door: Door,
        store: KvStore,
        engine: CacheableEngine,
        config: TransferConfig,
        clock: Clock = monotonic_s,
    ) -> None:
        self._registry = registry
        self._device = DeviceShelf(door, store, config.batch_blocks, engine.records())
        self._host = HostShelf(door, store)
        self._most_shadows = min(store.cache.shadows.most_blocks, engine.kv_blocks)
        self._fingerprint, self._sums, self._record_bytes = store.fingerprint, store.sums, store.record_bytes
        self._block_tokens = engine.block_tokens
        self._config = config
        self._clock = clock
        self._throttle = Throttle(config.link_bytes_per_s)
        self._ways: dict[str, _Way] = {}
        self.fetched_blocks = 0
        self.refused_blocks = 0
        """Number that arrived with a wrong checksum."""
        self.shadowed_blocks = 0
        """Number of fetched blocks that were shadows."""

    async def pull(self, order: PullBlocks) -> BlocksPulled:
        """Fetch as many blocks as the order's time allows. Raises KvasirError when none could be fetched."""
        names = chain(root(self._fingerprint, order.cache_salt), order.tokens, self._block_tokens)
        way = self._way(order.source, order.source_incarnation)
        try:
            async with asyncio.timeout(order.valid_for_s + self._config.answer_s):
                if order.is_shadow:
                    return await self._shadow(order, way, names)
                async with way.lock:
                    return await self._pull(order, way, names)
        except (KvasirError, TimeoutError) as error:
            if not order.is_shadow:  # Shadows yield to all other copies, and may time out.
                way.failed_s = self._clock()
            if isinstance(error, KvasirError):
                raise
            raise DeadlineExceeded(f"{order.source} did not send its blocks in time") from None

    async def _pull(self, order: PullBlocks, way: _Way, names: Sequence[BlockHash]) -> BlocksPulled:
        began_s = now_s = self._clock()
        known = held = await asyncio.wrap_future(self._device.known(names))
        while held < len(names) and now_s - began_s < order.valid_for_s:
            arrived = await self._fetch(order.source, way, names, held, self._device)
            count = await self._store(arrived, self._device)
            now_s, held = self._clock(), held + count
            if not count:
                break
        pulled = self._pulled(known, held, now_s - began_s)
        self._registry.rates.on_delivered(order.source, pulled.fetched_bytes, pulled.took_s)
        return pulled

    async def _shadow(self, order: PullBlocks, way: _Way, names: Sequence[BlockHash]) -> BlocksPulled:
        """Fetch shadows within their share of the link. Moves over the same link go in between."""
        shelf, share = self._host, self._config.shadow_link_share
        until_s, busy_s = self._clock() + order.valid_for_s, 0.0
        known = held = await asyncio.wrap_future(shelf.known(names))
        is_in_time = True
        while held < len(names) and (is_in_time := await self._has_turn(way, until_s)):
            try:
                arrived = await self._fetch(order.source, way, names, held, shelf)
            finally:
                way.lock.release()
            way.rests_until_s = self._clock() + arrived.link_s * (1.0 / share - 1.0)
            count = await self._store(arrived, shelf)  # May wait for the disk: the link is free meanwhile.
            busy_s, held = busy_s + arrived.link_s, held + count
            if not count:
                break
            if not self.shadowed_blocks:  # all may come to the device at once, where their worker dies
                await asyncio.to_thread(self._device.records.make_ready, self._most_shadows)
            self.shadowed_blocks += count
        return msgspec.structs.replace(self._pulled(known, held, busy_s), is_cut_short=not is_in_time)

    async def _has_turn(self, way: _Way, until_s: float) -> bool:
        """Take the link for shadows. False when they may not have it before `until_s`."""
        now_s = self._clock()
        rest_s = max(0.0, way.rests_until_s - now_s)
        if now_s + rest_s >= until_s:
            return False
        try:
            async with asyncio.timeout(until_s - now_s):
                await asyncio.sleep(rest_s)
                return await way.lock.acquire()
        except TimeoutError:
            return False

    def _pulled(self, known: int, held: int, took_s: float) -> BlocksPulled:
        return BlocksPulled(
            held_tokens=held * self._block_tokens,
            fetched_blocks=held - known,
            fetched_bytes=(held - known) * self._record_bytes,
            took_s=took_s,
        )

    def rates(self) -> dict[str, float]:
        """Return bytes per second by worker that blocks were lately fetched from; 0 after a failure."""
        found = {name: self.bytes_per_s(name) for name in sorted(self._ways)}
        return {name: rate for name, rate in found.items() if rate is not None}

    def bytes_per_s(self, source: str) -> float | None:
        """Return the speed of fetches from a worker: 0 after a failure, None before any measurement."""
        way = self._ways.get(source)
        if way is not None and self._clock() - way.failed_s < _FAILED_S:
            return 0.0
        measured = self._registry.rates.bytes_per_s(source)
        limit = self._config.link_bytes_per_s
        return measured if measured is None or not limit else min(measured, limit)

    def forget_idle(self, idle_s: float) -> None:
        """Close links that were unused for `idle_s`."""
        now_s = self._clock()
        for source, way in list(self._ways.items()):
            if now_s - way.used_s > idle_s and not way.lock.locked():
                self._registry.plane.choice.forget(source)
                self.forget(source)

    def forget(self, source: str) -> None:
        """Close the link to a worker that left or restarted."""
        way = self._ways.pop(source, None)
        if way is not None and way.link is not None:
            way.link.close()

    def close(self) -> None:
        """Close all links."""
        for source in list(self._ways):
            self.forget(source)

    def _way(self, source: str, incarnation: int) -> _Way:
        way = self._ways.get(source)
        if way is None or way.incarnation != incarnation:
            if way is not None:
                self._registry.plane.choice.forget(source)
            self.forget(source)
            way = self._ways[source] = _Way(incarnation, asyncio.Lock(), self._clock())
        way.used_s = self._clock()
        return way

    async def _fetch(
        self, source: str, way: _Way, names: Sequence[BlockHash], held: int, shelf: Shelf
    ) -> _Arrived:
        """Fetch the next batch of `names` after the first `held`. Raises KvasirError when the link fails."""
        if way.link is None or way.link.closed:
            way.link = await self._registry.dial(source, way.incarnation)
        link, parent = way.link, names[held - 1] if held else None
        batch = names[held : held + shelf.batch_blocks]
        places = await shelf.make_room(len(batch), names[:held])
        if not places:
            return _Arrived(parent)
        wanted = WantedBlocks(self._fingerprint, tuple(batch[: len(places)]), is_shadow=shelf is self._host)
        receiving = asyncio.ensure_future(asyncio.to_thread(self._receive, link, wanted))
        try:
            rows, link_s = await asyncio.shield(receiving)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                link.close()  # An answer is half read.
                receiving.add_done_callback(_drop)
            shelf.take_in(places, (), parent)
            raise
        return _Arrived(parent, batch[: len(rows)], rows, places, link_s)

    async def _store(self, arrived: _Arrived, shelf: Shelf) -> int:
        """Store what arrived; return how many blocks. Raises KvasirError when they cannot be written."""
        parent, names, rows, places = arrived.parent, arrived.names, arrived.rows, arrived.places
        if not places:
            return 0
        count = 0
        if rows:
            within_s = self._config.answer_s
            writing = asyncio.ensure_future(
                asyncio.to_thread(shelf.write, rows, places[: len(rows)], names, within_s)
            )

            def give_back(late: "asyncio.Future[int]") -> None:
                _drop(late)
                shelf.take_in(places, (), None)

            try:
                count = await asyncio.shield(writing)
            except asyncio.CancelledError:
                writing.add_done_callback(give_back)
                raise
            except BaseException:
                shelf.take_in(places, (), parent)
                raise
        self.fetched_blocks += count
        return await asyncio.wrap_future(shelf.take_in(places, names[:count], parent))

    def _receive(self, link: PeerLink, wanted: WantedBlocks) -> tuple[list[RecordRow], float]:
        """Receive blocks into scratch memory, on a thread of its own.

        Returns the leading ones that are verified, and how long the link was busy."""
        rows = np.empty((len(wanted.names), self._record_bytes), dtype=np.uint8)
        header, into = msgspec.msgpack.encode(wanted), [bytes_of(row) for row in rows]
        asked_s = self._clock()
        answer = link.ask(BLOCKS, header, into=into, deadline_s=self._config.answer_s)
        given = decode(answer.header, GivenBlocks)
        if len(given.checksums) != answer.buffers:
            raise InvalidMessage("blocks came without their checksums")
        self._throttle.wait(answer.buffers * self._record_bytes)
        link_s = max(0.0, self._clock() - asked_s - max(0.0, given.waited_s))
        good, is_comparable = 0, given.sums == self._sums.kind  # Else only the link has verified them.
        for row, name, expected in zip(rows[: answer.buffers], wanted.names, given.checksums, strict=False):
            if is_comparable and self._sums.of(row, name, self._fingerprint) != expected:
                self.refused_blocks += answer.buffers - good
                break
            good += 1
        return list(rows[:good]), link_s


def _drop(late: "asyncio.Future[Any]") -> None:
    """Mark the error of a thread's work as retrieved."""
    if not late.cancelled():
        late.exception()
