"""The load generator against a real HTTP server on a socket, with answers cut at every place."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.kit.load import Target, answers, check, complete, complete_all, first_error, insist, serve_all

EVENTS = [
    b'{"choices":[{"text":"a","finish_reason":null}]}',
    b'{"choices":[{"text":"","finish_reason":null}]}',
    b'{"choices":[{"text":"b","finish_reason":"length"}]}',
    b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}',
    b"[DONE]",
]


def chunked(events: list[bytes], status: bytes = b"200 OK") -> bytes:
    body = b"".join(b"data: " + event + b"\n\n" for event in events)
    head = b"HTTP/1.1 " + status + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"


@asynccontextmanager
async def server(*replies: bytes, pieces: int = 1) -> AsyncIterator[Target]:
    """Answers with these in turn and then with the last, in so many bytes at a time, and hangs up."""
    left = list(replies)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        reply = left.pop(0) if len(left) > 1 else left[0]
        for at in range(0, len(reply), pieces):
            writer.write(reply[at : at + pieces])
            await writer.drain()
        writer.close()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with running:
        yield Target(running.sockets[0].getsockname()[1], "m", key="k")


@pytest.mark.parametrize("pieces", [1, 7, 100_000])
async def test_an_answer_is_read_wherever_it_is_cut(pieces: int) -> None:
    async with server(chunked(EVENTS), pieces=pieces) as target:
        answer = await complete(target, {"prompt": [1]}, deadline_s=5.0)
    assert (answer.error, answer.completion_tokens, answer.prompt_tokens) == ("", 3, 7)
    assert (len(answer.event_s), answer.finish_reason) == (2, "length")
    assert answer.sent_s <= answer.event_s[0] <= answer.ended_s and check([answer], 3) == 0
    assert check([answer], 4) == 1


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (chunked(EVENTS[:2]), "without [DONE]"),
        (chunked(EVENTS)[:-60], "connection lost"),
        (chunked([b'{"error":{"message":"no"}}']), "no"),
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy", "status 429: busy"),
        (b"what?\r\n\r\n", "not HTTP"),
    ],
)
async def test_what_goes_wrong_is_a_failure_with_a_reason(reply: bytes, why: str) -> None:
    async with server(reply) as target:
        many = await complete_all(target, [{}, {}], deadline_s=5.0)
    assert [one.ok for one in many] == [False, False] and why in first_error(many) and check(many, 0) == 2


async def test_a_server_that_is_silent_or_gone() -> None:
    async def listen_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client has hung up
        writer.close()

    silent = await asyncio.start_server(listen_only, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent:
        answer = await complete(Target(port, "m"), {}, deadline_s=0.2)
    assert "no end within" in answer.error
    assert "connection" in (await complete(Target(port, "m"), {}, deadline_s=0.5)).error
    assert not await asyncio.to_thread(answers, Target(port, "m"))


async def test_requests_are_sent_when_they_are_due_in_order_and_so_many_at_once() -> None:
    there: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.05)
        writer.write(chunked(EVENTS))
        writer.close()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    target = Target(running.sockets[0].getsockname()[1], "m")
    async with running:
        began_s = asyncio.get_running_loop().time()
        served = await serve_all(target, [{}] * 3, at_once=1, due_s=[0.0, 0.0, 0.3])
    assert served.failures == 0
    first_s, second_s, third_s = (at_s - began_s for at_s in there)
    assert second_s - first_s >= 0.05 and third_s >= 0.3
    with pytest.raises(ValueError, match="argument"):
        await serve_all(target, [{}] * 3, at_once=1, due_s=[0.0])


async def test_what_has_not_ended_when_the_load_is_over_has_failed_be_it_sent_or_not() -> None:
    async def listen_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(listen_only, "127.0.0.1", 0)
    async with silent:
        target = Target(silent.sockets[0].getsockname()[1], "m")
        served = await serve_all(target, [{}] * 3, at_once=1, until_s=0.2)
    assert [one.error[:13] for one in served.answers] == ["no end within"] * 3
    assert served.failures == 3 and 0.2 <= served.elapsed_s < 5.0


@pytest.mark.parametrize(
    "broken",
    [
        chunked(EVENTS[:2])[:-20],
        chunked([*EVENTS[:1], b'{"error":{"message":"gone","code":"answer_moved"}}']),
        chunked([*EVENTS[:1], b'{"error":{"message":"send it again","code":"shutting_down"}}']),
        b"HTTP/1.1 503 Away\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_who_has_named_a_request_asks_again_where_it_goes_on_elsewhere(broken: bytes) -> None:
    async with server(broken, broken, chunked(EVENTS)) as target:
        answer = await insist(target, {"prompt": [1]}, "name", deadline_s=5.0)
    assert (answer.error, answer.text, answer.completion_tokens) == ("", "ab", 3)
    assert len(answer.event_s) == 2, "text that comes again is no news"


async def test_what_is_refused_is_not_asked_again() -> None:
    refused = b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy"
    async with server(refused, chunked(EVENTS)) as target:
        assert (await insist(target, {"prompt": [1]}, "name", deadline_s=5.0)).error == "status 429: busy"
