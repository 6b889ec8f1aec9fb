"""Listeners, bodies, ids, keys, one error format and one log line: the layers around an application."""

import asyncio
import hashlib
import json
import logging
import socket
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

import httpx
import orjson
import pytest
import pytest_asyncio
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from starlette.types import Message, Receive, Scope, Send

from services.gateway.config import GatewayConfig
from services.gateway.counters import Counters
from services.gateway.errors import HttpError, UnsupportedFeature, body_of, error_response, status_of
from services.gateway.http import reading as bodies
from services.gateway.http.browser import GETS, POSTS
from services.gateway.http.connection import bind
from services.gateway.http.middleware import RECORD, Edge
from services.gateway.http.reading import BodyReader, inflated
from services.gateway.openai.replies import DONE
from services.gateway.openai.schemas import MAX_ENTRIES, MAX_VALUES, parse_object
from services.gateway.text.tokenizer import TokenizerThreads
from shared.errors import (
    BusUnavailable,
    ConfigError,
    ContextOverflow,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KvasirError,
    MessageTooLarge,
    NoResponder,
    NotLeader,
    Overloaded,
    StaleEpoch,
    Unauthorized,
    UnknownModel,
)
from shared.messages.sequence import NOBODY
from tests.patience import until
from tests.services.gateway.conftest import MakeStack, Stack
from tests.services.gateway.fakes import MODEL

KEY = "sk-edge"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers, fails, or fails after it has begun."""
    if scope["path"] == "/fails":
        raise ZeroDivisionError("a secret detail")
    if scope["path"] in ("/ready", "/away"):
        raise NoResponder("no worker yet")
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/breaks":
        raise ZeroDivisionError("too late")
    await send({"type": "http.response.body", "body": scope[RECORD].request_id.encode() + DONE})


@pytest_asyncio.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    edge = Edge(application, {digest(KEY): NOBODY}, Counters())
    transport = httpx.ASGITransport(edge)
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
        yield client


@pytest.mark.parametrize("theirs", [None, b"", b"x" * 65, b"a b", b"a\tb", b"kvasir.*.>", "é".encode()])
async def test_an_id_is_always_minted_and_an_unfit_one_is_not_echoed(
    client: httpx.AsyncClient, theirs: bytes | None
) -> None:
    headers = [] if theirs is None else [(b"x-request-id", theirs)]
    replies = [await client.get("/x", headers=headers) for _ in range(3)]
    assert len({reply.headers["x-kvasir-request-id"] for reply in replies}) == 3
    for reply in replies:
        assert reply.headers["x-request-id"] == reply.headers["x-kvasir-request-id"]
        assert reply.text.startswith(reply.headers["x-kvasir-request-id"])


@pytest.mark.parametrize("theirs", ["xyz", "A-Z_0.9", "x" * 64])
async def test_a_clients_id_is_echoed_and_used_for_no_more(client: httpx.AsyncClient, theirs: str) -> None:
    reply = await client.get("/x", headers={"x-request-id": theirs})
    assert reply.headers["x-request-id"] == theirs and theirs not in reply.text


async def test_an_unforeseen_error_is_logged_and_not_shown(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kvasir"):
        reply = await client.get("/fails")
    assert reply.status_code == 500 and reply.json()["error"]["code"] == "internal_error"
    assert "secret" not in reply.text and "a secret detail" in caplog.text


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        *(f"Bearer {key}" for key in ("", "sk-other", "sk-Edge", digest(KEY))),
        KEY,
        f"Basic {KEY}",
    ],
)
async def test_no_key_no_entry(client: httpx.AsyncClient, authorization: str | None) -> None:
    client.headers.pop("authorization")
    headers = {} if authorization is None else {"authorization": authorization}
    for path in ("/x", "/health/", "/v1/models", "//health"):
        reply = await client.get(path, headers=headers)
        assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"]["code"] == "invalid_api_key"
    assert (await client.get("/health", headers=headers)).status_code == 200


async def test_two_keys_are_no_key(client: httpx.AsyncClient) -> None:
    """The last one used to count, where a proxy in front may have checked the first."""
    client.headers.pop("authorization")
    both = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")]
    for headers in (both, both[::-1], both[:1] * 2):
        reply = await client.get("/x", headers=headers)
        assert reply.status_code == 400 and "send one" in reply.json()["error"]["message"]
    assert (await client.get("/x", headers=both[:1])).status_code == 200


async def test_one_line_per_request(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with caplog.at_level(logging.INFO, logger="kvasir"):
        reply = await client.get("/v1/models", headers={"traceparent": trace, "x-request-id": "mine"})
    (line,) = [record for record in caplog.records if record.message == "request"]
    fields = line.__dict__["fields"]
    assert fields["request_id"] == reply.headers["x-kvasir-request-id"]
    assert fields["client_request_id"] == "mine"
    assert fields["trace_id"] == "0af7651916cd43dd8448eb211c80319c" and fields["status"] == 200
    assert fields["key"] == digest(KEY)[:8] and KEY not in str(fields)


@pytest.mark.parametrize(("path", "logged"), [("/ready", False), ("/away", True)])
async def test_a_probe_that_hears_not_yet_leaves_no_line_in_the_log(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, path: str, logged: bool
) -> None:
    """The stack's supervisor asks twenty times a second while it starts."""
    with caplog.at_level(logging.INFO, logger="kvasir"):
        assert (await client.get(path)).status_code == 503
    assert any(record.getMessage() == "request" for record in caplog.records) == logged


