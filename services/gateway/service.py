"""The gateway process: bus handlers, heartbeat and HTTP servers."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp

from services.gateway.batches.routes import add_batches
from services.gateway.batches.runner import BatchRunner
from services.gateway.batches.store import BatchStore
from services.gateway.config import GatewayConfig
from services.gateway.fleet_metrics import fleet_metrics
from services.gateway.http.browser import with_cors
from services.gateway.http.connection import Server, bind, make_operator_server, make_server, url_of
from services.gateway.http.middleware import OPEN_PATHS, OPERATOR_PATHS, Edge
from services.gateway.http.reading import BodyReader, Models
from services.gateway.http.routes import make_app, make_operator_app
from services.gateway.http.stored import ResponseStore
from services.gateway.key_watch import KeyWatch, Metered
from services.gateway.lasting.desk import HANDLERS as LASTING
from services.gateway.lasting.desk import LastingDesk
from services.gateway.lasting.peers import Peers
from services.gateway.openai.admission import Acceptance
from services.gateway.sessions import Sessions
from services.gateway.text.tokenizer import load_codec
from services.gateway.ui.routes import PAGE_PATHS, add_page
from services.gateway.ui.watch import Colleagues, Watch
from services.gateway.vllm_metrics import vllm_metrics
from shared import log, metrics, subjects
from shared.bus import Bus, Listener, fenced, recorder_handlers, status_handlers, status_of
from shared.clock import monotonic_s
from shared.errors import InternalError
from shared.liveness import AwakeClock
from shared.messages.base import Empty
from shared.messages.moves import MovePrepared
from shared.messages.reports import (
    SchedulerAnnounced,
    SequenceHandedOver,
    SequencesGivenUp,
    ServiceStatus,
    StackVerdict,
    WorkerLost,
    WorkerReported,
)
from shared.messages.tokens import TokenFrame

TICK_S = 0.1
SHUTDOWN_MARGIN_S = 2.0
_LOOK_S = 0.5
_logger = log.get_logger("gateway")

HANDLERS = (
    Listener(subjects.tokens.to, TokenFrame, "on_frame", sender="worker_id"),
    Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_worker_reported", sender="worker_id"),
    Listener(subjects.SCHEDULER_ANNOUNCED, SchedulerAnnounced, "on_scheduler_announced"),
    Listener(subjects.SCHEDULER_WORKER_LOST, WorkerLost, "on_worker_lost"),
    Listener(subjects.SCHEDULER_ABANDONED, SequencesGivenUp, "on_given_up"),
    Listener(subjects.SCHEDULER_PREPARED, MovePrepared, "on_prepared"),
    Listener(subjects.STACK_VERDICT, StackVerdict, "on_verdict"),
)
"""Handlers of `Sessions`. They run in the bus's read loop and must be quick."""
HANDED_OVER = (Listener(subjects.scheduler_handed, SequenceHandedOver, "on_handed_over"),)


class Status:
    """Replies to `python -m services status`."""

    def __init__(self, config: GatewayConfig, bus: Bus, sessions: Sessions, **urls: str) -> None:
        self._bus = bus
        self._sessions = sessions
        self._told = {**urls, "model": ", ".join((config.served_name, *config.models))}
        self._began_s = monotonic_s()

    async def status(self, _: Empty) -> ServiceStatus:
        sessions, now_s = self._sessions, self._sessions.now_s()
        scheduler, refused = sessions.scheduler, sessions.refused
        details: dict[str, Any] = {
            **self._told,
            "active": sessions.active,
            "scheduler": scheduler.scheduler_ids if scheduler.is_present(now_s) else "away",
            "heartbeats": sessions.dispatch.heartbeats,
            "unready": "; ".join(sessions.unready_reasons()),
            "trouble": f"requests that killed workers, and are refused: {len(refused)}" if refused else "",
            "workers": sessions.workers.rows(now_s),
            "shards": scheduler.rows(now_s),
        }
        return status_of(self._bus, "gateway", monotonic_s() - self._began_s, details)


async def tick(config: GatewayConfig, bus: Bus, sessions: Sessions) -> None:
    """Advance the sessions' timeouts until cancelled."""
    present_s = monotonic_s()
    while True:
        await asyncio.sleep(TICK_S)
        if bus.connected:
            absent_s, present_s = monotonic_s() - present_s, monotonic_s()
            if absent_s >= config.absence_s:
                log.canonical(_logger, "back after an absence", absent_s=round(absent_s, 1))
                sessions.on_absence()
        with fenced("gateway tick"):
            sessions.on_tick()


async def every(period_s: float, act: Callable[[], None], what: str) -> None:
    """Call `act` now and then until cancelled. Its errors are logged."""
    while True:
        with fenced(what):
            act()
        await asyncio.sleep(period_s)


def _store_of(config: GatewayConfig) -> ResponseStore | None:
    if not config.stored_responses:
        return None
    most_bytes = config.stored_responses_mb * 1024 * 1024
    path = Path(config.stored_responses).expanduser()
    return ResponseStore(path, most_bytes=most_bytes, most_days=config.stored_responses_days)


