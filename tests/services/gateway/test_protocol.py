"""What uvicorn alone would wait for, or keep, without end: half a header, half a body, a reader that does not
read, whatever a client sends after its answer."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from services.gateway.config import GatewayConfig
from services.gateway.errors import ClientGone, HttpError, error_response
from services.gateway.http.connection import ENGAGE, ConnectionTable, address_key, bind, make_server
from services.gateway.http.reading import BodyReader
from services.gateway.text.tokenizer import TokenizerThreads
from tests.patience import PATIENCE_S, until

FLOOD = 64
LIMITS = GatewayConfig.model_validate({"max_body_bytes": 1000, "receive_timeout_s": 0.3})
THREADS = TokenizerThreads(1, 8)
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n"


class Application:
    """Reads the body, then answers; `/flood` answers with more than any buffer takes, `/slow` in two parts,
    `/early` before it has read anything."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.sent_parts, self.left = 0, 0
        """Clients that were gone before their body had arrived."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        scope[ENGAGE]()
        try:
            if scope["path"] != "/early":
                body = await BodyReader(LIMITS, THREADS).read(Request(scope, receive))
        except ClientGone:
            self.left += 1
            return
        except HttpError as error:
            await error_response(error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/slow":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await asyncio.sleep(0.6)
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
            listener = bind(config.host, config.port, "port")
            ends.callback(listener.close)
            server = make_server(application, config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))

            async def stop() -> None:
                server.should_exit = True
                await serving

            ends.push_async_callback(stop)
            await until(lambda: server.started)
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
        reply = await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        sending.cancel()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    return reply, time.monotonic() - began_s


def error_in(reply: bytes) -> dict[str, str]:
    error: dict[str, str] = json.loads(reply.split(b"\r\n\r\n", 1)[1])["error"]
    return error


def code_in(reply: bytes) -> str:
    return error_in(reply)["code"]


@pytest.mark.parametrize("cut", range(1, len(REQUEST) + 2))
async def test_requests_in_one_packet_and_a_bit(serve: Serve, cut: int) -> None:
    """Cut within the empty line after the headers, the second one was never seen to be complete."""
    port, _ = await serve()
    whole = REQUEST + b"\r\n"
    last = REQUEST + b"connection: close\r\n\r\n"
    reply, _ = await exchange(port, whole + whole[:cut], whole[cut:] + last, pause_s=0.02)
    assert reply.count(b"HTTP/1.1 200") == 3


async def test_half_a_head_behind_a_request_is_bounded(serve: Serve) -> None:
    port, _ = await serve(max_header_bytes=1000)
    whole = REQUEST + b"\r\n"
    reply, took_s = await exchange(port, whole + b"GET / HT")
    assert [b"HTTP/1.1 200" in reply, b"HTTP/1.1 408" in reply] == [True, True] and took_s < 1.5
    reply, _ = await exchange(port, whole + b"GET /", *[b"x" * 100] * 20, pause_s=0.01)
    assert b"HTTP/1.1 431" in reply


@pytest.mark.parametrize("part", [b"", b"GET", REQUEST, REQUEST + b"content-length: 100\r\n\r\nhalf"])
async def test_headers_or_a_body_that_do_not_arrive_are_408(serve: Serve, part: bytes) -> None:
    port, _ = await serve()
    reply, took_s = await exchange(port, part)
    assert reply.startswith(b"HTTP/1.1 408 ") and code_in(reply) == "request_timeout" and 0.3 < took_s < 1.5


async def test_bytes_between_two_requests_do_not_hold_a_connection(serve: Serve) -> None:
    port, _ = await serve(keep_alive_s=1)
    reply, took_s = await exchange(port, REQUEST + b"\r\n", *[b"\r\n"] * 30, pause_s=0.1)
    assert reply.count(b"HTTP/1.1 200") == 1 and took_s < 2


async def test_an_offer_to_upgrade_is_ignored_and_its_body_is_read(serve: Serve) -> None:
    port, _ = await serve()
    head = b"POST / HTTP/1.1\r\nhost: x\r\nConnection: Upgrade, HTTP2-Settings, close\r\nUPGRADE: h2c\r\n"
    reply, _ = await exchange(port, head + b"HTTP2-Settings: AAA\r\ncontent-length: 5\r\n\r\n", b"hello")
    assert reply.startswith(b"HTTP/1.1 200 ") and b"hello" in reply


async def test_a_body_in_pieces_that_looks_like_headers(serve: Serve) -> None:
    port, _ = await serve()
    head = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 30\r\n\r"
    reply, _ = await exchange(port, head, b"\n", b"upgrade: x\r\n\r\n", b"GET / HTTP/1.1\r\n", pause_s=0.02)
    assert reply.count(b"HTTP/1.1 200") == 1 and b"upgrade: x" in reply


async def test_a_reader_that_does_not_read_is_dropped(serve: Serve) -> None:
    port, application = await serve()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(REQUEST.replace(b"GET /", b"GET /flood") + b"\r\n")
        await asyncio.wait_for(application.gone.wait(), PATIENCE_S)
    assert application.sent_parts < FLOOD


async def test_trailers_are_400_and_what_follows_is_not_kept(serve: Serve) -> None:
    """Trailers after an answer used to be kept without bound: 400 megabytes in half a second."""
    port, _ = await serve()
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    reply, _ = await exchange(port, head + b"5\r\nhello\r\n0\r\n", b"x-trailer: 1\r\n", b"\r\n", pause_s=0.05)
    assert reply.startswith(b"HTTP/1.1 400 ") and "trailers are not taken" in error_in(reply)["message"]


@pytest.mark.parametrize("endless", [b"x" * 200, b"1;" + b"x" * 200])
async def test_what_is_neither_body_nor_end_is_bounded(serve: Serve, endless: bytes) -> None:
    """One trailer or chunk header that never ends, which no callback of the parser ever sees."""
    port, _ = await serve(max_header_bytes=1000, receive_timeout_s=5.0)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n"
    head = head if endless.startswith(b"x") else head.removesuffix(b"0\r\n")
    reply, took_s = await exchange(port, head, *[endless] * 20, pause_s=0.005)
    assert reply.startswith(b"HTTP/1.1 400 ") and took_s < 3


@pytest.mark.parametrize("framing", [b"content-length: 100", b"transfer-encoding: chunked"])
async def test_an_answer_before_the_whole_request_ends_the_connection(serve: Serve, framing: bytes) -> None:
    """One byte after the answer used to keep a connection for ever."""
    port, _ = await serve()
    head = b"GET /early HTTP/1.1\r\nhost: x\r\n" + framing + b"\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head)
    reply = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert reply.startswith(b"HTTP/1.1 200 ") and b"connection: close" in reply
    began_s = time.monotonic()
    with pytest.raises(ConnectionError):
        while time.monotonic() - began_s < 30:
            writer.write(b"1")
            await writer.drain()
            await asyncio.sleep(0.02)
    assert time.monotonic() - began_s < 15, "in bytes and in time what follows is bounded"
    writer.close()


async def test_an_early_answer_reaches_a_client_that_is_still_writing(serve: Serve) -> None:
    """Closed at once, the connection would be reset, and the client would never read why."""
    port, _ = await serve(receive_timeout_s=5.0)
    head = b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + bytes(1000))
    await asyncio.sleep(0.1)
    writer.write(bytes(7_999_000))
    await writer.drain()
    reply = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert reply.startswith(b"HTTP/1.1 200 ")
    writer.close()
    await writer.wait_closed()


async def test_malformed_chunks_are_400_before_an_answer_has_begun(serve: Serve) -> None:
    port, application = await serve()
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    reply, _ = await exchange(port, head, b"5\r\nhello\r\n", b"no number\r\n", pause_s=0.05)
    assert reply.startswith(b"HTTP/1.1 400 ") and code_in(reply) == "invalid_http_request"
    assert reply.count(b"HTTP/1.1") == 1
    assert application.left == 1, "the application is told that nobody waits"


async def test_http_1_0_gets_no_chunks(serve: Serve) -> None:
    port, _ = await serve()
    reply, _ = await exchange(port, b"POST / HTTP/1.0\r\ncontent-length: 5\r\n\r\nhello")
    head, body = reply.split(b"\r\n\r\n", 1)
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head
    assert body == b"hello", "its end is the connection's"


@pytest.mark.parametrize("behind", [b"\r\n", b"GET /"])
async def test_bytes_behind_a_request_do_not_end_its_answer(serve: Serve, behind: bytes) -> None:
    """An empty line after a body, which some clients send, ended a long answer at the headers' deadline."""
    port, _ = await serve(receive_timeout_s=0.2)
    slow = REQUEST.replace(b"GET /", b"GET /slow") + b"connection: close\r\n\r\n"
    reply, took_s = await exchange(port, slow, behind, pause_s=0.1)
    assert reply.endswith(b"\r\n0\r\n\r\n") and took_s > 0.5


