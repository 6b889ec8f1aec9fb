"""A stream of events: headers once, comments in silence, and nothing after an error but itself. Pieces
written past ASGI arrive in order, as chunks, and only while the client keeps up."""

import asyncio
import json

import pytest
from starlette.types import Message, Receive, Scope, Send

from services.gateway.config import GatewayConfig
from services.gateway.errors import ClientGone
from services.gateway.exchange import Exchange
from services.gateway.http.completion_response import KEEP_ALIVE, EventStream
from services.gateway.http.connection import DIRECT_WRITER, DirectWriter, bind, make_server
from tests.patience import until
from tests.services.gateway.conftest import ANSWER, MakeStack

CHAT = "/v1/chat/completions"


class Sent(list[Message]):
    """What was sent, in order."""

    async def __call__(self, message: Message) -> None:
        self.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self if message["type"] == "http.response.body"]


async def test_silence_is_filled_with_comments_and_begins_the_stream() -> None:
    sent, exchange = Sent(), Exchange()
    out = EventStream(sent, 0.03)
    began_s = asyncio.get_running_loop().time()
    waiting = asyncio.create_task(out.wait(exchange))
    await until(lambda: len(sent.bodies) >= 2)
    assert len(sent.bodies) <= (asyncio.get_running_loop().time() - began_s) / 0.03
    assert out.has_begun and not waiting.done()
    assert set(sent.bodies) == {KEEP_ALIVE}
    exchange.changed.set()
    await waiting
    exchange.fail(ClientGone())
    with pytest.raises(ClientGone):
        await out.wait(exchange)


async def test_a_slow_stream_begins_and_is_kept_alive(make_stack: MakeStack) -> None:
    stack = await make_stack(sse_keep_alive_s=0.1)
    stack.hold()
    async with stack.http.stream("POST", CHAT, json={**stack.body, "stream": True}) as reply:
        assert reply.status_code == 200, "the headers are there before any token"
        lines = reply.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2
        stack.hold(is_held=False)
        rest = [line async for line in lines]
    chunks = [json.loads(line[6:]) for line in rest if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == ANSWER
    assert rest[-2:] == ["data: [DONE]", ""]


async def test_once_it_has_begun_errors_are_events(make_stack: MakeStack) -> None:
    stack = await make_stack(sse_keep_alive_s=0.05, request_timeout_s=0.4)
    stack.hold()
    reply = await stack.chat(stream=True)
    assert reply.status_code == 200
    *comments, last, done = reply.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    assert len(comments) >= 2 and set(comments) == {": keep-alive"}
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
BIG = bytes(1024 * 1024)


class Application:
    """Begins and ends as ASGI has it; what is between goes through the lane."""

    def __init__(self) -> None:
        self.opened: list[bool] = []
        self.paused = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lane: DirectWriter = scope[DIRECT_WRITER]
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


async def test_news_that_shows_nothing_does_not_put_the_comment_off() -> None:
    sent, exchange = Sent(), Exchange()
    out = EventStream(sent, 0.05)
    for _ in range(12):
        asyncio.get_running_loop().call_later(0.01, exchange.changed.set)
        await out.wait(exchange)
    assert KEEP_ALIVE in sent.bodies
