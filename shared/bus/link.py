"""Connection to nats-server: opened within a deadline, then kept open indefinitely. nats-py reconnects by
itself, but closes for good after some server errors (refused credentials, protocol errors). The link then
dials again."""

import asyncio
import logging
import random
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client

from shared import watchdog
from shared.bus.client import EncryptedClient, FairClient
from shared.bus.counters import BusCounters
from shared.bus.server_choice import ServerChoice
from shared.config import BusConfig
from shared.errors import BusUnavailable, ConfigError, KvasirError, PermissionRefused
from shared.subjects import is_inbox


def tls_options(config: BusConfig) -> dict[str, Any]:
    """Return TLS options for nats-py, empty without TLS. Raise ConfigError naming an unusable file."""
    if not config.url.startswith(("tls://", "wss://")) and config.tls_ca is None:
        return {}
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
    except OSError as error:
        raise ConfigError(
            f"{config.tls_ca} is no PEM file of an authority: {error}", param="tls_ca"
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if config.tls_cert is not None:
        try:
            context.load_cert_chain(config.tls_cert, config.tls_key)
        except OSError as error:
            raise ConfigError(
                f"{config.tls_cert} with {config.tls_key or 'no key'} is no certificate: {error}",
                param="tls_cert",
            ) from None
    return {"tls": context, "tls_handshake_first": config.tls_handshake_first}


BACKOFF_S = (0.05, 0.5)
"""Initial and maximum mean delay between reconnection attempts."""


async def abandon(client: Client, connecting: asyncio.Task[None]) -> None:
    """End a connection attempt. nats-py may swallow several cancellations."""
    client.options |= {"allow_reconnect": False, "max_reconnect_attempts": 0}
    client._server_pool.clear()  # so it ends by itself if this task is cancelled, too
    while not connecting.done():
        connecting.cancel()
        await asyncio.wait({connecting}, timeout=0.1)
    await client.close()


def next_attempt(client: Client, servers: list[Any], _info: dict[str, Any]) -> tuple[Any, float]:
    """Choose the server that failed least, the one just lost last, after a jittered delay that doubles per
    failure. A callback for nats-py."""
    if client._transport is not None:  # nats-py leaks the socket of a refused attempt
        client._transport.close()  # type: ignore[no-untyped-call]
    lost = client._current_server
    server = min(servers, key=lambda each: (each.reconnects, lost is not None and each.uri == lost.uri))
    first_s, longest_s = BACKOFF_S
    mean_s = min(longest_s, first_s * 2.0 ** min(server.reconnects, 8))
    return server, mean_s * random.uniform(0.5, 1.5)


_log = logging.getLogger("kvasir.bus")
T = TypeVar("T")
_VIOLATION = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)
_LOG_EVERY_S = 5.0
_LEAVES_S = 2.0
"""For the last messages of a connection that is not used any more."""
_ANSWERS_S = 120.0
"""Time after a reconnection in which replies to requests from before it may be refused."""


@contextmanager
def heeded_cancellation() -> Iterator[None]:
    """Re-raise a cancellation that the body swallowed. nats-py swallows one while flushing, and so does
    `wait_for` of Python 3.11 if its result arrives at the same moment."""
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    yield
    if task and task.cancelling() > before:
        raise asyncio.CancelledError


@dataclass(eq=False)
class _Wait:
    task: asyncio.Task[Any]
    publishes: tuple[str, ...]
    error: KvasirError | None = None

    def fail(self, error: KvasirError) -> None:
        if not self.task.done():
            self.error = error
            self.task.cancel()