@pytest.mark.parametrize(
    ("error", "status", "type_name", "code"),
    [
        (InvalidRequest("m", param="n"), 400, "invalid_request_error", None),
        (UnsupportedFeature("m", param="n"), 400, "invalid_request_error", "unsupported_parameter"),
        (ContextOverflow("m", param="n"), 400, "invalid_request_error", "context_length_exceeded"),
        (UnknownModel("m", param="n"), 404, "invalid_request_error", "model_not_found"),
        (Unauthorized("m"), 401, "invalid_request_error", "invalid_api_key"),
        (MessageTooLarge("m"), 413, "invalid_request_error", "message_too_large"),
        (HttpError(405, "m", error_code="x"), 405, "invalid_request_error", "x"),
        (Overloaded("m"), 429, "rate_limit_error", "overloaded"),
        (DeadlineExceeded("m"), 504, "server_error", "deadline_exceeded"),
        (NoResponder("m"), 503, "server_error", "no_responder"),
        (BusUnavailable("m"), 503, "server_error", "bus_unavailable"),
        (NotLeader("m"), 503, "server_error", "not_leader"),
        (StaleEpoch("m"), 500, "server_error", "stale_epoch"),
        (InternalError("m"), 500, "server_error", "internal_error"),
        (KvasirError("m"), 500, "server_error", "kvasir_error"),
    ],
)
def test_status_type_and_code(error: KvasirError, status: int, type_name: str, code: str | None) -> None:
    assert status_of(error) == (status, type_name)
    reply = error_response(error)
    assert reply.status_code == status
    shown = json.loads(bytes(reply.body))
    assert shown == body_of(error) and shown["error"]["type"] == type_name
    assert shown["error"]["code"] == code and shown["error"]["param"] == error.param
    assert (shown["error"]["message"] == "m") == (status != 500), "our own faults stay in the log"
    assert ("retry-after" in reply.headers) == (status in (429, 503))


@pytest.mark.parametrize(("given", "said"), [(None, "1"), (0.1, "1"), (2.0, "2"), (2.1, "3"), (60.0, "60")])
def test_retry_after_is_in_whole_seconds(given: float | None, said: str) -> None:
    assert error_response(Overloaded("m", retry_after_s=given)).headers["retry-after"] == said


def test_a_body_that_was_not_read_closes_the_connection() -> None:
    reply = error_response(HttpError(413, "m", error_code="x", closes=True), {"allow": "POST"})
    assert reply.headers["connection"] == "close" and reply.headers["allow"] == "POST"
    assert error_response(Unauthorized("m")).headers["www-authenticate"] == "Bearer"


