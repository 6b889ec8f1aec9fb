"""Responses that are stored or made in the background, through a real port and with a real file."""

import asyncio
import sqlite3
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.errors import HttpError
from services.gateway.http.stored import ResponseStore
from services.gateway.lasting.transcript import EventsAfter, Transcript
from shared.errors import ConfigError, InvalidRequest, Overloaded
from tests.patience import PATIENCE_S, until
from tests.services.gateway.conftest import ANSWER, Clock, MakeStack, Stack
from tests.services.gateway.fakes import MODEL, cancelled

BODY: dict[str, Any] = {"model": MODEL, "input": "hello", "temperature": 0}


@pytest_asyncio.fixture
async def keeping(make_stack: MakeStack, tmp_path: Path) -> Stack:
    """What nobody reads is given up soon; what is made in the background is not."""
    return await make_stack(stored_responses=str(tmp_path / "responses.db"), resume_s=0.2)


async def begun(stack: Stack, **fields: Any) -> str:
    """A response in the background that workers have been given."""
    reply = await stack.http.post("/v1/responses", json={**BODY, "background": True, **fields})
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert (body["status"], body["background"], body["output"]) == ("queued", True, [])
    await until(lambda: stack.scheduler.submits)
    return str(body["id"])


async def polled(stack: Stack, name: str) -> dict[str, Any]:
    reply = await stack.http.get(f"/v1/responses/{name}")
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


