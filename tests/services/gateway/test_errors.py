"""Every error of the tree as a client sees it."""

import json

import pytest

from services.gateway.errors import HttpError, UnsupportedFeature, body_of, error_response, status_of
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
