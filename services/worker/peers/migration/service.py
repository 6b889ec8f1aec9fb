"""Blocks of this worker on the bus and the bulk plane: given to others, fetched for sequences that move here.

Nobody is dialled before he is needed: the way from a worker is measured by what is fetched over it, and
forgotten when it was not used for long. A worker without a prefix cache neither gives nor takes.
"""

import asyncio
from typing import Any

from services.worker.engine_thread import Runner
from services.worker.kv.store import CacheableEngine, KvStore
from services.worker.peers.engine_calls import BorrowedReader, CacheDoor
from services.worker.peers.migration.settings import TransferConfig
from services.worker.peers.migration.source import BlockSource
from services.worker.peers.migration.target import Target
from services.worker.peers.registry import Registry
from shared import subjects
from shared.average import averaged
from shared.bus import Bus, Endpoint, Handler
from shared.clock import Clock
from shared.messages.moves import BlocksPulled, PullBlocks

HANDLERS: tuple[Handler, ...] = (Endpoint(subjects.worker_pull, PullBlocks, "pull", concurrency=16),)
_LOOK_S = 5.0
_IDLE_S = 600.0
"""A link that was not used for so long is closed."""


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
        reader: BorrowedReader | None = None,
    ) -> None:
        """`reader` None: nothing is borrowed."""
        self._bus = bus
        self._registry = registry
        self._occupancy = runner.occupancy
        self._clock = clock
        self._fingerprint = store.fingerprint
        self._block_bytes = store.record_bytes
        cache = CacheDoor(runner.door, store.cache, reader)
        self._source = BlockSource(cache, store.transfers, engine.records(), store.fingerprint, store.sums)
        self._target = Target(
            registry,
            cache,
            store.transfers,
            engine.records(),
            store.fingerprint,
            engine.block_tokens,
            config,
            clock,
            store.sums,
            store.host,
        )
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
                self._target.forget_idle(_IDLE_S)
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
            "fetched_as_shadows_blocks": self._target.shadowed_blocks,
            "given_as_shadows_blocks": self._source.shadowed_blocks,
            "links_mb_per_s": ", ".join(f"{name} {rate / 1e6:.0f}" for name, rate in self._rates().items()),
        }

    def _rates(self) -> dict[str, float]:
        """By worker that blocks were fetched from lately."""
        found = {name: self._target.bytes_per_s(name) for name in self._target.sources()}
        return {name: rate for name, rate in found.items() if rate is not None}

    def _busy_share(self) -> float:
        """Of the time since the last report, smoothed."""
        engine_s, at_s, share = self._busy
        now_s, now_engine_s = self._clock(), self._occupancy.engine_s
        if now_s > at_s:
            share = averaged(share, min(1.0, (now_engine_s - engine_s) / (now_s - at_s)), 0.5)
        self._busy = (now_engine_s, now_s, share)
        return share
