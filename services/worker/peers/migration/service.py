"""Migration on the bus and the bulk plane: gives blocks to other workers, fetches blocks for this one.

Links are dialled on demand and closed after a while without use. Their speed is measured by the fetches. A
worker without a prefix cache neither gives nor takes.
"""

import asyncio
from typing import Any

from services.worker.core.settings import TransferConfig
from services.worker.engine_thread import Runner
from services.worker.kv.store import CacheableEngine, KvStore
from services.worker.peers.attention.borrower import Borrower
from services.worker.peers.migration.source import BlockSource
from services.worker.peers.migration.target import Target
from services.worker.peers.registry import Registry
from shared import subjects
from shared.average import averaged
from shared.bus import Bus, Endpoint, Handler
from shared.clock import Clock
from shared.messages.moves import PullBlocks

HANDLERS: tuple[Handler, ...] = (Endpoint(subjects.worker_pull, PullBlocks, "pull", concurrency=16),)
_LOOK_S = 5.0
_IDLE_S = 600.0
"""A link unused for this long is closed."""


class Transfers:
    """Blocks of one worker for others, and of others for it. `borrower` None: the worker borrows nothing."""

    def __init__(
        self,
        bus: Bus,
        config: TransferConfig,
        engine: CacheableEngine,
        store: KvStore,
        registry: Registry,
        runner: Runner,
        clock: Clock,
        borrower: Borrower | None = None,
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._occupancy = runner.occupancy
        self._clock = clock
        self._block_bytes = store.record_bytes
        self._source = BlockSource(runner.door, store, engine.records(), borrower)
        self._target = Target(registry, runner.door, store, engine, config, clock)
        self._busy = (0.0, clock(), 0.0)
        """Engine seconds, time and share at the last report."""

    async def serve(self) -> None:
        """Give and fetch blocks, until cancelled."""
        self._registry.plane.desk.serve(self._source.receivers)
        try:
            await self._bus.attach(HANDLERS, self._target)
            while True:
                await asyncio.sleep(_LOOK_S)
                self._target.forget_idle(_IDLE_S)
        finally:
            await self._bus.detach(HANDLERS, self._target)
            self._target.close()

    def section(self) -> dict[str, Any]:
        """Return the fields of the heartbeat: link speeds, size of a block, share of time in the engine."""
        if not self._registry.plane.addresses:
            return {}
        return {
            "kv_block_bytes": self._block_bytes,
            "link_bytes_per_s": self._target.rates(),
            "busy_share": self._busy_share(),
        }

    def details(self) -> dict[str, object]:
        """For `python -m services status`."""
        rates = self._target.rates()
        return {
            "fetched_blocks": self._target.fetched_blocks,
            "given_blocks": self._source.given_blocks,
            "refused_blocks": self._target.refused_blocks,
            "fetched_as_shadows_blocks": self._target.shadowed_blocks,
            "given_as_shadows_blocks": self._source.shadowed_blocks,
            "links_mb_per_s": ", ".join(f"{name} {rate / 1e6:.0f}" for name, rate in rates.items()),
        }

    def _busy_share(self) -> float:
        """Return the smoothed share of time that the engine was busy since the last report."""
        engine_s, at_s, share = self._busy
        now_s, now_engine_s = self._clock(), self._occupancy.engine_s
        if now_s > at_s:
            share = averaged(share, min(1.0, (now_engine_s - engine_s) / (now_s - at_s)), 0.5)
        self._busy = (now_engine_s, now_s, share)
        return share
