"""Serve a handler table: decode, call, reply, and contain errors. No exception of a handler leaves this
module. nats-py would drop the subscription at a `CancelledError`. The caller gets a typed `KvasirError`,
never the text of another exception."""

import asyncio
import contextlib
import inspect
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.micro.request import ERROR_CODE_HEADER, ERROR_HEADER, Request
from nats.micro.service import Endpoint as MicroEndpoint
from nats.micro.service import EndpointConfig, Service

from shared.bus import tracing
from shared.bus.counters import BusCounters
from shared.bus.link import Link
from shared.errors import (
    BusUnavailable,
    CallerError,
    InvalidMessage,
    KvasirError,
    MessageTooLarge,
    Overloaded,
    UnavailableError,
    to_wire,
)
from shared.messages.base import Empty, Message, decode, decode_json, encode
from shared.messages.recordings import TellRecorded
from shared.messages.reports import ServiceStatus
from shared.release import PROTOCOL, VERSION
from shared.subjects import checked_id, instance_status, recorded, status

if TYPE_CHECKING:
    from shared.bus.connection import Bus


def handle_inline(subscription: Subscription, handle: Callable[[Msg], None]) -> None:
    """Call `handle` directly for each message of a new subscription; it must not raise."""

    def take(msg: Msg) -> None:
        subscription._pending_size -= len(msg.data)
        handle(msg)

    subscription._pending_queue.put_nowait = take  # type: ignore[assignment, method-assign]


Subject = str | Callable[[str], str]
"""A subject, or a function of `shared.subjects` that takes the instance id."""


@dataclass(frozen=True)
class Endpoint:
    """A command with a reply, served as a NATS micro endpoint by one instance of the service. The method is
    `async def method(self, message) -> Message`. Its `KvasirError` reaches the caller with its type."""

    subject: Subject
    request: type[Message]
    method: str
    concurrency: int = 64
    pending_limit: int = 1024
    """Maximum number of waiting requests; further ones are refused with `Overloaded`."""
    sender: str | None = None
    """Request field that names the sender (`spec.gateway_id`). It must equal the end of the subject, which
    NATS has checked."""
    queue: str | None = None
    """As in `Listener`. Not for what one instance serves: while a server does not know that a connection is
    dead, the queue group would give it requests that the same process's new connection should get."""


@dataclass(frozen=True)
class Listener:
    """An event, or a command without a reply: `async def` or `def method(self, message) -> None`. A plain
    `def` runs inside the read loop; it is cheapest and must be quick. For an `async def`, messages beyond
    `pending_limit` are dropped, counted and logged."""

    subject: Subject
    message: type[Any]
    method: str
    concurrency: int = 1
    """1: strictly in order."""
    queue: str | None = None
    """Name of a queue group, of which one member gets each message."""
    pending_limit: int = 16_384
    sender: str | None = None
    """As in `Endpoint`."""
    is_json: bool = False
    """For messages of nats-server itself."""


Handler = Endpoint | Listener


def subject_for(subject: Subject, instance: str) -> str:
    """Return the subject that a handler of this instance serves."""
    return subject if isinstance(subject, str) else subject(checked_id(instance))


def status_handlers(service: str) -> tuple[Handler, ...]:
    """Handlers for `async def status(self, _: Empty)`: queried by the operator and by the own health
    check."""
    every = Endpoint(status(service), Empty, "status", concurrency=4, pending_limit=64)
    return (every, Endpoint(partial(instance_status, service), Empty, "status"))


def status_of(bus: "Bus", service: str, uptime_s: float, details: dict[str, Any]) -> ServiceStatus:
    """Build an instance's status reply. Call it in the event loop."""
    return ServiceStatus(
        service=service,
        instance=bus.instance,
        incarnation=bus.incarnation,
        uptime_s=uptime_s,
        version=VERSION,
        protocol=PROTOCOL,
        tasks=len(asyncio.all_tasks()),
        details=details,
    )


def recorder_handlers(service: str) -> tuple[Handler, ...]:
    """Handlers that serve `Bus.recorder` to the operator and to gateways."""
    own = Endpoint(partial(recorded, service), TellRecorded, "tell", concurrency=2, pending_limit=32)
    return (own,)


def sender_check(field: str | None) -> Callable[[str, Any], None]:
    """Return a check that raises InvalidMessage unless the subject ends in the value of `field`."""
    if field is None:
        return lambda subject, message: None
    named = attrgetter(field)

    def check(subject: str, message: Any) -> None:
        if (claimed := named(message)) != subject.rpartition(".")[2]:
            raise InvalidMessage(f"{subject}: its sender calls itself {claimed!r}")

    return check


T = TypeVar("T")