async def test_held_connections_give_way(serve: Serve) -> None:
    """8,300 connections that send nothing of use used to lock everybody out."""
    port, _ = await serve(max_connections=4, receive_timeout_s=30.0)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
    for _, writer in held:
        writer.write(b"GET /")
    await asyncio.sleep(0.05)
    reply, _ = await exchange(port, REQUEST + b"connection: close\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200 ")
    gone = [reader.at_eof() or reader.exception() is not None for reader, _ in held]
    assert gone == [True, True, True, False, False, False]
    for _, writer in held:
        writer.close()


@pytest.mark.parametrize(
    ("limits", "status"), [({"max_connections": 1}, b"503"), ({"max_connections_per_address": 1}, b"429")]
)
async def test_beyond_the_limits_it_is_refused(serve: Serve, limits: dict[str, int], status: bytes) -> None:
    port, _ = await serve(**limits, receive_timeout_s=5.0)
    slow = REQUEST.replace(b"GET /", b"GET /slow") + b"connection: close\r\n\r\n"
    first = asyncio.create_task(exchange(port, slow))
    await asyncio.sleep(0.1)
    reply, _ = await exchange(port)
    assert reply.startswith(b"HTTP/1.1 " + status) and b"retry-after: 1" in reply
    assert error_in(reply)["type"] == ("rate_limit_error" if status == b"429" else "server_error")
    assert (await first)[0].startswith(b"HTTP/1.1 200 ")
    reply, _ = await exchange(port, REQUEST + b"connection: close\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200 ")


