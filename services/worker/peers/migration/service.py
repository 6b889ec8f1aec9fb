"""Migration on the bus and the bulk plane: gives blocks to other workers, fetches blocks for this one.

Links are dialled on demand and closed after a while without use. Their speed is measured by the fetches. A
worker without a prefix cache neither gives nor takes.
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
"""A link unused for this long is closed."""


class Transfers:
    """Blocks of one worker for others, and of others for it."""

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
        """`reader` None: the worker borrows nothing."""
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
        """Give and fetch blocks, until cancelled."""
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
        """Fetch the blocks of an order. Raises KvasirError when none could be fetched."""
        return await self._target.pull(order)

    def section(self) -> dict[str, Any]:
        """Return the fields of the heartbeat: link speeds, size of a block, share of time in the engine."""
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
        """Return link speeds by worker that blocks were lately fetched from."""
        found = {name: self._target.bytes_per_s(name) for name in self._target.sources()}
        return {name: rate for name, rate in found.items() if rate is not None}

    def _busy_share(self) -> float:
        """Return the smoothed share of time that the engine was busy since the last report."""
        engine_s, at_s, share = self._busy
        now_s, now_engine_s = self._clock(), self._occupancy.engine_s
        if now_s > at_s:
            share = averaged(share, min(1.0, (now_engine_s - engine_s) / (now_s - at_s)), 0.5)
        self._busy = (now_engine_s, now_s, share)
        return share