def arriving(parts: Iterable[bytes], *, ends: bool = True, gone: bool = False) -> Receive:
    """A `receive` that gives the parts, then the end, a disconnect, or nothing."""
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if gone:
        messages.append({"type": "http.disconnect"})
    elif ends:
        messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    return receive


async def read(
    receive: Receive, length: str | None = None, encoding: str | None = None, most_bytes: int = 10
) -> bytes:
    found = {b"content-length": length, b"content-encoding": encoding}
    headers = [(name, value.encode()) for name, value in found.items() if value is not None]
    threads = TokenizerThreads(1, 4)
    try:
        config = GatewayConfig.model_validate({"max_body_bytes": most_bytes, "receive_timeout_s": 0.1})
        return await BodyReader(config, threads).read(Request({"type": "http", "headers": headers}, receive))
    finally:
        threads.close()


@pytest.mark.parametrize("length", [None, "nonsense", "-5"])
async def test_over_the_cap_is_413_after_the_client_has_said_it_all(length: str | None) -> None:
    with pytest.raises(HttpError) as caught:
        await read(arriving([b"x" * 6, b"x" * 5]), length)
    assert (caught.value.status, caught.value.closes) == (413, True)


async def test_what_is_announced_as_too_large_is_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HttpError) as caught:
        await read(arriving([], ends=False), "11")
    assert caught.value.status == 413
    monkeypatch.setattr(bodies, "MAX_DISCARDED_BYTES", 100)
    with pytest.raises(HttpError) as caught:
        await read(arriving([b"x" * 60] * 2, ends=False))
    assert caught.value.status == 413


async def test_large_bodies_on_their_way_share_a_room() -> None:
    """A third waits until one of two has come, or is refused; a small one passes. The room is given back."""
    config = GatewayConfig.model_validate({"max_body_bytes": 1_000_000, "receive_timeout_s": 1.0})
    threads = TokenizerThreads(1, 4)
    reader = BodyReader(config, threads, room_bytes=2_000_000)

    def ask(receive: Receive, length: int) -> asyncio.Task[bytes]:
        headers = [(b"content-length", b"%d" % length)]
        return asyncio.create_task(reader.read(Request({"type": "http", "headers": headers}, receive)))

    whole = b"x" * 1_000_000
    late = [ask(arriving([whole[:9]], ends=False), len(whole)) for _ in range(2)]
    await asyncio.sleep(0)
    assert await ask(arriving([b"{}"]), 2) == b"{}"
    began_s = time.monotonic()
    with pytest.raises(HttpError, match="too many large request bodies"):
        await ask(arriving([whole]), len(whole))
    assert time.monotonic() - began_s > 0.4
    await asyncio.sleep(0.2)
    waiting = ask(arriving([whole]), len(whole))  # the two are past their deadline before this one is
    assert await waiting == whole
    for task in late:
        with pytest.raises(HttpError, match="did not arrive within"):
            await task
    assert await asyncio.gather(*(ask(arriving([whole]), len(whole)) for _ in range(4))) == [whole] * 4
    threads.close()


def packed(content: bytes, bits: int) -> bytes:
    packing = zlib.compressobj(wbits=bits)
    return packing.compress(content) + packing.flush()


GZIP, ZLIB, RAW = 31, 15, -15


@pytest.mark.parametrize(
    ("encoding", "bits"), [("gzip", GZIP), (" X-GZIP", GZIP), ("deflate", ZLIB), ("deflate", RAW)]
)
async def test_a_packed_body_is_inflated_up_to_the_cap(encoding: str, bits: int) -> None:
    """A body in gzip was refused for its UTF-8; and a megabyte of zeros is a kilobyte in it."""
    for content in (b"", b'{"a": "b"}'):
        assert await read(arriving([packed(content, bits)]), encoding=encoding, most_bytes=40) == content
    with pytest.raises(HttpError, match="inflated") as caught:
        await read(arriving([packed(b"{" * 999, bits)]), encoding=encoding, most_bytes=40)
    assert (caught.value.status, caught.value.closes) == (413, False)


