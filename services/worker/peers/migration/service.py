"""Blocks of this worker on the bus and the bulk plane: given to others, fetched for sequences that move here.

Measures the way from each worker that has the same KV once, before it is needed. A worker without a prefix
cache neither gives nor takes.
"""

import asyncio
from typing import Any

from services.worker.engine_thread import Runner
from services.worker.kv.store import CacheableEngine, KvStore
from services.worker.peers.engine_calls import CacheDoor
from services.worker.peers.migration.settings import TransferConfig
from services.worker.peers.migration.source import BlockSource
from services.worker.peers.migration.target import Target
from services.worker.peers.registry import Registry
from shared import subjects
from shared.average import averaged
from shared.bus import Bus, Endpoint, Handler, fenced
from shared.clock import Clock
from shared.errors import KvasirError
from shared.log import get_logger
from shared.messages.moves import BlocksPulled, PullBlocks

HANDLERS: tuple[Handler, ...] = (Endpoint(subjects.worker_pull, PullBlocks, "pull", concurrency=16),)
_LOOK_S = 0.5
_log = get_logger("worker.transfer")


class Transfers:
    """A worker's blocks for others, and others' blocks for it."""

    def __init__(
        self,
        bus: Bus,
        config: TransferConfig,
        engine: CacheableEngine,
        store: KvStore,
        registry: Registry,
        runner: Runner,
        clock: Clock,
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._occupancy = runner.occupancy
        self._clock = clock
        self._fingerprint = store.fingerprint
        self._block_bytes = store.record_bytes
        cache = CacheDoor(runner.door, store.cache)
        self._source = BlockSource(cache, engine.records(), store.fingerprint, store.sums)
        self._target = Target(
            registry,
            cache,
            engine.records(),
            store.fingerprint,
            engine.block_tokens,
            config,
            clock,
            store.sums,
        )
        self._looked_at: set[str] = set()
        self._unreachable: dict[str, int] = {}
        self._busy = (0.0, clock(), 0.0)
        """Engine seconds, time and share at the last report."""

    async def serve(self) -> None:
        """Until cancelled."""
        for kind, receiver in self._source.receivers.items():
            self._registry.plane.desk.serve(kind, receiver)
        try:
            await self._bus.attach(HANDLERS, self)
            while True:
                await asyncio.sleep(_LOOK_S)
                with fenced("look at the other workers"):
                    await self._look_around()
        finally:
            await self._bus.detach(HANDLERS, self)
            self._target.close()

    async def pull(self, order: PullBlocks) -> BlocksPulled:
        """Raises KvasirError when nothing could be fetched."""
        return await self._target.pull(order)

    def section(self) -> dict[str, Any]:
        """Of the heartbeat: what fetching from here and to here is like."""
        if not self._registry.plane.addresses:
            return {}
        return {
            "kv_block_bytes": self._block_bytes,
            "link_bytes_per_s": self._rates(),
            "busy_share": self._busy_share(),
        }

    def details(self) -> dict[str, object]:
        """For `python -m services status`."""
        return {
            "fetched_blocks": self._target.fetched_blocks,
            "given_blocks": self._source.given_blocks,
            "refused_blocks": self._target.refused_blocks,
            "links_mb_per_s": ", ".join(f"{name} {rate / 1e6:.0f}" for name, rate in self._rates().items()),
        }

    def _others(self) -> dict[str, int]:
        """Those with the same KV, and their present lives."""
        return {
            name: one.incarnation
            for name, one in self._registry.neighbours.items()
            if one.fingerprint == self._fingerprint and one.can_be_dialled
        }

    def _rates(self) -> dict[str, float]:
        """By worker to fetch from, as far as they were measured."""
        found = {name: self._target.bytes_per_s(name) for name in sorted(self._others())}
        return {name: rate for name, rate in found.items() if rate is not None}

    async def _look_around(self) -> None:
        """Forgets who is gone; measures the way from one that is new."""
        others = self._others()
        for name in self._looked_at - others.keys():
            self._unreachable.pop(name, None)
            self._target.forget(name)
        self._looked_at = set(others)
        for name, incarnation in others.items():
            if self._target.bytes_per_s(name) is None and self._unreachable.get(name) != incarnation:
                await self._measure(name, incarnation)

    async def _measure(self, name: str, incarnation: int) -> None:
        try:
            await self._target.measure(name, incarnation)
            self._unreachable.pop(name, None)
        except (KvasirError, TimeoutError) as error:
            self._unreachable[name] = incarnation
            _log.info("the link from %s was not measured: %s", name, error)

    def _busy_share(self) -> float:
        """Of the time since the last report, smoothed."""
        engine_s, at_s, share = self._busy
        now_s, now_engine_s = self._clock(), self._occupancy.engine_s
        if now_s > at_s:
            share = averaged(share, min(1.0, (now_engine_s - engine_s) / (now_s - at_s)), 0.5)
        self._busy = (now_engine_s, now_s, share)
        return share