async def ended(stack: Stack, name: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while (body := await polled(stack, name))["status"] == "in_progress":
            await asyncio.sleep(0.01)
    return body


async def test_one_in_the_background_goes_on_though_nobody_reads_it(keeping: Stack) -> None:
    keeping.hold()
    name = await begun(keeping)
    await asyncio.sleep(0.5)  # longer than `resume_s`
    assert (await polled(keeping, name))["status"] == "in_progress"
    keeping.hold(is_held=False)
    body = await ended(keeping, name)
    assert (body["status"], body["background"]) == ("completed", True)
    assert body["output"][0]["content"][0]["text"] == ANSWER
    refused = await keeping.http.post(f"/v1/responses/{name}/cancel")
    assert refused.json() == body, "it has ended"


async def test_its_events_go_on_when_their_reader_leaves(keeping: Stack) -> None:
    keeping.hold()
    asked = {**BODY, "background": True, "stream": True}
    posted = asyncio.create_task(keeping.http.post("/v1/responses", json=asked))
    await until(lambda: keeping.scheduler.submits)
    posted.cancel()
    name = "resp_" + keeping.scheduler.submits[0].ref.request_id.removeprefix("req_")
    assert (await polled(keeping, name))["status"] == "in_progress"
    keeping.hold(is_held=False)
    assert (await ended(keeping, name))["status"] == "completed"


@pytest.mark.parametrize("verb", ["cancel", "delete"])
async def test_one_that_is_ended_is_computed_no_more(keeping: Stack, verb: str) -> None:
    keeping.hold()
    name = await begun(keeping)
    if verb == "cancel":
        for _ in range(2):
            reply = await keeping.http.post(f"/v1/responses/{name}/cancel")
            assert (reply.status_code, reply.json()["status"]) == (200, "cancelled")
    else:
        assert (await keeping.http.delete(f"/v1/responses/{name}")).json()["deleted"] is True
    await until(lambda: keeping.scheduler.cancelled)
    keeping.hold(is_held=False)
    await asyncio.sleep(0.2)
    reply = await keeping.http.get(f"/v1/responses/{name}")
    assert reply.status_code == (200 if verb == "cancel" else 404)
    assert verb == "delete" or reply.json()["status"] == "cancelled"


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}])
async def test_an_answer_ends_when_any_gateway_finds_it(
    keeping: Stack, tmp_path: Path, how: dict[str, Any]
) -> None:
    """Another gateway holds the file's lock: the client waits for it, and for no more than that."""
    with sqlite3.connect(tmp_path / "responses.db", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        asking = asyncio.create_task(keeping.http.post("/v1/responses", json={**BODY, **how}))
        await until(lambda: keeping.scheduler.submits)
        await asyncio.sleep(0.3)
        assert not asking.done()
        other.execute("COMMIT")
        reply = await asyncio.wait_for(asking, PATIENCE_S)
        assert reply.status_code == 200
        assert other.execute("SELECT count(*) FROM responses").fetchone() == (1,)


async def test_it_fails_with_its_gateway(keeping: Stack, make_stack: MakeStack, tmp_path: Path) -> None:
    keeping.hold()
    name = await begun(keeping)
    await cancelled(keeping.running)
    other = await make_stack(stored_responses=str(tmp_path / "responses.db"), instance="gateway-1")
    body = await ended(other, name)
    assert body["status"] == "failed" and "ask for it again" in body["error"]["message"]
    assert await polled(other, name) == body


async def test_what_ends_it_is_kept(keeping: Stack) -> None:
    keeping.scheduler.refusal = InvalidRequest("too odd")
    body = await ended(keeping, await begun(keeping))
    assert (body["status"], body["error"]["message"]) == ("failed", "too odd")


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"background": True, "store": False}, "store"), ({"background": "yes"}, "background")],
)
async def test_what_cannot_be_in_the_background(keeping: Stack, fields: dict[str, Any], param: str) -> None:
    reply = await keeping.http.post("/v1/responses", json={**BODY, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_what_cannot_be_cancelled(keeping: Stack) -> None:
    name = (await keeping.http.post("/v1/responses", json=BODY)).json()["id"]
    reply = await keeping.http.post(f"/v1/responses/{name}/cancel")
    assert reply.status_code == 400 and "background: true" in reply.json()["error"]["message"]
    await check_unknown(keeping)


async def check_unknown(asked: Stack) -> None:
    for path in ("resp_none/cancel", "resp_none/input_items"):
        method = "POST" if path.endswith("cancel") else "GET"
        assert (await asked.http.request(method, f"/v1/responses/{path}")).status_code == 404


async def test_a_gateway_that_keeps_nothing_knows_no_response(stack: Stack) -> None:
    await check_unknown(stack)
    reply = await stack.http.post("/v1/responses", json={**BODY, "background": True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "background")


async def test_input_items_are_the_conversation_before_the_answer(keeping: Stack) -> None:
    client = keeping.openai
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "42"}
    said = [{"role": "user", "content": "hello"}, call, result]
    first = await client.responses.create(model=MODEL, input=said, temperature=0)  # type: ignore[arg-type]
    then = await client.responses.create(
        model=MODEL, input="and?", temperature=0, previous_response_id=first.id, max_output_tokens=3
    )
    listed = await client.responses.input_items.list(first.id, order="asc")
    assert [item.type for item in listed.data] == ["message", "function_call", "function_call_output"]
    assert listed.data[0].content[0].text == "hello"  # type: ignore[union-attr,index]
    paged = [item async for item in client.responses.input_items.list(then.id, limit=2)]
    assert len({item.id for item in paged}) == len(paged) == 5
    assert paged[0].content[0].text == "and?"  # type: ignore[union-attr,index]
    assert paged[1].role == "assistant"  # type: ignore[union-attr]
    for query in ("limit=0", "limit=x", "order=up", "after=msg_none"):
        reply = await keeping.http.get(f"/v1/responses/{then.id}/input_items?{query}")
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_an_operator_empties_the_prefix_caches(stack: Stack) -> None:
    reply = await stack.operator.post("/reset_prefix_cache")
    assert reply.json() == {"forgotten_blocks": {"worker-0": 7, "worker-1": 7}}
    page = await stack.operator.post("/reset_prefix_cache", headers={"origin": "http://evil.example"})
    assert page.status_code == 403 and (await stack.http.post("/reset_prefix_cache")).status_code == 404
    stack.workers[1].frozen = True
    reply = await stack.operator.post("/reset_prefix_cache")
    assert reply.status_code == 503 and "worker-1" in reply.json()["error"]["message"]


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
        assert await reading[0] is True and await transcript.read(late.send, late.gone()) is True
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


ITEMS = [{"role": "user", "content": "Hello"}]
DAY_S = 86_400.0


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[ResponseStore]:
    made = ResponseStore(tmp_path / "responses.db", most_bytes=1000, most_days=2, now_s=clock)
    yield made
    made.close()


async def names_in(store: ResponseStore, key: str, names: list[str]) -> list[str]:
    found = []
    for name in names:
        try:
            await store.find(key, name)
        except HttpError as error:
            assert error.status == 404
        else:
            found.append(name)
    return found


async def test_each_key_finds_its_own(store: ResponseStore) -> None:
    store.put("mine", "resp_1", b'{"a":1}', ITEMS)
    store.put("theirs", "resp_1", b'{"b":2}', [])
    found = await store.find("mine", "resp_1")
    assert (found.body, found.items) == (b'{"a":1}', ITEMS)
    await store.delete("mine", "resp_1")
    assert await names_in(store, "mine", ["resp_1"]) == []
    with pytest.raises(HttpError, match="no response 'resp_1'"):
        await store.delete("mine", "resp_1")
    assert (await store.find("theirs", "resp_1")).body == b'{"b":2}'


async def test_the_oldest_of_a_key_leave(store: ResponseStore, clock: Clock) -> None:
    """Another key's responses stay, and a response larger than the bound is not stored."""
    store.put("theirs", "old", b"x" * 900, [])
    names = [f"resp_{number}" for number in range(6)]
    for name in names:
        clock.now_s += 1
        store.put("mine", name, b"x" * 298, [])
    assert await names_in(store, "mine", names) == names[-3:]
    clock.now_s += 1
    store.put("mine", "large", b"x" * 5000, [])
    assert await names_in(store, "mine", ["large"]) == []
    assert await names_in(store, "theirs", ["old"]) == ["old"]


async def test_two_gateways_share_a_file_that_nobody_else_reads(tmp_path: Path, store: ResponseStore) -> None:
    """And it outlives both."""
    path = tmp_path / "responses.db"
    other = ResponseStore(path, most_bytes=1000, most_days=1e6)
    store.put("mine", "resp_1", b"{}", ITEMS)
    await store.find("mine", "resp_1")
    assert (await other.find("mine", "resp_1")).items == ITEMS
    other.close()
    assert path.stat().st_mode & 0o077 == 0
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT count(*) FROM responses").fetchone() == (1,)


def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database " * 100)
    for path in (tmp_path / "nowhere" / "responses.db", tmp_path / "text"):
        with pytest.raises(ConfigError, match=r"cannot be used.*without gateway\.stored_responses"):
            ResponseStore(path, most_bytes=1, most_days=1)


async def test_nothing_grows_older_than_it_may(store: ResponseStore, clock: Clock) -> None:
    store.put("mine", "old", b"{}", [])
    clock.now_s += DAY_S
    store.put("mine", "young", b"{}", [])
    assert await names_in(store, "mine", ["old", "young"]) == ["old", "young"]
    clock.now_s += 1.5 * DAY_S
    assert await names_in(store, "mine", ["old", "young"]) == ["young"]