async def test_a_body_of_several_members_is_read_up_to_the_cap() -> None:
    """As `cat a.gz b.gz`, pigz and bgzip write them."""
    members = [packed(content, GZIP) for content in (b'{"a": ', b"", b"1" * 9, b"}")]
    assert await read(arriving([b"".join(members)]), encoding="gzip", most_bytes=300) == b'{"a": 111111111}'
    with pytest.raises(HttpError, match="inflated"):
        inflated(packed(b"x" * 9, GZIP) * 100, 500)
    began_s = time.process_time()
    assert inflated(packed(b"", GZIP) * 100_000, 10) == b""
    assert time.process_time() - began_s < 5, "the rest is not copied at the end of each member"


def test_of_a_bomb_no_more_than_the_cap_is_made() -> None:
    bomb = packed(bytes(64 * 1024 * 1024), GZIP)
    tracemalloc.start()
    with pytest.raises(HttpError, match="longer than 1000 bytes"):
        inflated(bomb, 1000)
    assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (packed(b"{}", GZIP)[:-3], "cut off"),
        (packed(b"{}", GZIP) + b"x", "more after its end"),
        (packed(b"{}", ZLIB) * 2, "more after its end"),
        (packed(b"{}", GZIP) + packed(b"{}", GZIP)[:-3], "cut off"),
        (b"no gzip", "cannot be inflated"),
        (b"", "cut off"),
    ],
)
def test_what_cannot_be_inflated(body: bytes, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        inflated(body, 1000)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x" * 500])
async def test_other_encodings_are_415(encoding: str) -> None:
    with pytest.raises(HttpError, match="gzip or deflate") as caught:
        await read(arriving([b"{}"]), encoding=encoding)
    assert caught.value.status == 415 and len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"5", b"null", b'"x"', b'{"a": "\xe9"}', b'{"a": "\\ud800"}', b"{'a': 1}", b"\xff"],
)
def test_anything_else(content: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_object(content)


def test_entries_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million empty lists are four megabytes, and half a second in which no stream gets a token."""

    def parse(content: bytes) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(orjson, "loads", parse)
    for content in (
        b'{"a": [' + b"[]," * MAX_ENTRIES + b"1]}",
        b'{"a": {' + b'"b" :0,' * MAX_ENTRIES + b'"c": 0}}',
        b'{"messages": [' + b'{"role":"user","content":""},' * (MAX_ENTRIES // 2) + b"{}]}",
        b'{"a": "\\\\", "b": [' + b'"\\"",[],' * MAX_ENTRIES + b"1]}",
    ):
        with pytest.raises(InvalidRequest, match=f"more than {MAX_ENTRIES} objects, lists and named fields"):
            parse_object(content)


def test_plain_values_are_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two million numbers are four megabytes as well, and 0.7 s in which no stream got a token."""
    most = b'{"a": [' + b"1," * MAX_VALUES
    assert len(parse_object(most + b"1]}")["a"]) == MAX_VALUES + 1
    monkeypatch.setattr(orjson, "loads", None)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_VALUES} values"):
        parse_object(most + b"1,1]}")


def test_what_is_in_texts_is_no_entry() -> None:
    text = "{[:, " * MAX_VALUES
    for whole in (text, f'"{text}', f"\\{text}", f'\\"{text}\\'):
        assert parse_object(orjson.dumps({"prompt": whole, "n": 1})) == {"prompt": whole, "n": 1}
    tokens = list(range(8 * MAX_ENTRIES))
    assert parse_object(orjson.dumps({"prompt": tokens})) == {"prompt": tokens}


