"""What was written is read by whoever comes, from its beginning or from an event on, however it was cut."""

import asyncio
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import HttpError
from services.gateway.lasting.transcript import EventsAfter, Transcript
from shared.errors import Overloaded
from tests.patience import PATIENCE_S

SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]


def event(number: int) -> bytes:
    body = orjson.dumps({"type": "response.x", "sequence_number": number, "delta": "a\n\nb" * (number % 3)})
    return b"event: response.x\ndata: " + body + b"\n\n"


@given(
    total=st.integers(0, 12),
    after=st.integers(-1, 14),
    cuts=st.lists(st.integers(0, 1500), max_size=8),
    comments=st.booleans(),
)
def test_events_up_to_a_number_are_left_out(total: int, after: int, cuts: list[int], comments: bool) -> None:
    comment = b": keep-alive\n\n" if comments else b""
    whole = b"".join(comment + event(number) for number in range(total))
    edges = sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
    events = EventsAfter(after)
    left = b"".join(events.feed(whole[a:b]) for a, b in pairwise(edges))
    assert left.replace(comment, b"") == b"".join(event(number) for number in range(after + 1, total))


class Reader:
    """A client's connection."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.left = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.messages.append(message)

    async def gone(self) -> None:
        await self.left.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


async def write(transcript: Transcript, *bodies: bytes, is_last: bool = True) -> None:
    await transcript.send({"type": "http.response.start", "status": 200, "headers": SSE})
    for at, body in enumerate(bodies):
        more = not (is_last and at == len(bodies) - 1)
        await transcript.send({"type": "http.response.body", "body": body, "more_body": more})
        await asyncio.sleep(0)


async def test_early_and_late_readers_read_the_same() -> None:
    transcript, early, late, leaving = Transcript(), Reader(), Reader(), Reader()
    reading = [asyncio.create_task(transcript.read(r.send, r.gone())) for r in (early, leaving)]
    await asyncio.sleep(0)
    await write(transcript, b"one ", b"two ", is_last=False)
    leaving.left.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await reading[1] is False
        await transcript.send({"type": "http.response.body", "body": b"three"})
        assert await reading[0] is True
        assert await transcript.read(late.send, late.gone()) is True
    assert early.body == late.body == b"one two three"
    assert late.messages[0]["status"] == 200 and late.messages[-1]["more_body"] is False
    assert leaving.body in (b"one ", b"one two ")


async def test_what_failed_before_it_began_is_raised_for_each() -> None:
    transcript, reader = Transcript(), Reader()
    transcript.end(Overloaded("full"))
    for _ in range(2):
        with pytest.raises(Overloaded):
            await transcript.read(reader.send, reader.gone())
    assert reader.messages == []


async def test_only_a_stream_has_events() -> None:
    transcript, reader = Transcript(), Reader()
    await transcript.send({"type": "http.response.start", "status": 200, "headers": []})
    await transcript.send({"type": "http.response.body", "body": b"{}"})
    with pytest.raises(HttpError, match="not streamed"):
        await transcript.read(reader.send, reader.gone(), 3)
    assert await transcript.read(reader.send, reader.gone())