class Lanes(Generic[T]):
    """Run `work(item)` for each offered item, at most `concurrency` at once, started in order."""

    def __init__(self, work: Callable[[T], Awaitable[None]], concurrency: int, pending_limit: int) -> None:
        self._work = work
        self._concurrency = concurrency
        self._pending_limit = pending_limit
        self._pending: deque[T] = deque()
        self._running = 0
        """Number of lanes that will check the queue again. A finished lane's task stays in `_tasks` for one
        more turn of the loop, so its size cannot serve."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pending(self) -> int:
        return len(self._pending)

    def offer(self, item: T) -> bool:
        """Take an item; return False if `pending_limit` items are already waiting."""
        if self._running < self._concurrency:
            self._running += 1
            task = asyncio.get_running_loop().create_task(self._lane(item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return True
        if len(self._pending) >= self._pending_limit:
            return False
        self._pending.append(item)
        return True

    async def stop(self, deadline_s: float) -> None:
        """Let pending work finish within the deadline, then cancel it. Offer nothing afterwards."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=deadline_s)
        self._pending.clear()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)

    async def _lane(self, item: T) -> None:
        try:
            await self._work(item)
            while self._pending:
                await self._work(self._pending.popleft())
        finally:
            self._running -= 1


_log = logging.getLogger("kvasir.bus")
_MAX_ERROR_CHARS = 2000


class ServedListener:
    """A `Listener` on one connection."""

    def __init__(
        self, spec: Listener, target: object, instance: str, counters: BusCounters, link: Link
    ) -> None:
        self._link = link
        self.spec = spec
        self.target = target
        self.subject = subject_for(spec.subject, instance)
        self._handle: Callable[[Any], Any] = getattr(target, spec.method)
        self._check_sender = sender_check(spec.sender)
        self._counters = counters
        self._received = counters.received(spec.message)
        self._seconds = counters.handler_seconds(spec.message)
        self._inline = not inspect.iscoroutinefunction(self._handle)
        self._lanes: Lanes[Msg] = Lanes(self._run, spec.concurrency, spec.pending_limit)
        self._subscription: Subscription | None = None
        self._logged_drop_s = float("-inf")

    async def start(self, client: Client, _service: Service | None) -> None:
        self._subscription = await client.subscribe(
            self.subject, queue=self.spec.queue or "", cb=self._on_message
        )
        if self._inline:
            handle_inline(self._subscription, self._on_inline)

    async def stop(self, deadline_s: float) -> None:
        await _drain(self._subscription, self._link, deadline_s)
        await self._lanes.stop(deadline_s)

    def _on_inline(self, msg: Msg) -> None:
        self._received.inc()
        try:
            self._handle(self._message_in(msg))
        except (Exception, asyncio.CancelledError) as error:
            _report(error, self.subject, self._counters)

    def _message_in(self, msg: Msg) -> Any:
        read = decode_json if self.spec.is_json else decode
        message = read(msg.data, self.spec.message)
        self._check_sender(msg.subject, message)
        return message

    async def _on_message(self, msg: Msg) -> None:
        self._received.inc()
        if not self._lanes.offer(msg):
            self._counters.dropped(self.spec.message.__name__)
            now_s = time.monotonic()
            if now_s - self._logged_drop_s > 5.0:
                self._logged_drop_s = now_s
                _log.error("slow consumer: %s has %d waiting; dropping", self.subject, self._lanes.pending)

    async def _run(self, msg: Msg) -> None:
        started_s = time.perf_counter()
        try:
            await self._handle(self._message_in(msg))
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            _report(error, self.subject, self._counters)
        except Exception as error:
            _report(error, self.subject, self._counters)
        self._seconds.observe(time.perf_counter() - started_s)


