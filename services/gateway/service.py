"""The gateway as a process: its table of handlers on the bus, its heartbeat, and the HTTP server beside them.

Turns messages into events of `Desk`; decides nothing itself.
"""

import asyncio
import socket
from contextlib import suppress
from typing import Any

from services.gateway.acceptance import Acceptance
from services.gateway.auth import KeyRing
from services.gateway.clock import AttentiveClock
from services.gateway.config import GatewayConfig
from services.gateway.desk import Desk
from services.gateway.edge import Edge
from services.gateway.routes import make_app
from services.gateway.server import Server, bind, make_server
from services.gateway.tokenizer import load_codec
from shared import log, subjects
from shared.bus import Bus, Listener, status_handlers
from shared.clock import Clock, monotonic_s
from shared.errors import InternalError
from shared.messages.base import Empty
from shared.messages.moves import MovePrepared
from shared.messages.reports import (
    GatewayReported,
    SchedulerAnnounced,
    ServiceStatus,
    WorkerLost,
    WorkerReported,
)
from shared.messages.tokens import TokenFrame

TICK_S = 0.1
SHUTDOWN_MARGIN_S = 2.0
_logger = log.get_logger("gateway")

HANDLERS = (
    Listener(subjects.tokens.to, TokenFrame, "on_frame", sender="worker_id"),
    Listener(subjects.ANY_WORKER_REPORTED, WorkerReported, "on_worker_reported", sender="worker_id"),
    Listener(subjects.SCHEDULER_ANNOUNCED, SchedulerAnnounced, "on_scheduler_announced"),
    Listener(subjects.SCHEDULER_WORKER_LOST, WorkerLost, "on_worker_lost"),
    Listener(subjects.SCHEDULER_PREPARED, MovePrepared, "on_prepared"),
    *status_handlers("gateway"),
)


class Gateway:
    """The handlers.

    All but `status` are plain functions: they run in the bus's read loop and must be quick.
    """

    def __init__(self, config: GatewayConfig, bus: Bus, desk: Desk, now_s: Clock, url: str) -> None:
        self._config = config
        self._bus = bus
        self._desk = desk
        self._now_s = now_s
        self._url = url
        self._began_s = monotonic_s()

    def on_frame(self, frame: TokenFrame) -> None:
        """One call per worker and step."""
        now_s = self._now_s()
        worker = (frame.worker_id, frame.incarnation)
        for delta in frame.deltas:
            self._desk.on_delta(delta, worker, now_s)

    def on_worker_reported(self, report: WorkerReported) -> None:
        self._desk.on_worker_reported(report, self._now_s())

    def on_scheduler_announced(self, event: SchedulerAnnounced) -> None:
        self._desk.on_scheduler_announced(event, self._now_s())

    def on_worker_lost(self, event: WorkerLost) -> None:
        self._desk.on_worker_lost(event, self._now_s())

    def on_prepared(self, event: MovePrepared) -> None:
        self._desk.on_prepared(event, self._now_s())

    async def status(self, _: Empty) -> ServiceStatus:
        """For `python -m services status`."""
        now_s = self._now_s()
        scheduler = self._desk.scheduler
        details: dict[str, Any] = {
            "url": self._url,
            "model": self._config.served_name,
            "active": self._desk.active,
            "scheduler": scheduler.scheduler_id if scheduler.is_present(now_s) else "away",
            "unready": "; ".join(self._desk.unready_reasons()),
            "workers": self._desk.workers.rows(now_s),
        }
        return ServiceStatus(
            service="gateway",
            instance=self._bus.instance,
            incarnation=self._bus.incarnation,
            uptime_s=monotonic_s() - self._began_s,
            details=details,
        )

    async def report(self) -> None:
        """Heartbeats, until cancelled."""
        while True:
            event = GatewayReported(
                gateway_id=self._bus.instance, incarnation=self._bus.incarnation, active=self._desk.active
            )
            self._desk.dispatch.outbox.put(subjects.gateway_reported(self._bus.instance), event)
            await asyncio.sleep(self._config.report_interval_s)

    async def tick(self) -> None:
        """Deadlines, until cancelled."""
        present_s = monotonic_s()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = self._now_s()
            if self._bus.connected:
                absent_s, present_s = monotonic_s() - present_s, monotonic_s()
                if absent_s >= self._config.absence_s:
                    log.canonical(_logger, "back after an absence", absent_s=round(absent_s, 1))
                    self._desk.on_absence(now_s)
            self._desk.on_tick(now_s)


async def run(config: GatewayConfig) -> None:
    """Serve until cancelled; then let running answers go on for `shutdown_grace_s`, and cancel what is
    left.
    """
    codec = await asyncio.to_thread(load_codec, config.model)
    listener = bind(config)
    acceptance = Acceptance(config, codec)
    try:
        bus = await Bus.connect(config.bus, service="gateway", instance=config.instance)
        try:
            async with asyncio.TaskGroup() as tasks:
                now_s = AttentiveClock(monotonic_s, lambda: bus.connected)
                desk = Desk(config, bus, codec, tasks, now_s)
                gateway = Gateway(config, bus, desk, now_s, _url(listener))
                await bus.attach(HANDLERS, gateway)
                for loop in (desk.dispatch.outbox.run(), gateway.report(), gateway.tick()):
                    tasks.create_task(loop)
                app = Edge(make_app(desk, acceptance, config), KeyRing(config.api_key_sha256), desk.counters)
                await _serve(make_server(app, config), listener, desk, config)
        finally:
            await bus.close()
    finally:
        acceptance.close()
        listener.close()


async def _serve(server: Server, listener: socket.socket, desk: Desk, config: GatewayConfig) -> None:
    """Returns never; ends when cancelled, or raises when the server ends by itself."""
    log.canonical(
        _logger, "listening", url=_url(listener), model=config.served_name, keys=len(config.api_key_sha256)
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        await asyncio.wait({serving})
        await serving
        raise InternalError("the HTTP server ended by itself")
    finally:
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await asyncio.wait({serving}, timeout=config.shutdown_grace_s + SHUTDOWN_MARGIN_S)
        serving.cancel()
        await desk.dispatch.outbox.flush()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
