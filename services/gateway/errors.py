"""Errors in OpenAI's format, `{"error": {message, type, param, code}}`, with their HTTP status."""

import math
from collections.abc import Mapping, Sequence

import orjson
from starlette.responses import Response

from shared.errors import (
    CallerError,
    ContextOverflow,
    DeadlineExceeded,
    InvalidRequest,
    KvasirError,
    MessageTooLarge,
    Overloaded,
    PolicyFailed,
    Unauthorized,
    UnavailableError,
    UnknownModel,
    WorkerKilled,
)


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def free_frames(error: BaseException) -> None:
    """Drop the error's traceback, cause and context. Their frames hold it, and all that the request holds."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


INVALID, RATE_LIMIT, SERVER = "invalid_request_error", "rate_limit_error", "server_error"
MAX_SHOWN_CHARS = 1000
"""Longest text in an error body or a log line, since clients can supply parts of it."""


class HttpError(CallerError):
    """A request refused at the HTTP level, with the given status."""

    code = "invalid_http_request"

    def __init__(self, status: int, message: str, *, error_code: str, closes: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.error_code = error_code
        self.closes = closes
        """The rest of the body is not read, so the connection must close."""


class ShuttingDown(UnavailableError):
    """The process ends before the answer does."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the server is shutting down: send the request again", retry_after_s=2.0)


class UnsupportedFeature(InvalidRequest):
    """The request needs a feature that this server does not have; `param` names it."""

    code = "unsupported_parameter"


_KINDS: tuple[tuple[type[KvasirError], int, str], ...] = (
    (UnknownModel, 404, INVALID),
    (InvalidRequest, 400, INVALID),
    (Unauthorized, 401, INVALID),
    (MessageTooLarge, 413, INVALID),
    (Overloaded, 429, RATE_LIMIT),
    (DeadlineExceeded, 504, SERVER),
    (UnavailableError, 503, SERVER),
    (PolicyFailed, 503, SERVER),
)


def status_of(error: KvasirError) -> tuple[int, str]:
    """Return the HTTP status and OpenAI error type; 500 for internal errors."""
    if isinstance(error, HttpError):
        return error.status, {429: RATE_LIMIT, 503: SERVER}.get(error.status, INVALID)
    for kind, status, type_name in _KINDS:
        if isinstance(error, kind):
            return status, type_name
    return 500, SERVER


def shown(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    """Return `text`, cut to `limit` characters. Use it for text from clients."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def unknown_model(name: str, served: Sequence[str]) -> UnknownModel:
    known = ", ".join(map(repr, served))
    return UnknownModel(f"the model {shown(name, 100)!r} does not exist; there is {known}", param="model")


def code_of(error: KvasirError) -> str | None:
    """Return a stable code that clients can act on, or None."""
    if isinstance(error, HttpError):
        return error.error_code
    if type(error) is InvalidRequest:
        return None
    return ContextOverflow.code if isinstance(error, ContextOverflow) else error.code


def body_of(error: KvasirError) -> dict[str, dict[str, str | None]]:
    """Return the error object. The text of internal errors stays in the log."""
    status, type_name = status_of(error)
    is_told = status != 500 or isinstance(error, WorkerKilled)
    message = error.message if is_told else "the server failed to answer; its log has the reason"
    param = None if error.param is None else shown(error.param, 200)
    return {"error": {"message": shown(message), "type": type_name, "param": param, "code": code_of(error)}}


def headers_of(error: KvasirError) -> dict[str, str]:
    """Return Retry-After (whole seconds) if a retry helps, and Connection: close if the body was not read."""
    status, _ = status_of(error)
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if isinstance(error, PolicyFailed):
        headers = {"x-should-retry": "false"}  # client libraries would retry and hide the reason
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, HttpError) and error.closes:
        headers["connection"] = "close"
    return headers


def error_response(
    error: KvasirError, headers: Mapping[str, str] | None = None, body: Mapping[str, object] | None = None
) -> Response:
    """Return the error response; `body` replaces OpenAI's format."""
    return Response(
        orjson.dumps(body if body is not None else body_of(error)),
        status_code=status_of(error)[0],
        headers=headers_of(error) | dict(headers or {}),
        media_type="application/json",
    )
