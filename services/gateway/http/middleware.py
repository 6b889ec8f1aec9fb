"""Outermost ASGI layer: request ids, API keys, error responses, and one log line per request.

Every path needs a key unless it is listed as open.
"""

import asyncio
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.anthropic.replies import error_body
from services.gateway.core.quotas import Quotas
from services.gateway.counters import Counters
from services.gateway.errors import HttpError, ShuttingDown, error_response, shown
from services.gateway.http import request_span
from services.gateway.http.connection import ENGAGE
from services.gateway.openai.admission import AdmittedRequest
from services.gateway.text.choice_text import ChoiceText
from services.gateway.vllm_metrics import ModelFigures
from shared import log, spans
from shared.bus import tracing
from shared.clock import monotonic_s
from shared.errors import InternalError, KvasirError, Unauthorized, UnavailableError
from shared.messages.sequence import NOBODY, Sampling, Tenant
from shared.recorder import Recorder

_ECHOED = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def new_request_id() -> str:
    """Return an id of 128 random bits. A client's own id is only echoed."""
    return f"req_{secrets.token_hex(16)}"


def echoed_id(client_id: str | None) -> str | None:
    """Return the client's X-Request-Id if it is safe to send back."""
    return client_id if client_id is not None and _ECHOED.fullmatch(client_id) else None


@dataclass
class RequestRecord:
    """Data about one request, logged at its end."""

    method: str
    path: str
    client_request_id: str | None = None
    request_id: str = field(default_factory=new_request_id)
    began_s: float = field(default_factory=monotonic_s)
    accepted_s: float | None = None
    """Time at which the request was complete and valid."""
    first_token_s: float | None = None
    """Seconds from `accepted_s` to the first token."""
    tenant: str = ""
    """Digest of the request's key."""
    owner: Tenant = NOBODY
    """Tenant that holds the key."""
    trace_id: str | None = None
    is_lasting: bool = False
    """The answer outlives this request and is counted when it ends."""
    status: int | None = None
    error: BaseException | None = None
    is_gone: bool = False
    stream: bool | None = None
    prompt_tokens: int | None = None
    ignored: Sequence[str] = ()
    """Names of request fields that had no effect."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    model: str = ""
    """Model name in the request."""
    figures: ModelFigures | None = None
    """Metrics of that model."""
    sampling: Sampling | None = None
    """Sampling of the first choice."""
    choices: int = 1
    most_tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    handovers: dict[str, int] = field(default_factory=dict)

    def note_accepted(self, job: AdmittedRequest) -> None:
        """Record the parameters of a valid, tokenized request."""
        self.accepted_s = monotonic_s()
        self.stream = job.stream
        self.prompt_tokens = job.prompt_tokens
        self.choices = job.n * len(job.prompts)
        self.sampling = next(iter(job.samplings), None)
        self.most_tokens = max((sampling.max_tokens for sampling in job.samplings), default=0)
        self.ignored = job.ignored

    def note_answers(self, answers: Sequence[ChoiceText]) -> None:
        """Record the token counts and finish reasons of ended answers."""
        self.completion_tokens = sum(answer.completion_tokens for answer in answers)
        self.cached_tokens = sum(answer.stream.cached_tokens for answer in answers)
        for answer in answers:
            reason = str(answer.finish_reason or answer.stream.phase)
            self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1
            for cause, count in answer.stream.handovers.items():
                self.handovers[cause] = self.handovers.get(cause, 0) + count

    def count(self, took_s: float) -> None:
        """Update the model's metrics; `took_s` counts from acceptance."""
        if self.figures is not None:
            self.figures.on_request(
                took_s=took_s,
                first_token_s=self.first_token_s,
                prompt_tokens=self.prompt_tokens or 0,
                output_tokens=self.completion_tokens or 0,
                cached_tokens=self.cached_tokens or 0,
                choices=self.choices,
                most_tokens=self.most_tokens,
                reasons=[reason for reason, count in self.finish_reasons.items() for _ in range(count)],
            )

    def account(self, now_s: float) -> dict[str, object]:
        """Return the flight recorder's fields; times are seconds before `now_s`."""
        accepted_s = self.began_s if self.accepted_s is None else self.accepted_s
        return {
            "took_s": now_s - self.began_s,
            "since_accepted_s": now_s - accepted_s,
            "first_token_s": self.first_token_s,
            "status": self.status,
            "key": self.tenant[:8],
            "stream": bool(self.stream),
            "prompt_tokens": self.prompt_tokens or 0,
            "completion_tokens": self.completion_tokens or 0,
            "cached_tokens": self.cached_tokens or 0,
            "client_gone": self.is_gone,
        }

    def fields(self, now_s: float) -> dict[str, object]:
        """Return the fields of the log line; None means unknown."""
        code = self.error.code if isinstance(self.error, KvasirError) else None
        return {
            "request_id": self.request_id,
            "client_request_id": self.client_request_id,
            "trace_id": self.trace_id,
            "method": self.method,
            "path": shown(self.path, 256),
            "status": self.status,
            "key": self.tenant[:8] or None,
            "tenant": self.owner.name or None,
            "duration_s": round(now_s - self.began_s, 6),
            "first_token_s": None if self.first_token_s is None else round(self.first_token_s, 6),
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens or None,
            "finish_reasons": self.finish_reasons or None,
            "handovers": self.handovers or None,
            "ignored": list(self.ignored[:10]) or None,
            "error": code or (type(self.error).__name__ if self.error else None),
            "error_text": shown(str(self.error)) if self.error else None,
            "wait_s": getattr(self.error, "retry_after_s", None),
            "client_gone": self.is_gone or None,
        }


OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/openapi.json", "/docs"})
"""Paths that need no key: probes and the API description."""
OPERATOR_PATHS = OPEN_PATHS | {"/metrics", "/reset_prefix_cache"}
"""The same for the operator's listener."""


class KeyRing:
    """The accepted keys. An empty ring accepts none."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        """`tenants` maps key digests to tenants."""
        self._tenants = dict(tenants)

    def __len__(self) -> int:
        return len(self._tenants)

    def replace(self, tenants: Mapping[str, Tenant]) -> None:
        """Replace the keys; running requests continue."""
        self._tenants = dict(tenants)

    def owner(self, digest: str) -> Tenant:
        """Return the tenant of a digest that `check` returned. Raises KeyError for others."""
        return self._tenants[digest]

    def check(self, authorization: str | None) -> str:
        """Return the hex digest of the key in `Authorization: Bearer …`. Raises Unauthorized."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise Unauthorized("no API key: send it in a header, as in 'Authorization: Bearer sk-…'")
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        matches = [hmac.compare_digest(digest, known) for known in self._tenants]
        if not any(matches):
            raise Unauthorized("Incorrect API key provided.")
        return digest


_logger = log.get_logger("gateway.request")
IGNORED_HEADER = b"x-kvasir-ignored"
"""Lists request fields that had no effect."""
RECORD = "kvasir.record"
"""Key of the `RequestRecord` in the ASGI scope."""
CLIENT_GONE_STATUS = 499
COUNTED = ("/v1/", "/tokenize", "/detokenize")
"""POST paths that count against a key's quota."""
LABELLED = ("/v1/", "/tokenize", "/detokenize")
"""Paths that get their own metric label, unless the answer is 401 or 404."""


MESSAGES = "/v1/messages"
"""Anthropic's API has its own error format and key header."""


