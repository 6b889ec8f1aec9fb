"""The worker service: passes plans and commands to the engine's thread and publishes what it returns.

The rules are in `core`, the computation is in `engine`."""

import asyncio
import socket
import sys
from collections.abc import Callable
from typing import Any

from services.worker.assembly import (
    core_of,
    costs_of,
    make_engine,
    memory_mb,
    on_its_gpu,
    open_cache,
    pool_of,
)
from services.worker.config import WorkerConfig
from services.worker.core.prefixes import Prefixes
from services.worker.core.steps import StepCore
from services.worker.cores import bind_to
from services.worker.door import Command, Door
from services.worker.egress import Courier, Heartbeat, Outbox
from services.worker.engine.contract import AttendingEngine, ConstrainedEngine, Engine, SharingEngine
from services.worker.engine.progress import LoadProgress
from services.worker.engine_thread import Runner
from services.worker.kv.core.kv_events import Event, StoredEvents
from services.worker.kv.core.prefix_news import PrefixNews
from services.worker.kv.figures import CacheFigures, CacheMetrics, read_figures
from services.worker.kv.store import CacheableEngine
from services.worker.kv.transfers import TransferEngine
from services.worker.kv_events import KvEventPublisher
from services.worker.neighbourhood import Neighbourhood, extended
from services.worker.peers.migration.service import Transfers
from services.worker.peers.registry import Registry
from services.worker.peers.transport.plane import make_transports
from shared import subjects, watchdog
from shared.bus import (
    Bus,
    Endpoint,
    Handler,
    Listener,
    OwnThread,
    fenced,
    recorder_handlers,
    status_handlers,
    status_of,
)
from shared.clock import Clock, monotonic_s
from shared.errors import ConfigError, ForeignSequence, InvalidRequest, KvasirError, Overloaded
from shared.log import canonical, get_logger
from shared.messages.base import Empty
from shared.messages.commands import CancelSequence, TakeSnapshot
from shared.messages.plans import BatchPlan
from shared.messages.prefixes import FindPrefixes, ForgetPrefixes, PrefixesForgotten, WorkerPrefixes
from shared.messages.reports import GatewayReported, ServiceStatus, WorkerReported
from shared.messages.tokens import AcknowledgeEnds, ExtendSequence, FetchedTokens, FetchTokens
from shared.metrics import counter
from shared.watchdog import STUCK_S

HANDLERS: tuple[Handler, ...] = (
    Listener(subjects.worker_plan, BatchPlan, "on_plan"),
    Listener(subjects.worker_cancel.to, CancelSequence, "on_cancel", sender="sender"),
    Listener(subjects.worker_extend.to, ExtendSequence, "on_extend", sender="sender"),
    Listener(subjects.worker_acknowledge.to, AcknowledgeEnds, "on_acknowledge", sender="sender"),
    Listener(subjects.ANY_GATEWAY_REPORTED, GatewayReported, "on_gateway", sender="gateway_id"),
    Endpoint(subjects.worker_snapshot, TakeSnapshot, "take_snapshot"),
    Endpoint(subjects.worker_fetch.to, FetchTokens, "fetch", sender="sender"),
    Endpoint(subjects.worker_prefixes, FindPrefixes, "find_prefixes"),
    Endpoint(subjects.worker_forget.to, ForgetPrefixes, "forget_prefixes", sender="sender"),
    *status_handlers("worker"),
)
OTHERS: tuple[Handler, ...] = (
    Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_reported", sender="worker_id"),
)
"""Attached only on workers that borrow: in a large fleet not every worker can read every heartbeat."""
_STOP_DEADLINE_S = 5.0
_MEASURE_S = 1.0
_TELL_S = 0.2
_EXPRESS_INTERVAL_S = 0.5
_SWITCH_INTERVAL_S = 0.0002
"""Longest wait of the engine's thread for the GIL after an operator, while the event loop holds it."""

