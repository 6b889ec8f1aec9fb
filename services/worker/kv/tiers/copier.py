"""Moves blocks between device, host, peers and disk: what the cache decides, carried out and verified.

Each copy goes through the worker's `TransferEngine`, which hands its result over on the cache's thread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from time import monotonic, perf_counter

import numpy as np

from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.tier_copier import Load, Loaded, Store, StoredBlock
from services.worker.kv.tiers.disk import DiskTier
from services.worker.kv.tiers.host import HostTier, PeerTier
from services.worker.kv.tiers.records import RecordRow, Records
from services.worker.kv.transfers import Route, T, Throttle, Ticket, TransferEngine
from shared.blocks import BlockHash

_MOST_STORES = 256
"""Number of stores remembered: far more than can be open."""
_BATCH_BLOCKS = 16
"""Maximum number of blocks in one copy to the device."""
_PROFILED_BLOCKS, _PROFILES, _PROFILE_S = 4, 3, 0.05
"""Blocks, repetitions and maximum seconds of the measurement at the start."""


class TierMover:
    """A `BlockMover` over real memory, a file and peers."""

    def __init__(
        self,
        transfers: TransferEngine,
        records: Records,
        host: HostTier,
        disk: DiskTier | None,
        bytes_per_s: Mapping[Tier, float] | None = None,
        peers: PeerTier | None = None,
    ) -> None:
        """`bytes_per_s` slows the copies of a tier down, for tests."""
        self._transfers = transfers
        self._records = records
        self._host = host
        self._below: dict[Tier, DiskTier | PeerTier | None] = {Tier.DISK: disk, Tier.PEER: peers}
        self._throttles = {tier: Throttle((bytes_per_s or {}).get(tier, 0.0)) for tier in Tier}
        self._staged = np.empty((_BATCH_BLOCKS, records.record_bytes), dtype=np.uint8)
        self._stores: dict[int, Ticket[bool]] = {}
        """The last stores by their number."""
        self._incoming, self._outgoing = records.twin(), records.twin()
        """Records of the two copying threads."""

    def start_load(self, loads: Sequence[Load], most_s: float, ended: Callable[[Loaded], None]) -> bool:
        def copy() -> Loaded:
            return self.load(loads, most_s)

        return self._start(Route.LOAD, copy, Loaded(0), ended, len(loads)) is not None

    def start_store(self, ticket: int, stores: Sequence[Store], ended: Callable[[bool], None]) -> bool:
        def copy() -> bool:
            self._store(stores, self._outgoing)
            return True

        job = self._start(Route.STORE, copy, False, ended, len(stores))
        if job is None:
            return False
        self._stores[ticket] = job
        while len(self._stores) > _MOST_STORES:
            del self._stores[next(iter(self._stores))]
        return True

    def finish_store(self, ticket: int) -> bool:
        """See `BlockMover`. Raises InternalError when a copy in memory does not end."""
        return self._transfers.finish(self._stores.pop(ticket))

    def load(self, loads: Sequence[Load], most_s: float) -> Loaded:
        """Load and verify blocks in order; stop between two of them, or while throttled, when time is up. On
        the thread of loads, or before there are any."""
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
        """Return the seconds per block from the host to the device, measured while both are empty; 0: there
        is no host tier."""
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
        started_s = perf_counter()
        self._store(stores, self._records)
        return perf_counter() - started_s

    def seal(self, place: int, name: BlockHash) -> None:
        self._host.seal(place, name)

    def start_write(self, tier: Tier, source: int, node: StoredBlock, ended: Callable[[bool], None]) -> bool:
        below = self._below[tier]
        sum_ = self._host.checksum_of(source)  # now: the slot may be lost and reused before it is written

        def write() -> bool:
            row = self._host.row(source)
            self._throttles[tier].wait(row.nbytes)
            if below is None or not self._host.is_intact(source, node.name):
                return False
            return below.write(node, row, sum_)

        route = Route.WRITE if tier is Tier.DISK else Route.SEND
        return self._start(route, write, False, ended) is not None

    def start_read(self, place: int, target: int, name: BlockHash, ended: Callable[[bool], None]) -> bool:
        disk = self._below[Tier.DISK]

        def read() -> bool:
            row = self._host.row(target)
            self._throttles[Tier.DISK].wait(row.nbytes)
            if disk is None or not disk.read(place, name, row):
                return False
            self._host.seal(target, name)
            return True

        return self._start(Route.READ, read, False, ended) is not None

    def write_now(self, node: StoredBlock, tier: Tier, source: int, until_s: float) -> bool:
        """Write a device block or host slot to disk in this thread, once the others have ended. False when
        there is no disk, the source is not intact, writing failed, or it would end after `until_s` (monotonic
        clock)."""
        disk = self._below[Tier.DISK]
        if disk is None or tier is Tier.PEER:
            return False
        if tier is Tier.HOST:
            row, sum_ = self._host.row(source), self._host.checksum_of(source)
            is_intact = self._host.is_intact(source, node.name)
        else:
            row, is_intact = self._staged[0], True
            self._records.read([source], [row])
            sum_ = self._host.sums.of(row, node.name, self._host.fingerprint)
        is_in_time = is_intact and self._throttles[Tier.DISK].wait(row.nbytes, until_s)
        return is_in_time and disk.write(node, row, sum_)

    def close(self) -> None:
        """Close the file, when nothing is copied any more."""
        disk, self._below[Tier.DISK] = self._below[Tier.DISK], None
        if isinstance(disk, DiskTier):
            disk.close()

    def _load_batch(self, batch: Sequence[Load], until_s: float) -> Loaded:
        """Load blocks of one tier and bring them to the device together."""
        tier = batch[0].tier
        throttle = self._throttles[tier]
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
        """Return the verified record; None when it is not intact. It is verified where nobody else writes: in
        a held slot, or a copy of the file's or a peer's bytes."""
        if load.tier is Tier.HOST:
            return self._host.row(load.place) if self._host.check(load.place, load.name) else None
        below = self._below[load.tier]
        return buffer if below is not None and below.read(load.place, load.name, buffer) else None

    def _store(self, stores: Sequence[Store], records: Records) -> None:
        last = {store.place: store for store in stores}
        rows = [self._host.row(place) for place in last]
        records.read([store.block for store in last.values()], rows)
        for place, store in last.items():
            self._host.seal(place, store.name)
        self._throttles[Tier.HOST].wait(len(rows) * records.record_bytes)

    def _start(
        self, route: Route, copy: Callable[[], T], failed: T, ended: Callable[[T], None], blocks: int = 1
    ) -> Ticket[T] | None:
        """None when too many are open."""
        size_bytes = blocks * self._records.record_bytes
        return self._transfers.start(route, copy, failed, size_bytes=size_bytes, on_ended=ended)


def _one_tier(loads: Sequence[Load]) -> Sequence[Load]:
    """Return the leading loads that lie in the tier of the first."""
    count = next((index for index, load in enumerate(loads) if load.tier is not loads[0].tier), len(loads))
    return loads[:count]
