"""Ids, keys, one error format, one log line: the outermost layer around an application that misbehaves."""

import hashlib
import json
import logging
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from starlette.types import Receive, Scope, Send

from services.gateway.counters import Counters
from services.gateway.errors import HttpError, UnsupportedFeature, body_of, error_response, status_of
from services.gateway.http.middleware import RECORD, Edge
from services.gateway.openai.replies import DONE
from shared.errors import (
    BusUnavailable,
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
async def test_a_clients_id_is_echoed_and_used_for_nothing_else(
    client: httpx.AsyncClient, theirs: str
) -> None:
    reply = await client.get("/x", headers={"x-request-id": theirs})
    assert reply.headers["x-request-id"] == theirs
    assert theirs not in reply.text


async def test_an_unforeseen_error_is_logged_and_not_shown(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="kvasir"):
        reply = await client.get("/fails")
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"
    assert "secret" not in reply.text
    assert "a secret detail" in caplog.text


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
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"]["code"] == "invalid_api_key"
    assert (await client.get("/health", headers=headers)).status_code == 200


async def test_two_keys_are_no_key(client: httpx.AsyncClient) -> None:
    """The last one used to count, where a proxy in front may have checked the first."""
    client.headers.pop("authorization")
    both = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")]
    for headers in (both, both[::-1], both[:1] * 2):
        reply = await client.get("/x", headers=headers)
        assert reply.status_code == 400
        assert "send one" in reply.json()["error"]["message"]
    assert (await client.get("/x", headers=both[:1])).status_code == 200


async def test_one_line_per_request(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with caplog.at_level(logging.INFO, logger="kvasir"):
        reply = await client.get("/v1/models", headers={"traceparent": trace, "x-request-id": "mine"})
    (line,) = [record for record in caplog.records if record.message == "request"]
    fields = line.__dict__["fields"]
    assert fields["request_id"] == reply.headers["x-kvasir-request-id"]
    assert fields["client_request_id"] == "mine"
    assert fields["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert fields["status"] == 200
    assert fields["key"] == digest(KEY)[:8]
    assert KEY not in str(fields)


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
    assert shown == body_of(error)
    assert shown["error"]["type"] == type_name
    assert shown["error"]["code"] == code
    assert shown["error"]["param"] == error.param
    assert (shown["error"]["message"] == "m") == (status != 500), "our own faults stay in the log"
    assert ("retry-after" in reply.headers) == (status in (429, 503))


@pytest.mark.parametrize(("given", "said"), [(None, "1"), (0.1, "1"), (2.0, "2"), (2.1, "3"), (60.0, "60")])
def test_retry_after_is_in_whole_seconds(given: float | None, said: str) -> None:
    assert error_response(Overloaded("m", retry_after_s=given)).headers["retry-after"] == said


def test_a_body_that_was_not_read_closes_the_connection() -> None:
    reply = error_response(HttpError(413, "m", error_code="x", closes=True), {"allow": "POST"})
    assert reply.headers["connection"] == "close"
    assert reply.headers["allow"] == "POST"
    assert error_response(Unauthorized("m")).headers["www-authenticate"] == "Bearer"