_COMPILES_S = 60.0  # for a step on a GPU, which may compile kernels
_LOG_FOREIGN_S = 5.0
"""Shortest time between two log lines about foreign commands."""

_log = get_logger("worker")
_foreign = counter(
    "kvasir_worker_foreign_commands_total",
    "Commands about sequences that are not their sender's, or with tokens that no model has; ignored",
)


class Loading:
    """Status endpoint of a worker that has no engine yet."""

    def __init__(self, bus: Bus, progress: LoadProgress) -> None:
        self._bus = bus
        self._progress = progress
        self._began_s = monotonic_s()
        self._handlers = status_handlers("worker")

    async def status(self, _: Empty) -> ServiceStatus:
        details = {"loading": self._progress.text}
        return status_of(self._bus, "worker", monotonic_s() - self._began_s, details)

    async def listen(self) -> None:
        await self._bus.attach(self._handlers, self)

    async def close(self) -> None:
        await self._bus.detach(self._handlers, self)


class Worker:
    """The asyncio side of one worker. Its handlers pass their work to the engine's thread."""

    def __init__(self, bus: Bus, config: WorkerConfig, engine: Engine, clock: Clock = monotonic_s) -> None:
        self._bus = bus
        self._config = config
        self._sharing = engine if isinstance(engine, SharingEngine) else None
        attending = engine if isinstance(engine, AttendingEngine) else None
        self._pie = None if attending is None else attending.pie
        self._expect_grammar = engine.expect_grammar if isinstance(engine, ConstrainedEngine) else None
        self._clock = clock
        self._started_s = clock()
        self._foreign_commands = 0
        """Number of ignored commands whose sender does not own the sequence, or with invalid tokens."""
        self._logged_foreign_s = float("-inf")
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = self._loop.create_future()
        self._outbox = Outbox(bus, drop_final_frames=config.fault_drop_final_frames)
        is_reading = (lambda: False) if attending is None else (lambda: attending.attention.is_reading)
        self._copies = TransferEngine(self._wake, is_reading=is_reading)
        store = self._store = open_cache(config, engine, bus.instance, self._copies)
        self._cache_metrics = CacheMetrics()
        self._prefixes: Prefixes | None = None
        self._news = None
        if store is not None:
            most = config.prefix_cache.lookahead_sequences
            self._prefixes = Prefixes(store.cache, store.fingerprint, most, store.auditor)
            self._news = PrefixNews(store.cache.tree, bus.instance, bus.incarnation)
        prefixes = self._prefixes
        self._kv_events = self._publisher(config, prefixes)
        self._courier = Courier(self._outbox, self._on_loop)
        transports = make_transports(config.bulk)
        self._registry = Registry(
            bus, config.host or socket.gethostname(), transports, config.bulk.ticket_s, clock
        )
        own = pool_of(engine, store)
        pool = extended(config.lending, engine, own)
        core = core_of(bus, config, engine, self._registry.host, pool, prefixes)
        self._door = Door(core, clock, self._courier.deliver)
        self._neighbours = Neighbourhood(
            bus, config, engine, own, pool, self._door, self._registry, self._copies, store=store, clock=clock
        )
        account = watchdog.part(f"engine of {bus.instance}")
        self._runner = Runner(
            self._door,
            engine,
            on_tick=self._courier.attend,
            on_broken=self._on_broken,
            cores=config.engine_cores,
            between=self._work_ahead,
            lost_blocks=self._neighbours.lost_blocks,
            recorder=bus.recorder,
            remote_s=self._remote_s,
            account=account,
            stuck_s=STUCK_S if config.device == "cpu" and config.engine != "vllm" else _COMPILES_S,
        )
        self._transfers: Transfers | None = None
        """KV transfers between workers; None if they or the prefix cache are off."""
        if store is not None and config.transfer.enabled and isinstance(engine, CacheableEngine):
            reader = self._neighbours.borrower
            self._transfers = Transfers(
                bus, config.transfer, engine, store, self._registry, self._runner, clock, reader
            )
        self._others = () if self._neighbours.borrower is None else OTHERS
        self._reached = (0, 0)
        """Epoch and number of the last plan received since the last snapshot request."""
        self._heartbeat = Heartbeat(
            lambda: self._door.ask(lambda core, now_s: core.report(now_s)),
            self._sections,
            interval_s=config.heartbeat_s,
            is_stuck=lambda: account.is_stuck,
        )

    async def serve(self) -> None:
        """Serve until cancelled. Raises KvasirError if the engine fails; a supervisor restarts the worker."""
        self._registry.plane.open()
        self._runner.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._outbox.drain())
                tasks.create_task(self._keep_express())
                await self._bus.attach(HANDLERS, self)
                await self._bus.attach(recorder_handlers("worker"), self._bus.recorder)
                await self._bus.attach(self._others, self._registry)
                await self._neighbours.listen()
                tasks.create_task(self._beat())
                tasks.create_task(self._measure())
                tasks.create_task(self._tell())
                tasks.create_task(self._neighbours.serve())
                if self._kv_events is not None:
                    tasks.create_task(self._kv_events.serve())
                if self._transfers is not None:
                    tasks.create_task(self._transfers.serve())
                await self._broken
        except* KvasirError as group:
            raise group.exceptions[0] from None
        finally:
            await self._bus.detach(HANDLERS, self)
            await self._bus.detach(self._others, self._registry)
            has_stopped = await asyncio.to_thread(self._runner.stop, _STOP_DEADLINE_S)
            if has_stopped:
                self._courier.close()
            else:
                _log.warning("the last iteration did not end within %g s", _STOP_DEADLINE_S)
            if not await asyncio.to_thread(self._neighbours.close):
                _log.warning("a link of the bulk plane did not end in time")
            if self._store is not None:
                flush_s = self._config.prefix_cache.flush_s if has_stopped else 0.0
                await asyncio.to_thread(self._store.close, _STOP_DEADLINE_S, flush_s)
            else:
                await asyncio.to_thread(self._copies.halt, _STOP_DEADLINE_S)

    def on_plan(self, plan: BatchPlan) -> None:
        received_s = self._clock()
        self._door.post(lambda core, _: core.on_plan(plan, received_s), settles=False)
        self._reached = plan.epoch, plan.seq
        if self._expect_grammar is not None:
            for spec in plan.starts:
                if spec.sampling.grammar:
                    self._expect_grammar(spec.sampling.grammar)

    def on_cancel(self, cancel: CancelSequence) -> None:
        self._door.post(self._entitled(lambda core, now_s: core.on_cancel(cancel, now_s)))

    def on_extend(self, extend: ExtendSequence) -> None:
        self._door.post(self._entitled(lambda core, _: core.on_extend(extend)))

    def on_acknowledge(self, acknowledged: AcknowledgeEnds) -> None:
        acknowledge = self._entitled(lambda core, now_s: core.on_acknowledge(acknowledged, now_s))
        self._door.post(acknowledge, settles=False)

    def _entitled(self, command: Command) -> Command:
        """Wrap a command: if it is invalid or its sender is not the owner, it is ignored and counted."""

        def obey(core: StepCore, now_s: float) -> None:
            try:
                command(core, now_s)
            except (ForeignSequence, InvalidRequest) as error:
                self._foreign_commands += 1
                _foreign.inc()
                if now_s - self._logged_foreign_s > _LOG_FOREIGN_S:
                    self._logged_foreign_s = now_s
                    _log.warning("ignored, and %d such before: %s", self._foreign_commands - 1, error)

        return obey

    def on_gateway(self, reported: GatewayReported) -> None:
        self._door.post(lambda core, now_s: core.on_gateway(reported, now_s))

    async def take_snapshot(self, snapshot: TakeSnapshot) -> WorkerReported:
        """Drop all plans and return a numbered report. Raises StaleEpoch."""
        self._reached = 0, 0
        future = self._door.ask(lambda core, now_s: core.on_snapshot(snapshot, now_s))
        return self._heartbeat.number(await asyncio.wrap_future(future))

    def _sections(self, report: WorkerReported) -> dict[str, Any]:
        """Return the fields of a heartbeat that the event loop's thread owns. `plan_seq` includes a plan that
        arrived during a long step, before the engine's thread sees it."""
        epoch, seq = self._reached
        reached = {"plan_seq": seq} if epoch == report.epoch and seq > report.plan_seq else {}
        moved = {} if self._transfers is None else self._transfers.section()
        costs = {} if self._sharing is None else costs_of(self._sharing, self._pie)
        return {**costs, **self._neighbours.section(report.capacity), **moved, **reached}

    def _remote_s(self) -> float:
        """Return the total seconds that steps have waited for creditors."""
        return 0.0 if self._sharing is None else self._sharing.remote.total_s

    def _work_ahead(self) -> None:
        """Work between two steps and while idle, on the engine's thread."""
        self._copies.settle()
        if self._pie is not None:
            self._pie.rest()
        if self._prefixes is not None:
            self._prefixes.work_ahead()

    async def fetch(self, fetch: FetchTokens) -> FetchedTokens:
        """Return the tokens of sequences that a gateway missed. Raises ForeignSequence."""
        return await asyncio.wrap_future(self._door.ask(lambda core, _: core.on_fetch(fetch)))

    async def find_prefixes(self, question: FindPrefixes) -> WorkerPrefixes:
        """Return the cached prefixes. Raises InvalidRequest without a prefix cache."""
        news = self._news
        if news is None:
            raise InvalidRequest("this worker has no prefix cache")
        return await asyncio.wrap_future(self._door.ask(lambda core, _: news.answer(question)))

    async def forget_prefixes(self, _: ForgetPrefixes) -> PrefixesForgotten:
        """Drop all unused blocks of the prefix cache."""
        store = self._store
        if store is None:
            return PrefixesForgotten()
        forgotten = self._door.ask(lambda core, now_s: store.forget_unused())
        return PrefixesForgotten(blocks=await asyncio.wrap_future(forgotten))

    async def status(self, _: Empty) -> ServiceStatus:
        """Return the details for `python -m services status`."""
        future = self._door.ask(lambda core, now_s: core.report(now_s))
        report = await asyncio.wrap_future(future)
        figures = await self._figures()
        return status_of(
            self._bus,
            "worker",
            self._clock() - self._started_s,
            {
                "model": report.model,
                "epoch": report.epoch,
                "total_blocks": report.capacity.total_blocks,
                "free_blocks": report.capacity.free_blocks,
                "withdrawn_blocks": report.capacity.lent_blocks,
                "admitted_blocks": report.capacity.borrowed_blocks,
                "evictable_blocks": report.capacity.evictable_blocks,
                "block_tokens": report.block_tokens,
                "sequences": len(report.sequences),
                "prefill_tokens_per_s": round(report.prefill_tokens_per_s),
                "decode_step_ms": round(report.decode_step_s * 1e3, 2),
                "engine_s": round(self._runner.occupancy.engine_s, 4),
                "between_steps_s": round(self._runner.occupancy.between_s, 4),
                "trouble": self._trouble(),
                **memory_mb(self._config.device),
                "failed_commands": self._door.failed_commands,
                "foreign_commands": self._foreign_commands,
                **self._door.core.guesses,
                **self._neighbours.details(),
                **({} if self._transfers is None else self._transfers.details()),
                **self._copies.details(),
                **({} if figures is None else figures.details()),
                **({} if self._prefixes is None else {"swaps": self._prefixes.swaps}),
                **({} if self._pie is None else self._pie.expansion().details()),
            },
        )

    def _trouble(self) -> str:
        """Return which configured part is missing, or an empty string."""
        lacks_disk = self._store is not None and self._store.disk is None
        is_wanted = self._config.prefix_cache.disk_mb > 0
        return "its disk tier is missing: see its log" if is_wanted and lacks_disk else ""

    async def _figures(self) -> CacheFigures | None:
        """Return the figures of the prefix cache, or None without one. The engine's thread reads them."""
        store = self._store
        if store is None:
            return None
        return await asyncio.wrap_future(self._door.ask(lambda core, now_s: read_figures(store)))

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(_MEASURE_S)
            try:
                figures = await self._figures()
            except Overloaded:
                continue
            if figures is not None:
                self._cache_metrics.show(figures)

    def _publisher(self, config: WorkerConfig, prefixes: Prefixes | None) -> KvEventPublisher | None:
        """Return the publisher of KV events, or None if no endpoint is set. Raises ConfigError without a
        prefix cache."""
        if not config.kv_events.endpoint:
            return None
        if prefixes is None:
            raise ConfigError("worker.kv_events tells of the prefix cache, which is off here")
        events = prefixes.events = StoredEvents(prefixes.cache.tree, prefixes.cache.block_tokens)

        async def look() -> list[Event]:
            return await asyncio.wrap_future(self._door.ask(lambda core, now_s: events.take()))

        return KvEventPublisher(config.kv_events, self._bus.instance, look)

    async def _tell(self) -> None:
        """Publish which blocks enter and leave the prefix cache. A reader asks for the events it missed."""
        news, subject = self._news, subjects.worker_cached(self._bus.instance)
        while news is not None:
            await asyncio.sleep(_TELL_S)
            if not news.has_some:  # spares an idle worker's threads five turns a second
                continue
            with fenced("news of the prefix cache"):
                event = await asyncio.wrap_future(self._door.ask(lambda core, now_s: news.take(now_s)))
                if event is not None and self._bus.connected:
                    await self._bus.publish(subject, event)

    async def _beat(self) -> None:
        subject = subjects.worker_reported(self._bus.instance)
        while True:
            began_s = self._clock()
            report = await self._heartbeat.next()
            if report is not None and self._bus.connected:
                with fenced("heartbeat"):
                    await self._bus.publish(subject, report)
            await asyncio.sleep(max(0.0, self._config.heartbeat_s - (self._clock() - began_s)))

    async def _keep_express(self) -> None:
        """Keep an express connection up, except on an encrypted bus or if the server refuses it."""
        regained = self._bus.reconnections
        interval_s = _EXPRESS_INTERVAL_S / len(self._bus.config.urls)  # more servers, more reason to change
        while True:
            if self._bus.connected and (self._courier.wants_express or regained != self._bus.reconnections):
                regained = self._bus.reconnections
                try:
                    self._courier.offer(await self._bus.express())
                except KvasirError as error:
                    _log.debug("%s", error)
            await asyncio.sleep(interval_s)

    def _wake(self) -> None:
        self._door.wake()

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


async def run(config: WorkerConfig) -> None:
    """Serve until cancelled. Raises ConfigError (model, cores) and BusUnavailable (no NATS at the start)."""
    bind_to(config.cores)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        async with asyncio.TaskGroup() as tasks:
            for one in on_its_gpu(config).crew():
                tasks.create_task(_serve(one))
    except* KvasirError as group:
        raise group.exceptions[0] from None


def _make_bound_engine(config: WorkerConfig, progress: LoadProgress) -> Engine:
    """Return the engine, made on its cores; compute threads that it starts inherit them."""
    bind_to(config.engine_cores, "engine_cores")
    return make_engine(config, progress)


async def _serve(config: WorkerConfig) -> None:
    bus = await Bus.connect(config.bus, service="worker", instance=config.instance)
    try:
        progress = LoadProgress()
        loading = Loading(bus, progress)
        await loading.listen()
        loop = asyncio.get_running_loop()
        engine = await loop.run_in_executor(OwnThread(), _make_bound_engine, config, progress)
        await loading.close()
        worker = Worker(bus, config, engine)
        canonical(_log, "worker serving", model=config.model, kv_blocks=engine.kv_blocks, dtype=config.dtype)
        await worker.serve()
    finally:
        await bus.close()