class Waits:
    """Pending calls to the server, which fail at once when the connection is lost or the server refuses."""

    def __init__(self) -> None:
        self._waiting: dict[_Wait, None] = {}  # ordered: the oldest wait fails first

    async def result(self, work: Coroutine[Any, Any, T], publishes: tuple[str, ...] = ()) -> T:
        """Return or raise the outcome of `work`, or raise the error that it was failed with. `publishes`
        lists prefixes of the subjects that it publishes to."""
        wait = self._start(work, publishes)
        try:
            await asyncio.wait({wait.task})
            if wait.error is not None:
                raise wait.error
            result: T = wait.task.result()
            return result
        finally:
            wait.task.cancel()

    async def is_done_within(self, work: Coroutine[Any, Any, Any], limit_s: float) -> bool:
        """Return True if `work` succeeds in time. Late work is not cancelled."""
        task = self._start(work, ()).task
        await asyncio.wait({task}, timeout=limit_s)
        return task.done() and not task.cancelled() and task.exception() is None

    def fail_all(self, error: KvasirError) -> None:
        """Fail all waits, because the connection is lost."""
        for wait in self._waiting:
            wait.fail(error)

    def fail_publishers(self, subject: str, error: KvasirError) -> None:
        """Fail the waits that publish to `subject`, which is in lower case."""
        for wait in self._waiting:
            if any(subject.startswith(beginning.lower()) for beginning in wait.publishes):
                wait.fail(error)

    def _start(self, work: Coroutine[Any, Any, Any], publishes: tuple[str, ...]) -> _Wait:
        wait = _Wait(asyncio.get_running_loop().create_task(work), publishes)
        self._waiting[wait] = None

        def forget(task: asyncio.Task[Any]) -> None:
            self._waiting.pop(wait, None)
            if not task.cancelled():
                task.exception()  # avoid asyncio's warning if nobody awaits the task

        wait.task.add_done_callback(forget)
        return wait


Hook = Callable[[], Awaitable[None]]


