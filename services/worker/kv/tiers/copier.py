"""Moves blocks between device, host and disk: what the cache decides, carried out and verified.

Loads and stores happen in the calling thread, which owns the pools. Writes to disk and reads ahead happen
on one I/O thread behind a bounded queue; how they ended is handed to `on_done` there, and whoever owns the
cache applies it (`CopyDone.apply`) between two steps. Knows no order of eviction and no sequence.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from queue import SimpleQueue
from time import monotonic, perf_counter

import numpy as np

from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.tier_copier import Load, Loaded, Store, StoredBlock
from services.worker.kv.tiers.disk import DiskTier
from services.worker.kv.tiers.host import HostTier
from services.worker.kv.tiers.records import RecordRow, Records, checksum
from services.worker.kv.tiers.throttle import Throttle
from shared.blocks import BlockHash
from shared.log import get_logger

_logger = get_logger("worker.kv")
_BATCH_BLOCKS = 16
"""So many are brought to the device in one copy."""
_PROFILED_BLOCKS, _PROFILES, _PROFILE_S = 4, 3, 0.05
"""Timed at the start, so many times; a tier so slow that it takes longer is known well enough."""


@dataclass(frozen=True, slots=True)
class CopyDone:
    """A copy on the I/O thread is over."""

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
class Throttles:
    """Speeds that the tiers' copies may not exceed."""

    host: Throttle
    disk: Throttle

    @classmethod
    def of(cls, host_bytes_per_s: float = 0.0, disk_bytes_per_s: float = 0.0) -> "Throttles":
        """0 does not limit."""
        return cls(Throttle(host_bytes_per_s), Throttle(disk_bytes_per_s))


class TierMover:
    """A `BlockMover` over real memory and a real file. `on_done` is called on the I/O thread."""

    def __init__(
        self,
        records: Records,
        host: HostTier,
        disk: DiskTier | None,
        on_done: Callable[[CopyDone], None],
        throttles: Throttles | None = None,
        most_open: int = 64,
    ) -> None:
        self._records = records
        self._host = host
        self._disk = disk
        self._on_done = on_done
        self._throttles = throttles or Throttles.of()
        self._most_open = most_open
        self._open = 0
        self._lock = threading.Lock()
        self._queue: SimpleQueue[tuple[CopyDone, Callable[[], bool]] | None] = SimpleQueue()
        self._closing = False
        self._staged = np.empty((_BATCH_BLOCKS, records.record_bytes), dtype=np.uint8)
        self.counts: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, name="kv-tiers", daemon=True)
        self._thread.start()

    @property
    def open_copies(self) -> int:
        """On the I/O thread, or waiting for it."""
        with self._lock:
            return self._open

    def load(self, loads: Sequence[Load], most_s: float) -> Loaded:
        """See `BlockMover`. What is past its time is given up between two blocks, or while throttled."""
        until_s = monotonic() + most_s
        elapsed_s = [0.0, 0.0, 0.0]
        done = 0
        while done < len(loads):
            batch = _one_tier(loads[done : done + _BATCH_BLOCKS])
            part = self._load_batch(batch, until_s)
            done += part.done
            elapsed_s[batch[0].tier] += part.elapsed_s[batch[0].tier]
            if part.done < len(batch) or monotonic() > until_s:
                return replace(part, done=done, elapsed_s=_three(elapsed_s))
        return Loaded(done, _three(elapsed_s))

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
        last = {store.place: store for store in stores}
        rows = [self._host.row(place) for place in last]
        self._records.read([store.block for store in last.values()], rows)
        for place, store in last.items():
            self._host.seal(place, store.name)
        self._throttles.host.wait(len(rows) * self._records.record_bytes)
        return perf_counter() - started_s

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

        return self._start(CopyDone(node.name, node.place, ok=True, written=True), write)

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

        return self._start(CopyDone(name, target, ok=True, written=False), read)

    def write_now(self, node: StoredBlock, tier: Tier, source: int, until_s: float) -> bool:
        """Device block or host slot → the node's disk slot, in this thread, once the I/O thread has ended.
        False when there is no disk, the source is not intact, writing failed, or it would end after `until_s`
        (monotonic clock)."""
        disk = self._disk
        if disk is None:
            return False
        if tier is Tier.HOST:
            row, sum_ = self._host.row(source), self._host.checksum_of(source)
            is_intact = self._host.is_intact(source, node.name)
        else:
            row, is_intact = self._staged[0], True
            self._records.read([source], [row])
            sum_ = checksum(row, node.name, disk.geometry.fingerprint)
        return is_intact and self._throttles.disk.wait(row.nbytes, until_s) and disk.write(node, row, sum_)

    def halt(self, deadline_s: float) -> bool:
        """End the I/O thread after the copy it is at; what is queued is answered as failed. False when it did
        not end in time."""
        with self._lock:
            self._closing = True
        self._queue.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            _logger.warning("the I/O thread of the KV tiers did not end within %.1f s", deadline_s)
            return False
        return True

    def close(self, deadline_s: float) -> bool:
        """`halt`, and give the file back. False when the thread did not end in time: the file is then left
        open, since it may still be written."""
        if not self.halt(deadline_s):
            return False
        if self._disk is not None:
            self._disk.close()
            self._disk = None
        return True

    def _load_batch(self, batch: Sequence[Load], until_s: float) -> Loaded:
        """Loads from one tier, brought to the device together."""
        tier = batch[0].tier
        throttle = self._throttles.host if tier is Tier.HOST else self._throttles.disk
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
            self._records.write(rows, [load.block for load in batch[: len(rows)]])
        elapsed_s = [0.0, 0.0, 0.0]
        elapsed_s[tier] = perf_counter() - started_s - wasted_s
        return Loaded(len(rows), _three(elapsed_s), failed, wasted_s)

    def _fetch(self, load: Load, buffer: RecordRow) -> RecordRow | None:
        """The verified record; None when it is not intact.

        It is verified where nobody else writes: a copy of the file's bytes, and the slot of a held block.
        """
        if load.tier is Tier.HOST:
            if self._host.is_intact(load.place, load.name):
                return self._host.row(load.place)
            self.counts["host_checksum_failures"] += 1
            return None
        if self._disk is not None and self._disk.read(load.place, load.name, buffer):
            return buffer
        return None

    def _start(self, done: CopyDone, copy: Callable[[], bool]) -> bool:
        with self._lock:
            if self._closing or self._open >= self._most_open:
                return False
            self._open += 1
            self._queue.put((done, copy))
        return True

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            done, copy = job
            try:
                ok = not self._closing and copy()
            except Exception:  # whatever it was, somebody waits for the answer
                _logger.exception("a copy between KV tiers failed")
                ok = False
            self._on_done(replace(done, ok=ok))
            with self._lock:
                self._open -= 1


def _three(elapsed_s: Sequence[float]) -> tuple[float, float, float]:
    device_s, host_s, disk_s = elapsed_s
    return device_s, host_s, disk_s


def _one_tier(loads: Sequence[Load]) -> Sequence[Load]:
    """As many as lie in the tier of the first."""
    count = next((index for index, load in enumerate(loads) if load.tier is not loads[0].tier), len(loads))
    return loads[:count]
