"""Pieces written past ASGI arrive in order, as chunks, and only while the client keeps up."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from services.gateway.config import GatewayConfig
from services.gateway.http.server import bind, make_server
from services.gateway.http.sse import LANE, DirectWriter

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
BIG = bytes(1024 * 1024)


class Application:
    """Begins and ends as ASGI has it; what is between goes through the lane."""

    def __init__(self) -> None:
        self.opened: list[bool] = []
        self.paused = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lane: DirectWriter = scope[LANE]
        self.opened.append(lane.is_open)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.opened.append(lane.is_open)
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        lane.write(b"bc")
        lane.write(b"d" * 20)
        if scope["path"] == "/big":
            while lane.is_open:
                lane.write(BIG)
            self.paused.set()
        await send({"type": "http.response.body", "body": b"e"})
        self.opened.append(lane.is_open)


async def served(path: bytes, *, reads_at_once: bool) -> tuple[bytes, Application]:
    application, config = Application(), GatewayConfig.model_validate({"port": 0, "shutdown_grace_s": 0})
    listener = bind(config.host, config.port, "port")
    server = make_server(application, config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
    writer.write(REQUEST.replace(b" / ", b" " + path + b" "))
    if not reads_at_once:
        await asyncio.wait_for(application.paused.wait(), 10)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    server.should_exit = True
    await asyncio.wait_for(serving, 10)
    listener.close()
    return answer, application


async def test_pieces_are_chunks_between_those_of_asgi() -> None:
    answer, application = await served(b"/", reads_at_once=True)
    _, _, body = answer.partition(b"\r\n\r\n")
    assert body == b"1\r\na\r\n2\r\nbc\r\n14\r\n" + b"d" * 20 + b"\r\n1\r\ne\r\n0\r\n\r\n"
    assert application.opened == [False, True, False], "open between the headers and the end"


async def test_a_reader_that_does_not_keep_up_closes_the_lane() -> None:
    answer, application = await served(b"/big", reads_at_once=False)
    assert application.paused.is_set() and len(answer) > len(BIG)
    assert answer.endswith(b"1\r\ne\r\n0\r\n\r\n")


@pytest.mark.parametrize("chunk", [b"x", b"y" * 300])
def test_a_chunk_says_its_length(chunk: bytes) -> None:
    written: list[bytes] = []

    class Cycle:
        transport = type("Transport", (), {"write": staticmethod(written.append)})

    DirectWriter(Cycle()).write(chunk)  # type: ignore[arg-type]
    assert written == [b"%x\r\n" % len(chunk) + chunk + b"\r\n"]