class Link:
    """Connection of one process. `on_open` subscribes everything on a new client; other hooks only inform."""

    def __init__(
        self, config: BusConfig, name: Callable[[int], str], inbox_prefix: str, counters: BusCounters
    ) -> None:
        """`name` returns the name of the nth connection."""
        self._config = config
        self._name, self._numbers = name, count(1)
        self._inbox_prefix = inbox_prefix
        self._tls = tls_options(config)
        self._counters = counters
        self._client: FairClient | None = None
        self._up = asyncio.Event()
        self._closing = False
        self._reviving = False
        self._regained_s = float("-inf")
        self.subscribing = asyncio.Lock()
        """Held while a client gets its subscriptions."""
        self._last_error: Exception | None = None
        self._logged_at: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._waits = Waits()
        self._account = watchdog.part("bus")
        self.reconnections = 0
        self.on_open: Hook = _nothing
        self.on_lost: Callable[[], None] = lambda: None
        self.on_regained: Hook = _nothing
        self.on_met: Callable[[], None] = lambda: None
        self._choice = ServerChoice(config, self._tls.get("tls"), self._now, self._move, self._own)
        self.on_refused: Callable[[str, str], None] = lambda verb, subject: None

    @property
    def client(self) -> Client:
        if self._client is None:
            raise BusUnavailable("the bus is not connected yet")
        return self._client

    @property
    def servers(self) -> int:
        """Number of servers that form the bus, as far as configured."""
        return len(self._config.urls)

    @property
    def url(self) -> str:
        """Address of the server that the connection goes to."""
        current = self.client.connected_url if self.servers > 1 else None
        return self._config.url if current is None else current.geturl()

    @property
    def server_name(self) -> str:
        return str(self.client._server_info.get("server_name", ""))

    @property
    def connected(self) -> bool:
        return self._up.is_set() and self._client is not None and self._client.is_connected

    @property
    def max_payload_bytes(self) -> int:
        return min(self._config.max_payload_bytes, self.client.max_payload)

    async def open(self) -> None:
        """Connect. Raise BusUnavailable after `connect_timeout_s`."""
        self._client = await self._dial()
        await self.on_open()
        self._mark(up=True)
        self._choice.head_home()

    async def wait_connected(self) -> None:
        """Wait until connected; the caller sets the deadline. Raise BusUnavailable if the bus is closed."""
        while not self.connected:
            if self._closing:
                raise BusUnavailable("the bus is closed")
            if self._up.is_set():
                await asyncio.sleep(0.01)  # nats-py has noticed the loss and is about to report it
            else:
                await self._up.wait()

    async def send(
        self, subject: str, data: bytes, reply: str = "", headers: dict[str, Any] | None = None
    ) -> None:
        """Send, or buffer while disconnected. Raise BusUnavailable if the bus is closed or its buffer is
        full."""
        try:
            with heeded_cancellation():
                await self.client.publish(subject, data, reply, headers)
        except nats.errors.OutboundBufferLimitError:
            raise BusUnavailable("disconnected from NATS, and the outbound buffer is full") from None
        except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError):
            raise BusUnavailable("the bus is closed") from None

    async def barrier(self) -> None:
        """Wait until the server has processed all sent messages. nats-py's own flush overtakes buffered
        messages."""
        with heeded_cancellation():
            await self.client._flush_pending(force_flush=True)
            await self.client.flush()

    async def close(self, deadline_s: float) -> None:
        """Flush unsent messages within the deadline if possible, then disconnect."""
        self._closing = True
        client = self._client
        for task in self._tasks:
            task.cancel()
        if client is None or client.is_closed:
            self._mark(up=False)
            return
        try:
            async with asyncio.timeout(deadline_s):
                if self.connected:
                    await self.barrier()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            _log.warning("closing the bus with unsent messages: %s", error)
        try:
            async with asyncio.timeout(deadline_s):
                await client.close()
        except (TimeoutError, OSError) as error:
            _log.warning("the connection did not close cleanly: %r", error)
        self._mark(up=False)

    async def unless_lost(self, work: Coroutine[Any, Any, T], *, publishes: tuple[str, ...] = ()) -> T:
        """Return the result of `work`, which publishes to subjects with these prefixes. Raise BusUnavailable
        as soon as the connection is lost, and PermissionRefused if the server refuses such a subject."""
        if not self.connected:
            work.close()
            raise BusUnavailable(f"not connected to NATS at {self._config.url}")
        return await self._waits.result(work, publishes)

    async def settle(self, limit_s: float) -> bool:
        """Like `barrier`, but return False after `limit_s` or a lost connection."""
        return await self._waits.is_done_within(self.barrier(), limit_s)

    def regained_within(self, window_s: float) -> bool:
        """Return True if the last reconnection is less than `window_s` ago."""
        return time.monotonic() - self._regained_s < window_s

    async def _dial(self, first: str = "") -> FairClient:
        """Return a connected client, of the server `first` if it answers. Raise BusUnavailable after
        `connect_timeout_s`."""
        client = EncryptedClient() if self._tls else FairClient()
        client.on_reach = partial(self._on_reach, client)
        urls = sorted(self._config.urls, key=lambda url: url != first)
        connecting = asyncio.get_running_loop().create_task(client.connect(urls, **self._options(client)))
        try:
            await asyncio.wait({connecting}, timeout=self._config.connect_timeout_s)
            if connecting.done():
                connecting.result()
                return client
        except BaseException:
            await abandon(client, connecting)
            raise
        await abandon(client, connecting)
        raise BusUnavailable(
            f"no NATS connection to {self._config.url} within {self._config.connect_timeout_s:g} s"
            f" (last error: {self._last_error or 'none'})"
        )

    def _options(self, client: Client) -> dict[str, Any]:
        config = self._config
        return {
            "name": self._name(next(self._numbers)),
            "inbox_prefix": self._inbox_prefix,
            "user": config.user,
            "password": config.password.get_secret_value() if config.password else None,
            **self._tls,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnected,
            "reconnected_cb": self._on_reconnected,
            "closed_cb": self._on_closed,
            "reconnect_to_server_handler": partial(self._next_attempt, client),
            "connect_timeout": 2,
            "reconnect_time_wait": 0.2,
            "dont_randomize": True,
            "max_reconnect_attempts": -1,
            "ping_interval": config.ping_s,
            "max_outstanding_pings": 2,
            "pending_size": config.outbound_buffer_bytes,
            "flush_timeout": 2.0,
        }

    def _next_attempt(self, client: Client, servers: list[Any], info: dict[str, Any]) -> tuple[Any, float]:
        client.options["name"] = self._name(next(self._numbers))
        return next_attempt(client, servers, info)

    def _mark(self, *, up: bool) -> None:
        self._account.at("connected" if up else "away from NATS", None)
        if up:
            self._up.set()
        else:
            self._up.clear()
            self._waits.fail_all(BusUnavailable("the connection to NATS was lost while waiting"))
        self._counters.connected.set(int(up))

    async def _on_disconnected(self) -> None:
        if not self._up.is_set():
            return
        self._mark(up=False)
        if not self._closing:
            _log.warning("lost the connection to NATS at %s; reconnecting", self._config.url)
            self.on_lost()

    async def _on_reconnected(self) -> None:
        self._counters.reconnects.inc()
        self.reconnections += 1
        self._regained_s = time.monotonic()
        self._mark(up=True)
        _log.warning("reconnected to NATS at %s", self.url)
        self._own(self.on_regained())
        if self.servers > 1:
            self.on_met()
            self._choice.head_home()

    async def _on_closed(self) -> None:
        if self._client is None or self._closing or self._reviving:
            return
        self._reviving = True
        if self._up.is_set():
            self._mark(up=False)
            self.on_lost()
        self._own(self._revive())

    async def _revive(self) -> None:
        _log.error("nats-py gave the connection up (%s); dialling anew", self._last_error)
        client: FairClient | None = None
        while not self.connected:
            try:
                client = self._client = await self._dial()
                await self.on_open()
                await self._on_reconnected()
            except (BusUnavailable, nats.errors.Error, OSError) as error:
                _log.error("%s; trying again", error)
                if client is not None:
                    await client.close()
                await asyncio.sleep(BACKOFF_S[1])
        self._reviving = False

    def _now(self) -> tuple[FairClient, str] | None:
        return (self._client, self.url) if self._client is not None and self.connected else None

    def _on_reach(self, client: FairClient, before: int) -> None:
        if client.reached > before:
            self.on_met()
        else:
            self._choice.look_around(client)

    async def _move(self, former: FairClient, url: str) -> None:
        """Connect to this server, and leave the former one once the new connection has all subscriptions.
        Meanwhile messages may come twice, as over a bus that repeats them."""
        _log.warning("moving from the NATS server at %s to the one at %s", self.url, url)
        try:
            client = await self._dial(url)
        except (BusUnavailable, nats.errors.Error, OSError) as error:
            return _log.warning("stayed: %s", error)
        async with self.subscribing:
            if self._client is not former:
                return self._leave(client)
            self._client = client
            try:
                await self.on_open()
            except (BusUnavailable, nats.errors.Error, OSError):
                await client.close()  # and dial anew
                raise
            finally:
                self._leave(former)
        self._waits.fail_all(BusUnavailable("moved to another NATS server while waiting"))
        await self._on_reconnected()

    def _leave(self, client: FairClient) -> None:
        """Close a connection that this link does not use any more, once what comes on it is handled."""
        client._disconnected_cb = client._closed_cb = _nothing
        client.options |= {"allow_reconnect": False, "drain_timeout": _LEAVES_S}
        self._own(_ended(client))

    def _own(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except Exception:
                _log.exception("a reconnection callback failed")

        task = asyncio.get_running_loop().create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        if isinstance(error, nats.errors.SlowConsumerError):
            self._counters.dropped("nats")
            self._log_rarely("slow", "nats-py dropped a message on %s: the event loop lags", error.subject)
        elif violation := _VIOLATION.search(str(error)):
            verb, subject = violation.groups()
            if verb.lower() == "publish" and is_inbox(subject) and self.regained_within(_ANSWERS_S):
                return  # permission to reply ended with the request's connection
            self._counters.error("connection", PermissionRefused.code)
            self._log_rarely("permission", "the bus user may not use a subject: %s %s", verb, subject)
            if verb.lower() == "publish":
                refused = PermissionRefused(f"the bus user may not publish to {subject}")
                self._waits.fail_publishers(subject, refused)
            self.on_refused(verb.lower(), subject)
        else:
            self._counters.error("connection", type(error).__name__)
            if self._up.is_set():
                self._log_rarely(type(error).__name__, "NATS: %r", error)

    def _log_rarely(self, key: str, message: str, *values: object) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_at.get(key, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._logged_at[key] = now_s
            _log.error(message, *values)


async def _ended(client: FairClient) -> None:
    try:
        await (client.drain() if client.is_connected else client.close())
    finally:
        if client._transport is not None:  # cancelled, because the process ends
            client._transport.close()  # type: ignore[no-untyped-call]


async def _nothing() -> None:
    pass
