"""uvicorn's HTTP connection with limits on size, time and number. A connection is *engaged* while it answers
a request with a valid key; otherwise it is idle, and the longest idle one is closed to make room. If an
answer completes before its request, the connection closes."""

import asyncio
import contextlib
import ipaddress
import math
import re
import resource
import socket
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Final, Generic, TypeVar

import orjson
import uvicorn
from starlette.types import ASGIApp, Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.config import GatewayConfig
from services.gateway.errors import HttpError, ShuttingDown, body_of, headers_of, status_of
from shared.errors import ConfigError, KvasirError

DIRECT_WRITER: Final = "kvasir.direct_writer"
"""Key of the `DirectWriter` in the ASGI scope, where there is one."""


class DirectWriter:
    """Writes body chunks without `send`, which would wake a task for each."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = weakref.ref(cycle)  # whose scope holds this
        self._transport = cycle.transport

    @property
    def is_open(self) -> bool:
        """Whether a chunk can be written now: the response has begun and the client keeps up."""
        cycle = self._cycle()
        if cycle is None or cycle.disconnected or cycle.response_complete:
            return False
        return bool(cycle.chunked_encoding) and not cycle.flow.write_paused

    def write(self, piece: bytes) -> None:
        """Write one chunk to an open response. It must not be empty: an empty chunk ends the body."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Bytes of an oversized body to discard, since most clients read no answer while they write."""


C = TypeVar("C", bound=Hashable)

IPV6_PREFIX_BITS = 64
"""Prefix length of one subscriber's network, which counts as one address."""


class ConnectionTable(Generic[C]):
    """A listener's open connections: at most `limit`, and `limit_per_address` per address."""

    def __init__(self, limit: int, limit_per_address: int) -> None:
        self._limit = limit
        self._limit_per_address = limit_per_address
        self._address_of: dict[C, str] = {}
        self._counts: dict[str, int] = {}
        self._idle: OrderedDict[C, None] = OrderedDict()
        """Longest idle first."""
        self._idle_at: dict[str, OrderedDict[C, None]] = {}

    def __len__(self) -> int:
        return len(self._address_of)

    def arrive(self, connection: C, address: str) -> C | None:
        """Add an idle connection; return the one it displaces, which the caller closes. Raises HttpError when
        all are engaged: 429 for the address, 503 for the server."""
        displaced = None
        if self._counts.get(address, 0) >= self._limit_per_address:
            displaced = next(iter(self._idle_at.get(address, ())), None)
            if displaced is None:
                text = (
                    f"{self._limit_per_address} requests are being answered on as many connections from this "
                    "address: wait for some of them to end"
                )
                raise HttpError(429, text, error_code="too_many_connections")
        elif len(self._address_of) >= self._limit:
            displaced = next(iter(self._idle), None)
            if displaced is None:
                text = "a request is being answered on every connection the server takes: try again later"
                raise HttpError(503, text, error_code="overloaded")
        if displaced is not None:
            self.leave(displaced)
        self._address_of[connection] = address
        self._counts[address] = self._counts.get(address, 0) + 1
        self.disengage(connection)
        return displaced

    def engage(self, connection: C) -> None:
        """Protect the connection from displacement. No effect after `leave`."""
        self._idle.pop(connection, None)
        address = self._address_of.get(connection)
        if address in self._idle_at:
            self._idle_at[address].pop(connection, None)
            if not self._idle_at[address]:
                del self._idle_at[address]

    def disengage(self, connection: C) -> None:
        """Mark the connection idle. No effect after `leave`."""
        if connection in self._address_of:
            self.engage(connection)
            self._idle[connection] = None
            self._idle_at.setdefault(self._address_of[connection], OrderedDict())[connection] = None

    def leave(self, connection: C) -> None:
        """Remove the connection. No effect if it is absent."""
        self.engage(connection)
        address = self._address_of.pop(connection, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]


def address_key(host: str | None) -> str:
    """Return the IPv4 address, or the network of an IPv6 address."""
    try:
        address = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:
        return host or ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), IPV6_PREFIX_BITS), strict=False))