def full(engaged: tuple[str, ...] = (), idle: tuple[str, ...] = ()) -> ConnectionTable[str]:
    """A table without room, of connections from as many addresses."""
    table = ConnectionTable[str](len(engaged) + len(idle), 100)
    for name in (*idle, *engaged):
        assert table.arrive(name, f"of {name}") is None
    for name in engaged:
        table.engage(name)
    return table


def test_the_longest_idle_gives_way_and_an_engaged_one_never() -> None:
    """Thousands of connections held without a key used to shut everybody else out."""
    table = full(engaged=("a",), idle=("b", "c"))
    assert table.arrive("d", "x") == "b"
    table.engage("c")
    assert table.arrive("e", "x") == "d"
    table.engage("e")
    with pytest.raises(HttpError, match="try again later") as caught:
        table.arrive("f", "x")
    assert (caught.value.status, caught.value.error_code) == (503, "overloaded")
    table.disengage("a")
    assert table.arrive("f", "x") == "a" and len(table) == 3


def test_one_address_displaces_its_own() -> None:
    table = ConnectionTable[str](100, 2)
    table.arrive("other", "y")
    assert [table.arrive(name, "x") for name in "abc"] == [None, None, "a"]
    table.engage("b")
    table.engage("c")
    with pytest.raises(HttpError, match="from this address") as caught:
        table.arrive("d", "x")
    assert (caught.value.status, caught.value.error_code) == (429, "too_many_connections")
    assert table.arrive("e", "y") is None
    table.leave("b")
    assert table.arrive("d", "x") is None


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("a socket", "a socket"),
        (None, ""),
    ],
)
def test_what_counts_as_one_address(host: str | None, key: str) -> None:
    assert address_key(host) == key


@given(st.lists(st.tuples(st.sampled_from(["arrive", "engage", "disengage", "leave"]), st.integers(0, 9))))
def test_the_bounds_hold_whatever_happens(steps: list[tuple[str, int]]) -> None:
    table, there, engaged = ConnectionTable[int](5, 3), dict[int, str](), set[int]()
    for step, connection in steps:
        address = str(connection % 2)
        if step != "arrive":
            getattr(table, step)(connection)
            if step == "leave":
                there.pop(connection, None)
            engaged = engaged | {connection} if step == "engage" else engaged - {connection}
            engaged &= set(there)
        elif connection not in there:
            try:
                displaced = table.arrive(connection, address)
            except HttpError:
                mine = {other for other in there if there[other] == address}
                assert set(there) <= engaged or (len(mine) == 3 and mine <= engaged)
                continue
            assert displaced not in engaged
            if displaced is not None:
                del there[displaced]
            there[connection] = address
        assert len(table) == len(there) <= 5
        assert all(list(there.values()).count(address) <= 3 for address in "01")