@given(
    st.recursive(
        st.text('\\"{[:]},a'), lambda deeper: st.lists(deeper) | st.dictionaries(st.text('\\":'), deeper)
    )
)
def test_entries_are_counted_exactly(content: Any) -> None:
    def entries(part: Any) -> int:
        if isinstance(part, dict):
            return 1 + len(part) + sum(map(entries, part.values()))
        return 1 + sum(map(entries, part)) if isinstance(part, list) else 0

    whole = {"a": content}
    count = entries(whole)
    assert parse_object(orjson.dumps(whole), count) == whole
    with pytest.raises(InvalidRequest, match="send fewer"):
        parse_object(orjson.dumps(whole), count - 1)


def test_a_port_in_use_is_a_configuration_error_that_names_the_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on .* set another operator_port") as caught:
            bind("127.0.0.1", taken.getsockname()[1], "operator_port")
    assert caught.value.param == "operator_port"


async def test_clients_who_take_every_connection_do_not_shut_the_operator_out(make_stack: MakeStack) -> None:
    """Health and metrics are asked for when something is wrong, and then the clients' listener is full."""
    stack = await make_stack(max_connections=4, receive_timeout_s=30.0)
    stack.hold()
    await stack.http.aclose()
    async with stack.openai:
        ask = stack.openai.completions.create
        requests = [asyncio.create_task(ask(model=MODEL, prompt="hello", max_tokens=1)) for _ in range(4)]
        await until(lambda: len(stack.scheduler.submits) == 4)
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        writer.close()
        await writer.wait_closed()
        assert (await stack.operator.get("/health")).json() == {"status": "ok"}
        assert (await stack.operator.get("/ready")).json() == {"status": "ready"}
        assert b"kvasir_gateway_active_sequences" in (await stack.operator.get("/metrics")).content
        stack.hold(is_held=False)
        await asyncio.gather(*requests)


async def test_the_operators_listener_serves_nothing_else(make_stack: MakeStack) -> None:
    stack = await make_stack()
    assert (await stack.operator.get("/v1/models")).status_code == 401
    reply = await stack.operator.get("/v1/models", headers=stack.http.headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_url")


PAGE = "https://app.example"


async def test_pages_of_known_origins_may_call(make_stack: MakeStack) -> None:
    stack = await make_stack(cors_origins=(PAGE,))
    asks = {"origin": PAGE, "access-control-request-method": "POST"}
    asks["access-control-request-headers"] = "authorization,content-type"
    preflight = await stack.http.options("/v1/chat/completions", headers={**asks, "authorization": ""})
    assert preflight.status_code == 200, "a preflight carries no key"
    assert preflight.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    body = {**stack.body, "stream": True, "max_tokens": 4}
    for origin, expected in ((PAGE, PAGE), ("https://evil.example", None), (None, None)):
        headers = {} if origin is None else {"origin": origin}
        reply = await stack.http.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200 and reply.headers.get("access-control-allow-origin") == expected
    refused = await stack.http.get("/v1/models", headers={"origin": PAGE, "authorization": "Bearer no"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/v1/models", "/openapi.json", "/version"])
async def test_head_is_get_without_a_body(stack: Stack, path: str) -> None:
    got, head = await stack.http.get(path), await stack.http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
    assert head.headers["content-length"] == got.headers["content-length"]


async def test_the_description_describes(stack: Stack) -> None:
    described = (await stack.http.get("/openapi.json")).json()
    assert set(described["paths"]) == {*POSTS, *GETS, "/v1/responses/{name}/cancel"}
    for path, operations in described["paths"].items():
        for method in operations:
            reply = await stack.http.request(method, path.replace("{model}", MODEL), json={})
            is_there = reply.status_code not in (404, 405) or "no response" in reply.text
            assert is_there, path
    for name, schema in described["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema), name
    chat = {**described["components"]["schemas"]["ChatRequest"], "components": described["components"]}
    validator = Draft202012Validator(chat)
    assert validator.is_valid({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stop": "a"})
    assert not validator.is_valid({"model": MODEL, "messages": [{"role": "bot", "content": "x"}]})
    page = (await stack.http.get("/docs")).text
    assert "/v1/chat/completions" in page and "logit_bias" in page
