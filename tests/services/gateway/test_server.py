"""What uvicorn alone would wait for without end: half a header, half a body, a reader that does not read."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from starlette.types import Receive, Scope, Send

from services.gateway.body import read_body
from services.gateway.config import GatewayConfig
from services.gateway.errors import HttpError, error_response
from services.gateway.server import bind, make_server
from shared.errors import ConfigError

FLOOD = 64
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n"


class Application:
    """Reads the body, then answers; `/flood` answers with more than any buffer takes."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent_parts = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, None, max_bytes=1000, timeout_s=0.3)
        except HttpError as error:
            await error_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/flood":
            watcher = asyncio.ensure_future(receive())
            while not watcher.done() and self.sent_parts < FLOOD:
                await send({"type": "http.response.body", "body": bytes(1024 * 1024), "more_body": True})
                self.sent_parts += 1
            if watcher.done():
                self.gone.set()
            watcher.cancel()
        await send({"type": "http.response.body", "body": body})


Serve = Callable[..., Awaitable[tuple[int, Application]]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers with small limits; gives port and application."""
    async with contextlib.AsyncExitStack() as ends:

        async def start(**limits: object) -> tuple[int, Application]:
            defaults = {"port": 0, "receive_timeout_s": 0.4, "write_timeout_s": 0.4, "shutdown_grace_s": 0}
            config = GatewayConfig.model_validate({**defaults, **limits})
            application = Application()
            listener = bind(config)
            ends.callback(listener.close)
            server = make_server(application, config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))

            async def stop() -> None:
                server.should_exit = True
                await serving

            ends.push_async_callback(stop)
            while not server.started:
                await asyncio.sleep(0.01)
            port: int = listener.getsockname()[1]
            return port, application

        yield start


async def exchange(port: int, *parts: bytes, pause_s: float = 0.0) -> tuple[bytes, float]:
    """Send the parts, read until the server closes; what came, and after how long."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began_s = time.monotonic()

    async def send() -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    sending = asyncio.create_task(send())
    try:
        reply = await asyncio.wait_for(reader.read(), 5)
    finally:
        sending.cancel()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return reply, time.monotonic() - began_s


def code_in(reply: bytes) -> str:
    code: str = json.loads(reply.split(b"\r\n\r\n", 1)[1])["error"]["code"]
    return code


async def test_a_request_is_served_and_the_connection_kept(serve: Serve) -> None:
    port, _ = await serve()
    twice = REQUEST + b"\r\n" + REQUEST + b"connection: close\r\n\r\n"
    reply, took_s = await exchange(port, twice)
    assert reply.count(b"HTTP/1.1 200") == 2
    assert took_s < 0.3


@pytest.mark.parametrize("part", [b"", b"GET", REQUEST])
async def test_headers_that_do_not_arrive_are_408(serve: Serve, part: bytes) -> None:
    port, _ = await serve()
    reply, took_s = await exchange(port, part)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert code_in(reply) == "request_timeout"
    assert 0.3 < took_s < 1.5


async def test_headers_one_byte_at_a_time_are_408_too(serve: Serve) -> None:
    port, _ = await serve()
    reply, took_s = await exchange(port, *(bytes([byte]) for byte in REQUEST), pause_s=0.05)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert took_s < 3


async def test_bytes_between_two_requests_do_not_hold_a_connection(serve: Serve) -> None:
    port, _ = await serve()
    reply, took_s = await exchange(port, REQUEST + b"\r\n", b"\r\n", pause_s=0.1)
    assert reply.count(b"HTTP/1.1 200") == 1
    assert took_s < 2


async def test_a_body_that_does_not_arrive_is_408(serve: Serve) -> None:
    port, _ = await serve()
    reply, took_s = await exchange(port, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert took_s < 1.5


async def test_long_headers_are_431(serve: Serve) -> None:
    port, _ = await serve(max_header_bytes=1000)
    reply, _ = await exchange(port, REQUEST + b"x-long: " + b"y" * 5000, pause_s=0.05)
    assert reply.startswith(b"HTTP/1.1 431 ")
    assert code_in(reply) == "headers_too_large"


async def test_an_offer_to_upgrade_is_ignored_and_its_body_is_read(serve: Serve) -> None:
    port, _ = await serve()
    head = b"POST / HTTP/1.1\r\nhost: x\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUPGRADE: h2c\r\n"
    reply, _ = await exchange(port, head + b"HTTP2-Settings: AAA\r\ncontent-length: 5\r\n\r\n", b"hello")
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b"hello" in reply


async def test_a_body_in_pieces_that_looks_like_headers(serve: Serve) -> None:
    port, _ = await serve()
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 30\r\n\r"
    reply, _ = await exchange(port, head, b"\n", b"upgrade: x\r\n\r\n", b"GET / HTTP/1.1\r\n", pause_s=0.02)
    assert reply.count(b"HTTP/1.1 200") == 1
    assert b"upgrade: x" in reply


async def test_what_is_no_http_is_400_in_the_same_format(serve: Serve) -> None:
    port, _ = await serve()
    reply, _ = await exchange(port, b"\x16\x03\x01 hello\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert code_in(reply) == "invalid_http_request"


async def test_too_many_connections_are_503(serve: Serve) -> None:
    port, _ = await serve(max_connections=1, receive_timeout_s=5.0)
    first = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.sleep(0.05)
    reply, _ = await exchange(port)
    assert reply.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in reply
    first[1].close()
    await first[1].wait_closed()
    await asyncio.sleep(0.05)
    reply, _ = await exchange(port, REQUEST + b"connection: close\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200 ")


async def test_a_reader_that_does_not_read_is_dropped(serve: Serve) -> None:
    port, application = await serve()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(REQUEST.replace(b"GET /", b"GET /flood") + b"\r\n")
        await asyncio.wait_for(application.gone.wait(), 5)
    assert application.sent_parts < FLOOD


async def test_a_port_in_use_is_a_configuration_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="cannot listen on"):
            bind(GatewayConfig.model_validate({"port": taken.getsockname()[1]}))