def _batches_of(config: GatewayConfig) -> BatchStore | None:
    if not config.batches:
        return None
    path = Path(config.batches).expanduser()
    return BatchStore(path, most_bytes=config.batches_mb * 1024 * 1024, most_days=config.batches_days)


async def run(config: GatewayConfig) -> None:
    """Serve until cancelled. Then let running answers continue for `shutdown_grace_s`, and fail the rest."""
    models = Models(
        [Acceptance(each, await asyncio.to_thread(load_codec, each.model)) for each in config.of_models()]
    )
    async with AsyncExitStack() as ends:
        ends.callback(models.close)
        store = _store_of(config)
        if store is not None:
            ends.callback(store.close)
        batches = _batches_of(config)
        if batches is not None:
            ends.callback(batches.close)
        listener = ends.enter_context(
            closing(bind(config.host, config.port, "port", is_shared=config.shares_port))
        )
        operator_address = (config.operator_host, config.operator_port)
        operator = ends.enter_context(closing(bind(*operator_address, "operator_port")))
        bus = await Bus.connect(config.bus, service="gateway", instance=config.instance)
        ends.push_async_callback(bus.close)
        async with asyncio.TaskGroup() as tasks, bus.served_within():
            now_s = AwakeClock(monotonic_s, lambda: bus.connected)
            sessions = Sessions(config, bus, tasks, now_s)
            models.adapters = sessions.workers.adapters
            urls = {"url": url_of(listener), "operator_url": url_of(operator)}
            await bus.attach(HANDLERS, sessions)
            with fenced("handed-over sequences"):  # refused by a nats-server of an earlier release
                await bus.attach(HANDED_OVER, sessions)
            await bus.attach(status_handlers("gateway"), Status(config, bus, sessions, **urls))
            await bus.attach(recorder_handlers("gateway"), bus.recorder)
            watched = KeyWatch(config)
            desk = LastingDesk(config, Peers(config, bus, sessions, now_s), tasks, now_s, watched.on_over)
            await bus.attach(LASTING, desk)
            await bus.watch_departures(desk.on_gone)
            colleagues = Colleagues(bus, monotonic_s)
            watch = Watch(sessions, colleagues, now_s, config.dashboards)
            metrics.collected("vllm", partial(vllm_metrics, sessions))
            metrics.collected("fleet", partial(fleet_metrics, sessions))
            for loop in (
                every(config.report_interval_s, sessions.beat, "gateway heartbeat"),
                tick(config, bus, sessions),
                sessions.dispatch.outbox.run(),
                watch.run(),
                every(TICK_S, desk.on_tick, "gateway desk"),
                every(_LOOK_S, watched.on_tick, "gateway keys"),
            ):
                tasks.create_task(loop)
            read = BodyReader(config, models.first.threads).read
            page = partial(add_page, watch=watch, colleagues=colleagues)

            def add_more(app: FastAPI) -> None:
                page(app, admin_key_sha256=config.admin_key_sha256)
                if batches is not None:
                    add_batches(app, batches, read)

            main = make_app(sessions, models, config, desk, read, store, add_more)
            if watched.may_have_quotas:
                main = Metered(main, watched)
            tenants, counters, open_paths = watched.tenants, sessions.counters, OPEN_PATHS | PAGE_PATHS
            app: ASGIApp = Edge(main, tenants, counters, open_paths, recorder=bus.recorder)
            if batches is not None:
                tasks.create_task(BatchRunner(batches, app, tenants).run())
            app = with_cors(app, config.cors_origins)
            operators = make_operator_app(sessions, partial(page, admin_key_sha256=None))
            operator_app = Edge(operators, tenants, counters, OPERATOR_PATHS | PAGE_PATHS, open_below="/ui/")
            names = [model.name for model in models]
            log.canonical(_logger, "listening", **urls, models=names, keys=len(watched.tenants))
            async with _beside(make_operator_server(operator_app, config), operator):
                await _serve(make_server(app, config), listener, sessions, config, watch)


@asynccontextmanager
async def _beside(server: Server, listener: socket.socket) -> AsyncIterator[None]:
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="operator's http")
    try:
        yield
    finally:
        await _ending(server, serving, SHUTDOWN_MARGIN_S)
        serving.cancel()


async def _serve(
    server: Server, listener: socket.socket, sessions: Sessions, config: GatewayConfig, watch: Watch
) -> None:
    """Serve until cancelled. Raises if the server ends by itself."""
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        await asyncio.wait({serving})
        await serving
        raise InternalError("the HTTP server ended by itself")
    finally:
        sessions.drain()
        watch.close()
        await _ending(server, serving, config.shutdown_grace_s)
        sessions.end()
        await _ending(server, serving, SHUTDOWN_MARGIN_S)
        serving.cancel()
        await sessions.dispatch.outbox.flush()


async def _ending(server: Server, serving: "asyncio.Task[None]", timeout_s: float) -> None:
    """Stop accepting connections; return once the open ones end, or at the timeout."""
    server.should_exit = True
    with suppress(asyncio.CancelledError):
        await asyncio.wait({serving}, timeout=timeout_s)
