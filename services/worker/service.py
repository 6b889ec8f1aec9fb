"""A worker on the bus: plans and commands to the engine's thread, frames, reports and heartbeats from it.

Decides nothing: the rules are in `steps`, `sequences` and `plans`, the computation in `engine`.
"""

import asyncio
import gc
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from services.worker.config import WorkerConfig
from services.worker.cores import bind_to
from services.worker.courier import Courier
from services.worker.engine.engine import Engine, TorchEngine, warm_up
from services.worker.engine.loading import load
from services.worker.heartbeat import Heartbeat
from services.worker.kv.cache import PrefixCache
from services.worker.kv.figures import CacheFigures, CacheMetrics, read_figures
from services.worker.kv.pool import BlockPool
from services.worker.kv.store import CacheableEngine, KvStore, open_store
from services.worker.lending.service import Lending, Owner
from services.worker.lending.vault import PoolVault
from services.worker.outbox import Outbox
from services.worker.prefixes import Prefixes
from services.worker.runner import Runner
from services.worker.sequences import Limits, SequenceTable
from services.worker.steps import Identity, StepCore
from shared import subjects
from shared.bus import Bus, Endpoint, Gatherable, Handler, Listener
from shared.clock import Clock, monotonic_s
from shared.errors import ConfigError, InvalidRequest, KvasirError, Overloaded
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.commands import CancelSequence, TakeSnapshot
from shared.messages.plans import BatchPlan
from shared.messages.prefixes import FindPrefixes, WorkerPrefixes
from shared.messages.reports import GatewayReported, ServiceStatus, WorkerReported
from shared.messages.tokens import AcknowledgeEnds, FetchedTokens, FetchTokens

HANDLERS: tuple[Handler, ...] = (
    Listener(subjects.worker_plan, BatchPlan, "on_plan"),
    Listener(subjects.worker_cancel, CancelSequence, "on_cancel"),
    Listener(subjects.worker_acknowledge, AcknowledgeEnds, "on_acknowledge"),
    Listener(subjects.ANY_GATEWAY_REPORTED, GatewayReported, "on_gateway"),
    Endpoint(subjects.worker_snapshot, TakeSnapshot, "take_snapshot"),
    Endpoint(subjects.worker_fetch, FetchTokens, "fetch"),
    Endpoint(subjects.worker_prefixes, FindPrefixes, "find_prefixes"),
    Gatherable(subjects.status("worker"), Empty, "status"),
)
_STOP_DEADLINE_S = 5.0
_MEASURE_S = 1.0
_TELL_S = 0.2
_EXPRESS_INTERVAL_S = 0.5
_SWITCH_INTERVAL_S = 0.0002
"""How long the engine's thread, back from an operator, waits for the event loop to let go of the
interpreter."""

_log = get_logger("worker")


