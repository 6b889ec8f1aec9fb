"""The outermost ASGI layer: request ids, keys, and one error format for whatever goes wrong inside.

Everything needs a key that is not open on purpose. One canonical log line per request. Knows no routes.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.counters import Counters
from services.gateway.errors import HttpError, ShuttingDown, error_response
from services.gateway.http.request_log import RequestRecord, echoed_id
from services.gateway.protocol import ENGAGE
from shared import log
from shared.bus import tracing
from shared.clock import monotonic_s
from shared.errors import InternalError, KvasirError, Unauthorized, UnavailableError

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes: no key needed, nothing secret in the answer."""
OPERATOR_PATHS = OPEN_PATHS | {"/metrics"}
"""The same on the operator's listener."""


class KeyRing:
    """The accepted keys. Without any, nobody gets in."""

    def __init__(self, key_sha256: Sequence[str]) -> None:
        self._hashes = tuple(key_sha256)

    def check(self, authorization: str | None) -> str:
        """The digest, in hex, of the key in `Authorization: Bearer …`. Raises Unauthorized."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("no API key: send it in a header, as in 'Authorization: Bearer sk-…'")
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        matches = [hmac.compare_digest(digest, known) for known in self._hashes]
        if not any(matches):
            raise Unauthorized("Incorrect API key provided.")
        return digest


_logger = log.get_logger("gateway.request")
RECORD = "kvasir.record"
"""Where routes find the `RequestRecord` in the ASGI scope."""
CLIENT_GONE_STATUS = 499
LABELLED = ("/v1/", "/tokenize", "/detokenize")
"""Paths that metrics tell apart, unless they turn out to lead nowhere."""


class Edge:
    """Wraps the application."""

    def __init__(
        self, app: ASGIApp, keys: KeyRing, counters: Counters, open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._keys = keys
        self._counters = counters
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        record = RequestRecord(scope["method"], scope["path"], echoed_id(headers.get("x-request-id")))
        trace = tracing.attach(headers)
        record.trace_id = tracing.trace_id()
        scope[RECORD] = record
        try:
            await self._serve(scope, receive, _stamped(record, send))
        finally:
            tracing.detach(trace)
            self._log(record)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope[RECORD]
        try:
            if scope["path"] not in self._open_paths:
                record.tenant = self._keys.check(_authorization(scope))
                if ENGAGE in scope:
                    scope[ENGAGE]()
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if record.status is None:
                await error_response(ShuttingDown())(scope, receive, send)
            raise
        except Exception as error:
            record.error = error
            if not isinstance(error, KvasirError):
                _logger.exception("a request ended in an unforeseen error")
            if record.status is None:
                known = error if isinstance(error, KvasirError) else InternalError(str(error))
                await error_response(known)(scope, receive, send)

    def _log(self, record: RequestRecord) -> None:
        if record.is_gone:
            record.status = record.status or CLIENT_GONE_STATUS
            self._counters.disconnects.inc()
        is_named = record.path.startswith(LABELLED) and record.status not in (401, 404)
        route = record.path if is_named else "other"
        if record.path.startswith("/v1/models/"):
            route = "/v1/models/{id}"
        self._counters.requests.labels(route, str(record.status)).inc()
        # "Not ready yet" is an answer to a probe, which asks twenty times a second while a stack starts.
        is_probed = record.path in self._open_paths
        if not is_probed or not isinstance(record.error, UnavailableError | None):
            log.canonical(_logger, "request", **record.fields(monotonic_s()))


def _authorization(scope: Scope) -> str | None:
    """The one header of that name. Raises HttpError for two: a proxy may have looked at the other one."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) > 1:
        text = "there are several Authorization headers: send one"
        raise HttpError(400, text, error_code=HttpError.code)
    return values[0].decode("latin-1") if values else None


def _stamped(record: RequestRecord, send: Send) -> Send:
    """`send`, with the ids in the headers; notes the status."""

    async def stamped(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            ours = record.request_id
            shown = record.client_request_id or ours
            ids = [(b"x-request-id", shown.encode()), (b"x-kvasir-request-id", ours.encode())]
            message = {**message, "headers": [*message.get("headers", ()), *ids]}
        await send(message)

    return stamped
