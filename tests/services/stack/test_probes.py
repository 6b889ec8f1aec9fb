"""Readiness probes against real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.stack.obstructions import gateway_hosts
from services.stack.probes import HttpProbe, TcpProbe, http_get


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that reads a request's head and sends `answer`; its port, and what it was asked."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], asked


async def test_tcp(free_port: int) -> None:
    assert await TcpProbe(free_port).obstacle(0.0) == f"nothing listens on port {free_port} yet"
    async with answering(b"") as (port, _):
        assert await TcpProbe(port).obstacle(0.0) is None


@pytest.mark.parametrize(
    ("answer", "obstacle"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", None),
        (b'HTTP/1.1 503 No\r\n\r\n{"error":{"message":"no worker"}}', "no worker"),
        (b"HTTP/1.1 503 No\r\n\r\nwarming\nup", "warming up"),
        (b"HTTP/1.1 404 No\r\n\r\n", "/ready answers 404"),
    ],
)
async def test_http_says_what_is_missing(answer: bytes, obstacle: str | None) -> None:
    async with answering(answer) as (port, _):
        assert await HttpProbe(port, "/ready").obstacle(0.0) == obstacle


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1"])
async def test_what_is_not_http_is_no_answer(answer: bytes, free_port: int) -> None:
    async with answering(answer) as (port, _):
        assert await HttpProbe(port, "/ready").obstacle(0.0) == f"no answer on port {port} yet"
    assert await HttpProbe(free_port, "/ready").obstacle(0.0) == f"no answer on port {free_port} yet"


async def test_an_address_of_version_6_is_asked_there() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + head)
        writer.close()

    async with await asyncio.start_server(serve, "::1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await HttpProbe(port, "/ready", "::1").obstacle(0.0) is None
        assert f"Host: [::1]:{port}\r\n" in (await http_get(port, "/", host="::1"))[1]


@pytest.mark.parametrize(
    ("host", "reached"),
    [("::1", "::1"), ("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.0.0.7", "10.0.0.7")],
)
def test_a_gateway_is_reached_where_it_listens(host: str, reached: str) -> None:
    environ = {"KVASIR_GATEWAY__HOST": host, "KVASIR_GATEWAY__OPERATOR_HOST": host}
    assert gateway_hosts(environ) == (reached, reached)