class Worker:
    """The asyncio side of one worker; everything but `serve` hands over to the engine's thread."""

    def __init__(self, bus: Bus, config: WorkerConfig, engine: Engine, clock: Clock = monotonic_s) -> None:
        self._bus = bus
        self._config = config
        self._clock = clock
        self._started_s = clock()
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._outbox = Outbox(bus, drop_final_frames=config.fault_drop_final_frames)
        self._store = _open_store(config, engine, bus.instance, self._wake)
        self._cache_metrics = CacheMetrics()
        prefixes = _prefixes(self._store, config)
        self._news = None if self._store is None else self._store.cache.tell(bus.instance, bus.incarnation)
        self._courier = Courier(self._outbox, self._on_loop)
        pool = _pool(engine, self._store)
        self._runner = Runner(
            _core(bus, config, engine, pool, prefixes),
            engine,
            clock,
            deliver=self._courier.deliver,
            on_tick=self._courier.attend,
            on_broken=self._on_broken,
            cores=config.engine_cores,
            between=lambda: _work_ahead(self._store, prefixes),
        )
        self._lending = _lending(bus, config, engine, PoolVault(self._runner, pool), self._store, clock)
        self._heartbeat = Heartbeat(
            lambda: self._runner.ask(lambda core, now_s: core.report(now_s)),
            interval_s=config.heartbeat_s,
            stall_timeout_s=config.stall_timeout_s,
        )

    async def serve(self) -> None:
        """Until cancelled. Raises KvasirError when the engine is broken: a supervisor restarts it."""
        self._runner.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._outbox.drain())
                tasks.create_task(self._keep_express())
                await self._bus.attach(HANDLERS, self)
                tasks.create_task(self._beat())
                tasks.create_task(self._measure())
                tasks.create_task(self._tell())
                tasks.create_task(self._lending.serve())
                await self._broken
        except* KvasirError as group:
            raise group.exceptions[0] from None
        finally:
            await self._bus.detach(HANDLERS, self)
            if await asyncio.to_thread(self._runner.stop, _STOP_DEADLINE_S):
                self._courier.close()
            else:
                _log.warning("the last iteration did not end within %g s", _STOP_DEADLINE_S)
            if self._store is not None:
                await asyncio.to_thread(self._store.close, _STOP_DEADLINE_S)

    def on_plan(self, plan: BatchPlan) -> None:
        received_s = self._clock()
        self._runner.post(lambda core, _: core.on_plan(plan, received_s))

    def on_cancel(self, cancel: CancelSequence) -> None:
        self._runner.post(lambda core, now_s: core.on_cancel(cancel, now_s))

    def on_acknowledge(self, acknowledged: AcknowledgeEnds) -> None:
        self._runner.post(lambda core, now_s: core.on_acknowledge(acknowledged, now_s))

    def on_gateway(self, reported: GatewayReported) -> None:
        self._runner.post(lambda core, now_s: core.on_gateway(reported, now_s))

    async def take_snapshot(self, snapshot: TakeSnapshot) -> WorkerReported:
        """Raises StaleEpoch."""
        future = self._runner.ask(lambda core, now_s: core.on_snapshot(snapshot, now_s))
        return self._lending.annotate(self._heartbeat.number(await asyncio.wrap_future(future)))

    async def fetch(self, fetch: FetchTokens) -> FetchedTokens:
        return await asyncio.wrap_future(self._runner.ask(lambda core, _: core.on_fetch(fetch)))

    async def find_prefixes(self, question: FindPrefixes) -> WorkerPrefixes:
        """Raises InvalidRequest where there is no prefix cache."""
        news = self._news
        if news is None:
            raise InvalidRequest("this worker has no prefix cache")
        return await asyncio.wrap_future(self._runner.ask(lambda core, _: news.answer(question)))

    async def status(self, _: Empty) -> ServiceStatus:
        """What `python -m services status` shows."""
        future = self._runner.ask(lambda core, now_s: core.report(now_s))
        report = await asyncio.wrap_future(future)
        figures = await self._figures()
        return ServiceStatus(
            service="worker",
            instance=self._bus.instance,
            incarnation=self._bus.incarnation,
            uptime_s=self._clock() - self._started_s,
            details={
                "model": report.model,
                "epoch": report.epoch,
                "total_blocks": report.capacity.total_blocks,
                "free_blocks": report.capacity.free_blocks,
                "evictable_blocks": report.capacity.evictable_blocks,
                "block_tokens": report.block_tokens,
                "sequences": len(report.sequences),
                "prefill_tokens_per_s": round(report.prefill_tokens_per_s),
                "decode_step_ms": round(report.decode_step_s * 1e3, 2),
                "engine_s": round(self._runner.occupancy.engine_s, 4),
                "between_steps_s": round(self._runner.occupancy.between_s, 4),
                **self._lending.details(),
                **({} if figures is None else figures.details()),
            },
        )

    async def _figures(self) -> CacheFigures | None:
        """Of the prefix cache, which is the engine thread's."""
        store = self._store
        if store is None:
            return None
        return await asyncio.wrap_future(self._runner.ask(lambda core, now_s: read_figures(store)))

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(_MEASURE_S)
            try:
                figures = await self._figures()
            except Overloaded:
                continue
            if figures is not None:
                self._cache_metrics.show(figures)

    async def _tell(self) -> None:
        """What comes into the prefix cache and what leaves it. Who misses an event asks for it."""
        news, subject = self._news, subjects.worker_cached(self._bus.instance)
        while news is not None:
            await asyncio.sleep(_TELL_S)
            try:
                event = await asyncio.wrap_future(self._runner.ask(lambda core, now_s: news.take(now_s)))
                if event is not None and self._bus.connected:
                    await self._bus.publish(subject, event)
            except KvasirError as error:
                _log.warning("news of the prefix cache not sent: %s", error)

    async def _beat(self) -> None:
        subject = subjects.worker_reported(self._bus.instance)
        while True:
            began_s = self._clock()
            report = await self._heartbeat.next()
            if report is not None and self._bus.connected:
                try:
                    await self._bus.publish(subject, self._lending.annotate(report))
                except KvasirError as error:
                    _log.warning("heartbeat not sent: %s", error)
            await asyncio.sleep(max(0.0, self._config.heartbeat_s - (self._clock() - began_s)))

    async def _keep_express(self) -> None:
        """There is one, but where the bus is encrypted or the server does not want it."""
        regained = self._bus.reconnections
        while True:
            if self._bus.connected and (self._courier.wants_express or regained != self._bus.reconnections):
                regained = self._bus.reconnections
                try:
                    self._courier.offer(await self._bus.express())
                except KvasirError as error:
                    _log.debug("%s", error)
            await asyncio.sleep(_EXPRESS_INTERVAL_S)

    def _wake(self) -> None:
        """A copy has ended; on the I/O thread, which begins nothing before the runner is there."""
        self._runner.wake()

    def _on_broken(self, error: BaseException) -> None:
        def fail() -> None:
            if not self._broken.done():
                self._broken.set_exception(error)

        self._on_loop(fail)

    def _on_loop(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            _log.debug("the event loop has ended before the engine's thread")


def _open_store(
    config: WorkerConfig, engine: Engine, instance: str, wake: Callable[[], None]
) -> KvStore | None:
    """None where it is switched off, or the engine's KV cannot be copied."""
    if config.prefix_cache.enabled and isinstance(engine, CacheableEngine):
        return open_store(config.prefix_cache, engine, instance, wake)
    return None


def _prefixes(store: KvStore | None, config: WorkerConfig) -> Prefixes | None:
    if store is None:
        return None
    return Prefixes(store.cache, store.fingerprint, config.prefix_cache.lookahead_sequences)


def _work_ahead(store: KvStore | None, prefixes: Prefixes | None) -> None:
    if store is not None and prefixes is not None:
        store.settle()
        prefixes.work_ahead()


def _pool(engine: Engine, store: KvStore | None) -> BlockPool | PrefixCache:
    return BlockPool(engine.kv_blocks, engine.block_tokens) if store is None else store.cache


def _lending(
    bus: Bus, config: WorkerConfig, engine: Engine, vault: PoolVault, store: KvStore | None, clock: Clock
) -> Lending:
    owner = Owner(
        worker_id=bus.instance,
        incarnation=bus.incarnation,
        blocks=engine.kv_blocks,
        block_tokens=engine.block_tokens,
        fingerprint=b"" if store is None else store.fingerprint,
    )
    return Lending(bus, config.lending, owner, vault, clock=clock)


def _core(
    bus: Bus,
    config: WorkerConfig,
    engine: Engine,
    pool: BlockPool | PrefixCache,
    prefixes: Prefixes | None,
) -> StepCore:
    max_context_tokens = min(engine.max_positions, engine.kv_blocks * engine.block_tokens)
    identity = Identity(
        worker_id=bus.instance,
        incarnation=bus.incarnation,
        model=config.served_name or Path(config.model).name,
        max_context_tokens=max_context_tokens,
        host=config.host or socket.gethostname(),
    )
    limits = Limits(
        max_context_tokens=max_context_tokens,
        vocabulary=engine.vocabulary,
        end_retention_s=config.end_retention_s,
        gateway_timeout_s=config.gateway_timeout_s,
    )
    return StepCore(identity, SequenceTable(pool, limits, prefixes))


def make_engine(config: WorkerConfig) -> Engine:
    """The configured engine, warm: the first request finds nothing left to set up. Raises ConfigError."""
    torch.set_num_threads(config.threads)
    model = load(config.model, dtype=config.dtype, device=config.device)
    block_bytes = model.block_bytes(config.block_tokens)
    kv_blocks = config.kv_bytes // block_bytes if config.kv_bytes else config.kv_blocks
    if kv_blocks < 1:
        raise ConfigError(f"kv_bytes holds no block: one takes {block_bytes} bytes", param="kv_bytes")
    engine = TorchEngine(
        model,
        kv_blocks=kv_blocks,
        block_tokens=config.block_tokens,
        attention=config.attention,
        threads=config.threads,
        release=True,
    )
    warm_up(engine)
    gc.collect()
    gc.freeze()  # What is there now stays: no collection during a step walks through it.
    return engine


def _make_bound_engine(config: WorkerConfig) -> Engine:
    """On the engine's cores, so that compute threads started on the way are there, too."""
    bind_to(config.engine_cores, "engine_cores")
    return make_engine(config)


async def run(config: WorkerConfig) -> None:
    """Serves until cancelled. Raises ConfigError (model, cores) and BusUnavailable (no NATS at start)."""
    bind_to(config.cores)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    bus = await Bus.connect(config.bus, service="worker", instance=config.instance)
    try:
        engine = await asyncio.to_thread(_make_bound_engine, config)
        worker = Worker(bus, config, engine)
        canonical(_log, "worker serving", model=config.model, kv_blocks=engine.kv_blocks, dtype=config.dtype)
        await worker.serve()
    finally:
        await bus.close()
