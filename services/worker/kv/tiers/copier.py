"""Moves blocks between device, host, peers and disk: what the cache decides, carried out and verified.

Each copy goes through the worker's `TransferEngine`. How it ended is handed to `on_done` on the thread that
owns the cache, which applies it (`Ended.apply`) between two steps. Knows no order of eviction and no
sequence.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from time import monotonic, perf_counter
from typing import Protocol

import numpy as np

from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.tier_copier import Load, Loaded, Store, StoredBlock
from services.worker.kv.tiers.disk import DiskTier
from services.worker.kv.tiers.host import HostTier
from services.worker.kv.tiers.peers import PeerTier
from services.worker.kv.tiers.records import RecordRow, Records
from services.worker.kv.tiers.throttle import Throttle
from services.worker.kv.transfers import Route, Ticket, TransferEngine
from shared.blocks import BlockHash


class Ended(Protocol):
    """A copy is over; how it ended is for the cache to know."""

    def apply(self, cache: PrefixCache) -> None:
        """On the cache's own thread, once."""
        ...


_MOST_STORES = 256
"""Remembered: far more than can be waiting for their answer."""
_BATCH_BLOCKS = 16
"""So many are brought to the device in one copy."""
_PROFILED_BLOCKS, _PROFILES, _PROFILE_S = 4, 3, 0.05
"""Timed at the start, so many times; a tier so slow that it takes longer is known well enough."""


@dataclass(frozen=True, slots=True)
class DiskCopyDone:
    """A copy between host and disk is over."""

    name: BlockHash
    place: int
    """The host slot that was read into, or the disk slot that was written."""
    ok: bool
    written: bool

    def apply(self, cache: PrefixCache) -> None:
        """On the cache's own thread, once."""
        if self.written:
            cache.on_written(self.name, self.place, ok=self.ok)
        else:
            cache.on_read(self.name, self.place, ok=self.ok)


@dataclass(frozen=True, slots=True)
class SendDone:
    """A copy to a peer is over."""

    name: BlockHash
    place: int
    """The peer's slot."""
    ok: bool

    def apply(self, cache: PrefixCache) -> None:
        """On the cache's own thread, once."""
        cache.peers.on_sent(self.name, self.place, ok=self.ok)


@dataclass(frozen=True, slots=True)
class LoadDone:
    """What came to the device."""

    ticket: int
    loaded: Loaded

    def apply(self, cache: PrefixCache) -> None:
        """On the cache's own thread, once."""
        cache.on_loaded(self.ticket, self.loaded)


@dataclass(frozen=True, slots=True)
class StoreDone:
    """Blocks were copied to the host."""

    ticket: int
    ok: bool

    def apply(self, cache: PrefixCache) -> None:
        """On the cache's own thread, once."""
        cache.on_stored(self.ticket, ok=self.ok)


@dataclass(frozen=True, slots=True)
class Throttles:
    """Speeds that the tiers' copies may not exceed."""

    host: Throttle
    disk: Throttle
    peers: Throttle

    @classmethod
    def of(
        cls, host_bytes_per_s: float = 0.0, disk_bytes_per_s: float = 0.0, peer_bytes_per_s: float = 0.0
    ) -> "Throttles":
        """0 does not limit."""
        return cls(Throttle(host_bytes_per_s), Throttle(disk_bytes_per_s), Throttle(peer_bytes_per_s))

    def at(self, tier: Tier) -> Throttle:
        """Of what is loaded from there."""
        if tier is Tier.HOST:
            return self.host
        return self.peers if tier is Tier.PEER else self.disk


