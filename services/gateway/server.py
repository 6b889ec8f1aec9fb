"""uvicorn with the deadlines it lacks: partial headers, silent readers, floods of connections.

Answers on this level have the same error format as everywhere. Knows nothing of routes.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from typing import Any

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.config import GatewayConfig
from services.gateway.errors import HttpError, body_of
from services.gateway.lane import LANE, Lane
from shared.errors import ConfigError

BACKLOG = 2048
END_OF_HEADERS = b"\r\n\r\n"
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
"""Offered to every server by some clients (h2c); left in, the parser takes the body for another protocol."""
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_REASONS[503] = b"Service Unavailable"


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration plus the limits of `BoundedProtocol`."""

    def __init__(self, app: ASGIApp, limits: GatewayConfig, **settings: Any) -> None:
        self.limits = limits
        super().__init__(app, **settings)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Headers have to arrive in time and within a size, and a reader has to read."""

    config: ServerConfig
    _headers_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _head = b""
    """Of headers that have not arrived in full."""
    _in_message = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.config.limits.max_connections:
            self._refuse(503, "too many connections", "overloaded")
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Hands the parser whole headers, then the body as it comes."""
        if not self._in_message:
            self._head += data
            self._expect_headers()
            end = self._head.find(END_OF_HEADERS)
            if len(self._head if end < 0 else self._head[:end]) > self.config.limits.max_header_bytes:
                self._refuse(431, "the request's headers are too long", "headers_too_large")
            if end < 0 or self.transport.is_closing():
                return
            data = UPGRADE.sub(b"", self._head[:end]) + self._head[end:]
            self._head = b""
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._in_message = True
        self._headers_arrived()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope[LANE] = Lane(self.cycle)  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_arrived()
        self._write_resumed()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.config.limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._write_resumed()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "invalid_http_request")

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

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
        self._refuse(408, "the request's headers did not arrive in time", "request_timeout")

    def _write_resumed(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer on the bare connection and close it, unless an answer is under way."""
        self._headers_arrived()
        if self.transport.is_closing():
            return
        if self._is_idle():
            body = orjson.dumps(body_of(HttpError(status, message, error_code=code)))
            lines = [b"HTTP/1.1 %d %s" % (status, _REASONS[status]), b"content-type: application/json"]
            lines += [b"content-length: %d" % len(body), b"connection: close"]
            lines += [b"retry-after: 1"] if status == 503 else []
            self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()


class Server(uvicorn.Server):
    """Leaves signals to the process that runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(config: GatewayConfig) -> socket.socket:
    """The listening address. Raises ConfigError when it cannot be had."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        text = f"cannot listen on {config.host}:{config.port}: {error.strerror}; set another host or port"
        raise ConfigError(text, param="port") from None
    listener.setblocking(False)
    return listener


def make_server(app: ASGIApp, config: GatewayConfig) -> Server:
    """To be run with `serve(sockets=[bind(config)])`, and ended with `should_exit = True`."""
    settings = ServerConfig(
        app,
        config,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(config.keep_alive_s),
        timeout_graceful_shutdown=int(config.shutdown_grace_s),
    )
    return Server(settings)