class ServedEndpoint:
    """An `Endpoint` on one connection, as a NATS micro endpoint."""

    def __init__(
        self, spec: Endpoint, target: object, instance: str, counters: BusCounters, link: Link
    ) -> None:
        self.spec = spec
        self.target = target
        self.subject = subject_for(spec.subject, instance)
        self._handle: Callable[[Any], Awaitable[msgspec.Struct]] = getattr(target, spec.method)
        if not inspect.iscoroutinefunction(self._handle):
            raise TypeError(f"{spec.method} serves {self.subject}, so it must be an async def")
        self._check_sender = sender_check(spec.sender)
        self._counters = counters
        self._link = link
        self._received = counters.received(spec.request)
        self._seconds = counters.handler_seconds(spec.request)
        self._lanes: Lanes[Msg] = Lanes(self._run, spec.concurrency, spec.pending_limit)
        self._refusals: Lanes[Msg] = Lanes(self._refuse_overload, 1, spec.pending_limit)
        self._endpoint: MicroEndpoint | None = None
        self._service: Service | None = None

    async def start(self, _client: Client, service: Service | None) -> None:
        assert service is not None
        about = {"request": self.spec.request.__name__}
        endpoint = MicroEndpoint(
            service, EndpointConfig(self.spec.method, self._on_request, subject=self.subject, metadata=about)
        )
        endpoint._queue_group = self.spec.queue or ""  # nats-py has no endpoints outside of queue groups
        await endpoint._start()
        service._endpoints.append(endpoint)
        self._service, self._endpoint = service, endpoint
        subscription = endpoint._subscription
        if subscription is not None:
            handle_inline(subscription, self._on_inline)

    async def stop(self, deadline_s: float) -> None:
        """Stop serving. nats-py cannot remove an endpoint from a service, hence the private names."""
        if self._endpoint is not None and self._service is not None:
            if self._endpoint in self._service._endpoints:
                self._service._endpoints.remove(self._endpoint)
            await _drain(self._endpoint._subscription, self._link, deadline_s)
        await self._lanes.stop(deadline_s)
        await self._refusals.stop(deadline_s)

    async def _on_request(self, request: Request) -> None:
        """Callback for nats-py."""
        self._on_inline(request._msg)

    def _on_inline(self, msg: Msg) -> None:
        self._received.inc()
        if self._endpoint is not None:
            self._endpoint._num_requests += 1
        if not self._lanes.offer(msg):
            self._counters.error("handler", Overloaded.code)
            self._refusals.offer(msg)

    async def _refuse_overload(self, msg: Msg) -> None:
        text = f"{self.subject} has {self._lanes.pending} requests waiting"
        await self._refuse(msg, Overloaded(text, retry_after_s=1.0))

    async def _run(self, msg: Msg) -> None:
        started_s = time.perf_counter()
        try:
            with tracing.served(msg.headers, self.spec.request.__name__, self.subject):
                request = decode(msg.data, self.spec.request)
                self._check_sender(msg.subject, request)
                reply = await self._handle(request)
                await self._answer(msg, encode(reply))
                self._counters.sent(type(reply)).inc()
        except asyncio.CancelledError as error:
            await self._fail(msg, error)
            if _is_cancelled():
                raise
        except Exception as error:
            await self._fail(msg, error)
        finally:
            self._took(time.perf_counter() - started_s)

    def _took(self, handler_s: float) -> None:
        """Record the time for `$SRV.STATS`, in place of nats-py's own measurement."""
        self._seconds.observe(handler_s)
        if self._endpoint is not None:
            endpoint = self._endpoint
            endpoint._processing_time += int(handler_s * 1e9)
            endpoint._average_processing_time = endpoint._processing_time // max(1, endpoint._num_requests)

    async def _answer(self, msg: Msg, data: bytes) -> None:
        limit = self._link.max_payload_bytes
        if len(data) > limit:
            raise MessageTooLarge(
                f"the reply on {self.subject} has {len(data)} bytes, over the limit of {limit}"
            )
        if msg.reply:
            await self._link.send(msg.reply, data)

    async def _fail(self, msg: Msg, error: BaseException) -> None:
        if self._endpoint is not None:
            self._endpoint._num_errors += 1
        _report(error, self.subject, self._counters)
        await self._refuse(msg, error)

    async def _refuse(self, msg: Msg, error: BaseException) -> None:
        wire = to_wire(error)
        wire["message"] = wire["message"][:_MAX_ERROR_CHARS]
        headers = {ERROR_HEADER: wire["code"], ERROR_CODE_HEADER: _status_of(error)}
        try:
            if msg.reply:
                await self._link.send(msg.reply, msgspec.msgpack.encode(wire), headers=headers)
        except KvasirError as unsent:
            _log.warning("an error reply on %s could not be sent: %s", self.subject, unsent)


def _report(error: BaseException, subject: str, counters: BusCounters) -> None:
    """Count the error; log it, with a traceback unless it is a `KvasirError`."""
    if isinstance(error, KvasirError):
        counters.error("handler", error.code)
        if not isinstance(error, UnavailableError):
            _log.warning("%s: %s: %s", subject, error.code, error)
    else:
        counters.error("handler", "internal_error")
        _log.error("the handler of %s raised", subject, exc_info=error)


def _status_of(error: BaseException) -> str:
    """Return the status code shown by NATS micro tools."""
    if isinstance(error, CallerError):
        return "400"
    return "503" if isinstance(error, UnavailableError) else "500"


def _is_cancelled() -> bool:
    """Return True if this task is being cancelled, not just its handler raising CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _drain(subscription: Subscription | None, link: Link, deadline_s: float) -> None:
    """Unsubscribe. Messages sent until then are still delivered, unless the connection is lost."""
    if subscription is None or subscription._closed:
        return
    try:
        async with asyncio.timeout(deadline_s):
            if subscription._conn.is_connected:
                await link.unless_lost(_empty(subscription, link))
            else:
                await subscription.unsubscribe()
    except (TimeoutError, nats.errors.Error, BusUnavailable) as error:
        _log.warning("%s was left with undelivered messages: %r", subscription.subject, error)
        with contextlib.suppress(nats.errors.Error):  # or the next connection would subscribe it again
            await subscription.unsubscribe()


async def _empty(subscription: Subscription, link: Link) -> None:
    await subscription._conn._send_unsubscribe(subscription._id)
    await link.barrier()
    await subscription.drain()  # type: ignore[no-untyped-call]