class TierMover:
    """A `BlockMover` over real memory and a real file. `on_done` is called when `transfers` are settled."""

    def __init__(
        self,
        transfers: TransferEngine,
        records: Records,
        host: HostTier,
        disk: DiskTier | None,
        on_done: Callable[[Ended], None],
        throttles: Throttles | None = None,
        peers: PeerTier | None = None,
    ) -> None:
        self._transfers = transfers
        self._records = records
        self._host = host
        self._disk = disk
        self._peers = peers
        self._on_done = on_done
        self._throttles = throttles or Throttles.of()
        self._staged = np.empty((_BATCH_BLOCKS, records.record_bytes), dtype=np.uint8)
        self.counts: Counter[str] = Counter()
        self._stores: dict[int, Ticket[Ended]] = {}
        """By ticket: the last ones."""
        self._incoming, self._outgoing = records.twin(), records.twin()
        """Of the two threads."""

    def start_load(self, ticket: int, loads: Sequence[Load], most_s: float) -> bool:
        """See `BlockMover`."""

        def copy() -> LoadDone:
            return LoadDone(ticket, self.load(loads, most_s))

        return self._start(Route.LOAD, copy, LoadDone(ticket, Loaded(0)), len(loads)) is not None

    def start_store(self, ticket: int, stores: Sequence[Store]) -> bool:
        """See `BlockMover`."""

        def copy() -> StoreDone:
            self._store(stores, self._outgoing)
            return StoreDone(ticket, ok=True)

        job = self._start(Route.STORE, copy, StoreDone(ticket, ok=False), len(stores))
        if job is None:
            return False
        self._stores[ticket] = job
        while len(self._stores) > _MOST_STORES:
            del self._stores[next(iter(self._stores))]
        return True

    def finish_store(self, ticket: int) -> bool:
        """See `BlockMover`. Raises InternalError when a copy in memory does not end."""
        answer = self._transfers.finish(self._stores.pop(ticket))
        return isinstance(answer, StoreDone) and answer.ok

    def load(self, loads: Sequence[Load], most_s: float) -> Loaded:
        """In order, each verified. What is past its time is given up between two blocks, or while throttled.
        On the thread of loads, or before there are any."""
        until_s = monotonic() + most_s
        elapsed_s = [0.0] * len(Tier)
        done = 0
        while done < len(loads):
            batch = _one_tier(loads[done : done + _BATCH_BLOCKS])
            part = self._load_batch(batch, until_s)
            done += part.done
            elapsed_s[batch[0].tier] += part.elapsed_s[batch[0].tier]
            if part.done < len(batch) or monotonic() > until_s:
                return replace(part, done=done, elapsed_s=tuple(elapsed_s))
        return Loaded(done, tuple(elapsed_s))

    def profile(self, device_blocks: int) -> float:
        """Seconds that a block takes from the host to the device, before either has anything in it; 0 where
        there is no host tier."""
        count = min(_PROFILED_BLOCKS, self._host.slots, device_blocks)
        for place in range(count):
            self._host.seal(place, b"")
        loads = [Load(b"", Tier.HOST, place, place) for place in range(count)]
        best_s = inf
        for _ in range(_PROFILES if count else 0):
            loaded = self.load(loads, _PROFILE_S)
            took_s = loaded.elapsed_s[Tier.HOST] / loaded.done if loaded.done else _PROFILE_S
            best_s = min(best_s, took_s)
        return best_s if count else 0.0

    def store(self, stores: Sequence[Store]) -> float:
        """See `BlockMover`."""
        started_s = perf_counter()
        self._store(stores, self._records)
        return perf_counter() - started_s

    def seal(self, place: int, name: BlockHash) -> None:
        """See `BlockMover`."""
        self._host.seal(place, name)

    def start_write(self, source: int, node: StoredBlock) -> bool:
        """See `BlockMover`."""
        disk = self._disk
        if disk is None:
            return False
        sum_ = self._host.checksum_of(source)  # now: the slot may be lost and reused before it is written

        def write() -> bool:
            row = self._host.row(source)
            self._throttles.disk.wait(row.nbytes)
            return self._host.is_intact(source, node.name) and disk.write(node, row, sum_)

        return self._start_on_disk(
            Route.WRITE, DiskCopyDone(node.name, node.place, ok=True, written=True), write
        )

    def start_send(self, source: int, node: StoredBlock) -> bool:
        """See `BlockMover`."""
        peers = self._peers
        if peers is None:
            return False
        sum_ = self._host.checksum_of(source)  # as in `start_write`
        done = SendDone(node.name, node.place, ok=True)

        def send() -> SendDone:
            row = self._host.row(source)
            self._throttles.peers.wait(row.nbytes)
            return replace(done, ok=self._host.is_intact(source, node.name) and peers.write(node, row, sum_))

        return self._start(Route.SEND, send, replace(done, ok=False)) is not None

    def start_read(self, place: int, target: int, name: BlockHash) -> bool:
        """See `BlockMover`."""
        disk = self._disk
        if disk is None:
            return False

        def read() -> bool:
            row = self._host.row(target)
            self._throttles.disk.wait(row.nbytes)
            if not disk.read(place, name, row):
                return False
            self._host.seal(target, name)
            return True

        return self._start_on_disk(Route.READ, DiskCopyDone(name, target, ok=True, written=False), read)

    def write_now(self, node: StoredBlock, tier: Tier, source: int, until_s: float) -> bool:
        """Device block or host slot → the node's disk slot, in this thread, once the others have ended.
        False when there is no disk, the source is not intact, writing failed, or it would end after `until_s`
        (monotonic clock)."""
        disk = self._disk
        if disk is None or tier is Tier.PEER:
            return False
        if tier is Tier.HOST:
            row, sum_ = self._host.row(source), self._host.checksum_of(source)
            is_intact = self._host.is_intact(source, node.name)
        else:
            row, is_intact = self._staged[0], True
            self._records.read([source], [row])
            sum_ = self._host.sums.of(row, node.name, disk.geometry.fingerprint)
        return is_intact and self._throttles.disk.wait(row.nbytes, until_s) and disk.write(node, row, sum_)

    def close(self) -> None:
        """Gives the file back, when nothing is copied any more."""
        if self._disk is not None:
            self._disk.close()
            self._disk = None

    def _load_batch(self, batch: Sequence[Load], until_s: float) -> Loaded:
        """Loads from one tier, brought to the device together."""
        tier = batch[0].tier
        throttle = self._throttles.at(tier)
        started_s = last_s = perf_counter()
        rows: list[RecordRow] = []
        failed = False
        for load in batch:
            if not throttle.wait(self._records.record_bytes, until_s):
                break
            row = self._fetch(load, self._staged[len(rows)])
            if row is None:
                failed = True
                break
            rows.append(row)
            last_s = perf_counter()
            if monotonic() > until_s:
                break
        wasted_s = perf_counter() - last_s
        if rows:
            self._incoming.write(rows, [load.block for load in batch[: len(rows)]])
        elapsed_s = [0.0] * len(Tier)
        elapsed_s[tier] = perf_counter() - started_s - wasted_s
        return Loaded(len(rows), tuple(elapsed_s), failed, wasted_s)

    def _fetch(self, load: Load, buffer: RecordRow) -> RecordRow | None:
        """The verified record; None when it is not intact.

        It is verified where nobody else writes: a copy of the file's bytes, or of a peer's, and the slot of a
        held block.
        """
        if load.tier is Tier.HOST:
            if self._host.is_intact(load.place, load.name):
                return self._host.row(load.place)
            self.counts["host_checksum_failures"] += 1
            return None
        if load.tier is Tier.PEER:
            is_there = self._peers is not None and self._peers.read(load.place, load.name, buffer)
            return buffer if is_there else None
        if self._disk is not None and self._disk.read(load.place, load.name, buffer):
            return buffer
        return None

    def _store(self, stores: Sequence[Store], records: Records) -> None:
        last = {store.place: store for store in stores}
        rows = [self._host.row(place) for place in last]
        records.read([store.block for store in last.values()], rows)
        for place, store in last.items():
            self._host.seal(place, store.name)
        self._throttles.host.wait(len(rows) * records.record_bytes)

    def _start_on_disk(self, route: Route, done: DiskCopyDone, copy: Callable[[], bool]) -> bool:
        def run() -> DiskCopyDone:
            return replace(done, ok=copy())

        return self._start(route, run, replace(done, ok=False)) is not None

    def _start(
        self, route: Route, copy: Callable[[], Ended], failed: Ended, blocks: int = 1
    ) -> Ticket[Ended] | None:
        """None when too many are open."""
        size_bytes = blocks * self._records.record_bytes
        return self._transfers.start(route, copy, failed, size_bytes=size_bytes, on_ended=self._on_done)


def _one_tier(loads: Sequence[Load]) -> Sequence[Load]:
    """As many as lie in the tier of the first."""
    count = next((index for index, load in enumerate(loads) if load.tier is not loads[0].tier), len(loads))
    return loads[:count]