END_OF_HEADERS = b"\r\n\r\n"
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
"""Some clients offer h2c on every request; the parser would then misread the body."""
ENGAGE: Final = "kvasir.engage"
"""Key, in the ASGI scope, of the function to call once a request's key is accepted."""


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration plus the limits of `BoundedProtocol`."""

    def __init__(
        self,
        app: ASGIApp,
        limits: GatewayConfig,
        connections: "ConnectionTable[BoundedProtocol]",
        **settings: object,
    ) -> None:
        self.limits = limits
        self.connections = connections
        super().__init__(app, http=BoundedProtocol, **settings)  # type: ignore[arg-type]  # passed on


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    config: ServerConfig
    _headers_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _head = b""
    _in_head = False
    """The parser holds part of a head that followed a request in the same packet."""
    _in_message = False
    _framing_bytes = 0
    """Bytes since the last body byte, or since the end of the last head."""
    _discarded_bytes = 0
    _fault: str | None = None
    """Description of a fault that the parser does not report."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        try:
            displaced = self.config.connections.arrive(self, address_key(self.client and self.client[0]))
        except HttpError as error:
            self._write(error)
            self.transport.close()
            return
        if displaced is not None:
            displaced.transport.abort()
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Pass the parser complete heads, then body bytes as they arrive."""
        if self._linger_timer is not None:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        if not (self._in_message or self._in_head):
            if not self._head and not (data := data.lstrip(b"\r\n")):
                return  # ignore an empty line before a request; it does not keep the connection
            self._head += data
            self._expect_headers()
            end = self._head.find(END_OF_HEADERS)
            if len(self._head if end < 0 else self._head[:end]) > self.config.limits.max_header_bytes:
                self._refuse(self._too_long())
                return
            if end < 0 or self.transport.is_closing():
                return
            data = UPGRADE.sub(b"", self._head[:end]) + self._head[end:]
            self._head = b""
        self._framing_bytes += len(data)
        super().data_received(data)
        if self._in_head:
            self._expect_headers()
        if self._framing_bytes > self.config.limits.max_header_bytes:
            if self._in_message:
                self._refuse(_invalid("the body's chunks consist of more than what they carry"))
            elif self._in_head:
                self._refuse(self._too_long())

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_message:
            self._fault = "trailers are not taken: send these fields as headers"
            raise ValueError(self._fault)  # stops the parser, which calls `send_400_response`
        super().on_header(name, value)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_message = False, True
        self._framing_bytes = 0
        self._headers_arrived()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.cycle.send = self._sender(self.cycle)  # type: ignore[method-assign,assignment]
            self.scope[DIRECT_WRITER] = DirectWriter(self.cycle)  # type: ignore[typeddict-unknown-key]
            self.scope[ENGAGE] = partial(self.config.connections.engage, self)  # type: ignore[typeddict-unknown-key]

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._framing_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.config.connections.disengage(self)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self.config.connections.leave(self)
        self._headers_arrived()
        self._write_resumed()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)
        if self.cycle is not None:  # no reference cycle is left, so all is freed at once
            vars(self.cycle).pop("send", None)
        self.cycle = self.scope = None  # type: ignore[assignment]

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.config.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._write_resumed()
        super().resume_writing()

    def shutdown(self) -> None:
        """Accept no more requests: refuse an incomplete one, finish a complete one."""
        if self._linger_timer is not None:
            self.transport.abort()
        elif self._in_message:
            self._refuse(ShuttingDown())
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        self._refuse(_invalid(self._fault or msg))

    def _sender(self, cycle: RequestResponseCycle) -> Send:
        """Return `cycle.send`, adapted to two cases. HTTP/1.0 has no chunks, so the body ends with the
        connection. An answer that begins before its request is complete also ends the connection."""
        ends_early = is_unchunked = False
        send_on = cycle.send

        async def send(message: Message) -> None:
            nonlocal ends_early, is_unchunked
            begins = message["type"] == "http.response.start"
            if begins:
                vars(cycle).pop("send", None)  # uvicorn has read it; this ends a reference cycle
                ends_early = cycle.more_body
                names = [name.lower() for name, _ in message.get("headers", ())]
                is_unchunked = cycle.scope["http_version"] == "1.0" and b"content-length" not in names
                if is_unchunked:
                    cycle.chunked_encoding = False
                if ends_early:
                    cycle.keep_alive = False
            elif is_unchunked:
                cycle.expected_content_length = len(message.get("body", b""))
            await send_on(message)  # type: ignore[arg-type]  # uvicorn's types for the same
            if ends_early:
                cycle.keep_alive = True  # `_linger` closes instead, or the answer could be lost
                if cycle.response_complete:
                    self._linger()

        return send

    def _expect_headers(self) -> None:
        if self._headers_timer is None:
            self._headers_timer = self.loop.call_later(
                self.config.limits.receive_timeout_s, self._headers_late
            )

    def _headers_arrived(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _headers_late(self) -> None:
        self._headers_timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_headers()  # an answer in progress is not ended by bytes after its request
            return
        timeout_s = self.config.limits.receive_timeout_s
        text = f"the request's headers did not arrive within {timeout_s:g} s"
        self._refuse(HttpError(408, text, error_code="request_timeout"))

    def _too_long(self) -> HttpError:
        limit = self.config.limits.max_header_bytes
        text = f"the request line and headers are longer than {limit} bytes: send fewer or shorter ones"
        return HttpError(431, text, error_code="headers_too_large")

    def _write_resumed(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self, error: KvasirError) -> None:
        """Send an error and close; if an answer is in progress, only close."""
        self._headers_arrived()
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        if self.pipeline or (cycle is not None and is_open and cycle.response_started):
            self.transport.close()
            return
        if cycle is not None and is_open:
            cycle.disconnected = True  # the application sees a disconnect
            cycle.message_event.set()
        self._write(error)
        self._linger()

    def _write(self, error: KvasirError) -> None:
        status, _ = status_of(error)
        body = orjson.dumps(body_of(error))
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        headers |= headers_of(error) | {"connection": "close"}
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)

    def _linger(self) -> None:
        """Half-close and discard input for a while: a reset would lose the answer on its way."""
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        self._unset_keepalive_if_required()
        self.config.connections.disengage(self)
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(self.config.limits.receive_timeout_s, self.transport.abort)
        self.transport.write_eof()


def _invalid(text: str) -> HttpError:
    return HttpError(400, text, error_code=HttpError.code)


BACKLOG = 2048
SPARE_DESCRIPTORS = 256
"""File descriptors kept for all but client connections: the bus, logs, the operator's listener."""
OPERATOR_CONNECTIONS = 64


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to its process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int, setting: str, *, is_shared: bool = False) -> socket.socket:
    """Bind a socket; `is_shared` shares the port. Raises ConfigError naming `setting` on failure."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        text = f"cannot listen on {host}:{port}: {error.strerror}; set another {setting}"
        raise ConfigError(text, param=setting) from None
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: ASGIApp, config: GatewayConfig) -> Server:
    """Return the clients' server. Run `serve(sockets=[listener])`; end it with `should_exit = True`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = max(1, min(config.max_connections, hard - SPARE_DESCRIPTORS))
    return _server(app, config, limit, config.max_connections_per_address)


def make_operator_server(app: ASGIApp, config: GatewayConfig) -> Server:
    """Return the operator's server, whose connections clients cannot use up. Run it like the other."""
    return _server(app, config, OPERATOR_CONNECTIONS, OPERATOR_CONNECTIONS)


def _server(app: ASGIApp, config: GatewayConfig, limit: int, limit_per_address: int) -> Server:
    settings = ServerConfig(
        app,
        config,
        ConnectionTable(limit, limit_per_address),
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(config.keep_alive_s),
        timeout_graceful_shutdown=math.ceil(config.shutdown_grace_s) + 1,
    )
    return Server(settings)