def refusal(error: KvasirError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the error response in the format of the path's API."""
    return error_response(error, headers, error_body(error) if path.startswith(MESSAGES) else None)


class Edge:
    """ASGI middleware around the application."""

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        counters: Counters,
        open_paths: frozenset[str] = OPEN_PATHS,
        open_below: str | None = None,
        recorder: Recorder | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        """`open_paths`, and paths below `open_below`, need no key. `quotas` limit use per key."""
        self._quotas = quotas
        self._app = app
        self._keys = keys
        self._counters = counters
        self._open_paths = open_paths
        self._open_below = open_below
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        record = RequestRecord(scope["method"], scope["path"], echoed_id(headers.get("x-request-id")))
        trace = tracing.attach(headers)
        span = request_span.begin(record) if spans.is_on() else None
        within = tracing.enter(span)
        record.trace_id = tracing.trace_id()
        scope[RECORD] = record
        try:
            await self._serve(scope, receive, _stamped(record, send))
        finally:
            tracing.detach(within)
            tracing.detach(trace)
            self._log(record)
            if span is not None:
                request_span.end(span, record)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        record: RequestRecord = scope[RECORD]
        try:
            if not self._is_open(scope["path"]):
                record.tenant = self._keys.check(_key(scope))
                record.owner = self._keys.owner(record.tenant)
                if ENGAGE in scope:
                    scope[ENGAGE]()
            with self._counted(scope):
                await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if record.status is None:
                await refusal(ShuttingDown(), scope["path"])(scope, receive, send)
            raise
        except Exception as error:
            record.error = error
            if not isinstance(error, KvasirError):
                _logger.exception("a request ended in an unforeseen error")
            if record.status is None:
                known = error if isinstance(error, KvasirError) else InternalError(str(error))
                await refusal(known, scope["path"])(scope, receive, send)

    @contextmanager
    def _counted(self, scope: Scope) -> Iterator[None]:
        """Count the request against the key's quota. Raises RateLimited at the limit."""
        record: RequestRecord = scope[RECORD]
        quotas = self._quotas
        if quotas is None or scope["method"] != "POST" or not scope["path"].startswith(COUNTED):
            yield
            return
        quotas.begin(record.tenant, monotonic_s())
        try:
            yield
        finally:
            if not record.is_lasting:
                used = (record.prompt_tokens or 0) + (record.completion_tokens or 0)
                quotas.end(record.tenant, used, monotonic_s())

    def _is_open(self, path: str) -> bool:
        below = self._open_below
        return path in self._open_paths or (below is not None and path.startswith(below))

    def _log(self, record: RequestRecord) -> None:
        if record.is_gone:
            record.status = record.status or CLIENT_GONE_STATUS
            self._counters.disconnects.inc()
        is_named = record.path.startswith(LABELLED) and record.status not in (401, 404)
        route = record.path if is_named else "other"
        for below in ("/v1/models/", "/v1/responses/"):
            if record.path.startswith(below):
                route = f"{below}{{id}}"
        self._count(record, route)
        # Skip "not ready": probes ask twenty times a second while a stack starts.
        is_probed = self._is_open(record.path)
        if not is_probed or not isinstance(record.error, UnavailableError | None):
            now_s = monotonic_s()
            log.canonical(_logger, "request", **record.fields(now_s))
            if self._recorder is not None and record.accepted_s is not None:
                self._recorder.note("request", record.request_id, **record.account(now_s))

    def _count(self, record: RequestRecord, route: str) -> None:
        counters = self._counters
        counters.requests.labels(route, str(record.status)).inc()
        for name in record.ignored:
            counters.count_ignored(name)
        counters.prompt_tokens.inc(record.prompt_tokens or 0)
        counters.output_tokens.inc(record.completion_tokens or 0)
        if record.accepted_s is not None and record.completion_tokens is not None:
            counters.request_s.observe(monotonic_s() - record.accepted_s)
            record.count(monotonic_s() - record.accepted_s)
            if record.first_token_s is not None:
                counters.first_token_s.observe(record.first_token_s)


def _key(scope: Scope) -> str | None:
    """Return the `Authorization` value or `x-api-key`; the latter wins on Anthropic's API."""
    own = [f"Bearer {value.decode('latin-1')}" for name, value in scope["headers"] if name == b"x-api-key"]
    if own and scope["path"].startswith(MESSAGES):
        return own[0]
    authorization = _authorization(scope)
    return own[0] if own and authorization is None else authorization


def _authorization(scope: Scope) -> str | None:
    """Return the Authorization header. Raises HttpError for two: a proxy may have checked the other."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) > 1:
        text = "there are several Authorization headers: send one"
        raise HttpError(400, text, error_code=HttpError.code)
    return values[0].decode("latin-1") if values else None


def _stamped(record: RequestRecord, send: Send) -> Send:
    """Wrap `send` to add the ids as headers and note the status."""

    async def stamped(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            ours = record.request_id
            shown = record.client_request_id or ours
            ids = [(b"x-request-id", shown.encode()), (b"x-kvasir-request-id", ours.encode())]
            if record.ignored:
                ids.append((IGNORED_HEADER, ", ".join(map(quote, record.ignored)).encode()))
            message = {**message, "headers": [*message.get("headers", ()), *ids]}
        await send(message)

    return stamped
