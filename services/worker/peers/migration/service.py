"""Blocks of this worker on the bus and the bulk plane: given to others, fetched for sequences that move here.

Finds the other workers that have the same KV by their heartbeats and measures the way from each once, before
it is needed. A worker without a prefix cache neither gives nor takes.
"""

import asyncio
from typing import Any

from services.worker.engine_thread import Runner
from services.worker.kv.store import CacheableEngine, KvStore
from services.worker.kv.tiers.records import Records
from services.worker.peers.attention.plane import BulkPlane
from services.worker.peers.migration.ledge import Ledge
from services.worker.peers.migration.settings import TransferConfig
from services.worker.peers.migration.source import BlockSource
from services.worker.peers.migration.target import Target
from shared import subjects
from shared.average import averaged
from shared.bus import Bus, Endpoint, Handler, fenced
from shared.clock import Clock
from shared.errors import KvasirError
from shared.liveness import AwakeClock, Liveness
from shared.log import get_logger
from shared.messages.moves import BlocksPulled, PullBlocks
from shared.messages.reports import WorkerReported

HANDLERS: tuple[Handler, ...] = (Endpoint(subjects.worker_pull, PullBlocks, "pull", concurrency=16),)
_PROBE_INTERVAL_S = 0.5
_SILENCE_S = 5.0
_log = get_logger("worker.transfer")


class Transfers:
    """One worker's."""

    def __init__(
        self,
        bus: Bus,
        config: TransferConfig,
        engine: CacheableEngine,
        store: KvStore,
        plane: BulkPlane,
        runner: Runner,
        clock: Clock,
    ) -> None:
        self._bus = bus
        self._config = config
        self._plane = plane
        self._runner = runner
        self._clock = clock
        self._fingerprint = store.fingerprint
        self._block_bytes = store.record_bytes
        ledge = Ledge(runner, store.cache)
        self._source = BlockSource(ledge, Records(engine.pools), store.fingerprint)
        self._target = Target(
            plane, ledge, Records(engine.pools), store.fingerprint, engine.block_tokens, config, clock
        )
        self._others = Liveness(_SILENCE_S)
        """Workers with the same KV."""
        self._awake_s = AwakeClock(clock, lambda: bus.connected)
        self._unreachable: dict[str, int] = {}
        self._busy = (0.0, clock(), 0.0)
        """Engine seconds, time and share at the last report."""

    async def serve(self) -> None:
        """Until cancelled."""
        for kind, receiver in self._source.receivers.items():
            self._plane.serve(kind, receiver)
        try:
            await self._bus.attach(HANDLERS, self)
            while True:
                await asyncio.sleep(_PROBE_INTERVAL_S)
                with fenced("look at the other workers"):
                    await self._look_around()
        finally:
            await self._bus.detach(HANDLERS, self)
            self._target.close()

    async def pull(self, order: PullBlocks) -> BlocksPulled:
        """Raises KvasirError when nothing could be fetched."""
        return await self._target.pull(order)

    def on_reported(self, report: WorkerReported) -> None:
        is_other = report.worker_id != self._bus.instance
        if is_other and report.fingerprint == self._fingerprint and report.bulk_addresses:
            self._others.hear(report.worker_id, report.incarnation, self._awake_s())

    def section(self) -> dict[str, Any]:
        """Of the heartbeat: what fetching from here and to here is like."""
        if not self._plane.addresses:
            return {}
        rates = self._target.rates.bytes_per_s()
        return {
            "kv_block_bytes": self._block_bytes,
            "link_bytes_per_s": {name: rate for name, rate in rates.items() if name in self._others},
            "busy_share": self._busy_share(),
        }

    def details(self) -> dict[str, object]:
        """For `python -m services status`."""
        rates = self._target.rates.bytes_per_s()
        return {
            "fetched_blocks": self._target.fetched_blocks,
            "given_blocks": self._source.given_blocks,
            "refused_blocks": self._target.refused_blocks,
            "links_mb_per_s": ", ".join(f"{name} {rate / 1e6:.0f}" for name, rate in sorted(rates.items())),
        }

    async def _look_around(self) -> None:
        """Forgets who is silent; measures the way from one that is new."""
        for name in self._others.silent(self._awake_s()):
            self._unreachable.pop(name, None)
            self._target.forget(name)
        for name in list(self._others):
            incarnation = self._others.present(name)
            if incarnation is None or not self._config.probe_bytes:
                continue
            if not self._is_measured(name, incarnation):
                await self._measure(name, incarnation)

    def _is_measured(self, name: str, incarnation: int) -> bool:
        return self._target.rates.knows(name) or self._unreachable.get(name) == incarnation

    async def _measure(self, name: str, incarnation: int) -> None:
        try:
            await self._target.probe(name, incarnation)
            self._unreachable.pop(name, None)
        except (KvasirError, TimeoutError) as error:
            self._unreachable[name] = incarnation
            _log.info("the link from %s was not measured: %s", name, error)

    def _busy_share(self) -> float:
        """Of the time since the last report, smoothed."""
        engine_s, at_s, share = self._busy
        now_s, now_engine_s = self._clock(), self._runner.occupancy.engine_s
        if now_s > at_s:
            share = averaged(share, min(1.0, (now_engine_s - engine_s) / (now_s - at_s)), 0.5)
        self._busy = (now_engine_s, now_s, share)
        return share
