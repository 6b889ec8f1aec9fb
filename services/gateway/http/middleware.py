"""Outermost ASGI layer: request ids, API keys, error responses, and one log line per request. Every path
needs a key unless it is listed as open."""

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any
from urllib.parse import quote

from opentelemetry.trace import Span, SpanKind
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.anthropic import error_body
from services.gateway.counters import Counters, EndedRequest, ModelFigures
from services.gateway.errors import ClientGone, HttpError, ShuttingDown, error_response, free_frames, shown
from services.gateway.http.connection import ENGAGE
from services.gateway.openai.admission import AdmittedRequest
from services.gateway.text.choice_text import ChoiceText
from shared import log, spans
from shared.bus import tracing
from shared.clock import monotonic_s
from shared.errors import InternalError, KvasirError, Unauthorized, UnavailableError
from shared.messages.sequence import NOBODY, Sampling, Tenant
from shared.recorder import Recorder

_ECHOED = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass
class RequestRecord:
    """Data about one request, logged at its end. None: not known yet."""

    method: str
    path: str
    request_id: str = ""
    client_request_id: str | None = None
    began_s: float = field(default_factory=monotonic_s)
    accepted_s: float | None = None
    """Time at which the request was complete and valid."""
    first_token_s: float | None = None
    """Seconds from `accepted_s` to the first token."""
    tenant: str = ""
    """Digest of the request's key."""
    owner: Tenant = NOBODY
    trace_id: str | None = None
    is_lasting: bool = False
    """The answer outlives this request and is counted when it ends."""
    status: int | None = None
    error: BaseException | None = None
    is_gone: bool = False
    stream: bool | None = None
    prompt_tokens: int | None = None
    ignored: Sequence[str] = ()
    completion_tokens: int | None = None
    cached_tokens: int = 0
    model: str = ""
    figures: ModelFigures | None = None
    sampling: Sampling | None = None
    choices: int = 1
    most_tokens: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    handovers: Counter[str] = field(default_factory=Counter)

    def note_accepted(self, job: AdmittedRequest) -> None:
        self.accepted_s = monotonic_s()
        self.stream = job.stream
        self.prompt_tokens = job.prompt_tokens
        self.choices = job.n * len(job.prompts)
        self.sampling = job.samplings[0] if job.samplings else None
        for sampling in job.samplings:
            self.most_tokens = max(self.most_tokens, sampling.max_tokens)
        self.ignored = job.ignored

    def note_answers(self, answers: Sequence[ChoiceText]) -> None:
        self.completion_tokens = 0
        for answer in answers:
            self.completion_tokens += answer.completion_tokens
            self.cached_tokens += answer.stream.cached_tokens
            self.finish_reasons[str(answer.finish_reason or answer.stream.phase)] += 1
            self.handovers.update(answer.stream.handovers)

    def count(self, figures: ModelFigures, took_s: float) -> None:
        """Update the model's metrics; `took_s` counts from acceptance."""
        output_tokens, choices = self.completion_tokens or 0, self.choices
        figures.request_s.observe(took_s)
        figures.prompt.observe(self.prompt_tokens or 0)
        figures.answer.observe(output_tokens)
        figures.each_answer.observe(output_tokens / max(1, choices))
        figures.choices.observe(choices)
        figures.most.observe(self.most_tokens)
        if self.first_token_s is not None:
            decode_s = took_s - self.first_token_s
            figures.ttft_s.observe(self.first_token_s)
            figures.decode_s.observe(decode_s)
            if output_tokens > choices:
                figures.token_s.observe(decode_s / (output_tokens / choices - 1))
        figures.cached_tokens += self.cached_tokens
        figures.reasons.update(self.finish_reasons)

    def ended(self, now_s: float) -> EndedRequest:
        """Return what the live page shows of it."""
        first_s, whole_s, token_s = self.first_token_s, None, None
        if self.accepted_s is not None and self.completion_tokens is not None:
            whole_s = now_s - self.accepted_s
            gaps = self.completion_tokens / self.choices - 1 if self.choices else 0.0
            token_s = (whole_s - first_s) / gaps if first_s is not None and gaps > 0 else None
        return EndedRequest(now_s, self.model, self.status or 0, first_s, token_s, whole_s)

    def fields(self, now_s: float) -> dict[str, object]:
        """Return the fields of the log line; None means unknown."""
        error = self.error
        code = error.code if isinstance(error, KvasirError) else type(error).__name__
        return {
            "request_id": self.request_id,
            "client_request_id": self.client_request_id,
            "trace_id": self.trace_id,
            "method": self.method,
            "path": self.path[:256],
            "status": self.status,
            "key": self.tenant[:8] or None,
            "tenant": self.owner.name or None,
            "duration_s": round(now_s - self.began_s, 6),
            "first_token_s": None if self.first_token_s is None else round(self.first_token_s, 6),
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens or None,
            "finish_reasons": dict(self.finish_reasons) or None,
            "handovers": dict(self.handovers) or None,
            "ignored": list(self.ignored[:10]) or None,
            "error": None if error is None else code,
            "error_text": None if error is None else shown(str(error)),
            "wait_s": getattr(error, "retry_after_s", None),
            "client_gone": self.is_gone or None,
        }


OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/openapi.json", "/docs"})
"""Paths that need no key: probes and the API description."""
OPERATOR_PATHS = OPEN_PATHS | {"/metrics", "/reset_prefix_cache"}
API_PATHS = ("/v1/", "/tokenize", "/detokenize")
"""Paths that get their own metric label, unless the answer is 401 or 404; POSTs there count for quotas."""
MESSAGES = "/v1/messages"
"""Anthropic's API has its own error format and key header."""
IGNORED_HEADER = b"x-kvasir-ignored"
RECORD = "kvasir.record"
"""Key of the `RequestRecord` in the ASGI scope."""
TRUSTED = "kvasir.trusted"
"""Key in the scope of the gateway's own requests: key digest and tenant."""
CLIENT_GONE_STATUS = 499
_logger = log.get_logger("gateway.request")


def refusal(error: KvasirError, path: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the error response in the format of the path's API."""
    return error_response(error, headers, error_body(error) if path.startswith(MESSAGES) else None)


class Edge:
    """ASGI middleware around the application."""

    def __init__(
        self,
        app: ASGIApp,
        tenants: Mapping[str, Tenant],
        counters: Counters,
        open_paths: frozenset[str] = OPEN_PATHS,
        open_below: str | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`tenants` are by key digest. `open_paths`, and paths below `open_below`, need no key."""
        self._app = app
        self._tenants = tenants
        self._counters = counters
        self._open_paths = open_paths
        self._open_below = open_below
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), scope["path"]
        record = scope[RECORD] = RequestRecord(scope["method"], path, f"req_{token_hex(16)}")
        if (client_id := headers.get("x-request-id")) is not None and _ECHOED.fullmatch(client_id):
            record.client_request_id = client_id
        trace = tracing.attach(headers)
        span = _span_of(record) if spans.is_on() else None
        within = tracing.enter(span)
        record.trace_id = spans.trace_id()
        is_open = path in self._open_paths or (bool(self._open_below) and path.startswith(self._open_below))
        try:
            await self._serve(scope, receive, _stamped(record, send), None if is_open else headers)
        finally:
            tracing.detach(within)
            tracing.detach(trace)
            self._log(record, is_probe=is_open)
            if span is not None:
                _end_span(span, record)
            if record.error is not None:
                free_frames(record.error)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, headers: Headers | None) -> None:
        """Answer the request. The key is checked if there are `headers`."""
        record: RequestRecord = scope[RECORD]
        try:
            if headers is not None:
                trusted = scope.get(TRUSTED)
                record.tenant, record.owner = trusted or key_of(headers, record.path, self._tenants)
                if ENGAGE in scope:
                    scope[ENGAGE]()
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            if record.status is None:
                await refusal(ShuttingDown(), record.path)(scope, receive, send)
            raise
        except Exception as error:
            record.error = error
            if not isinstance(error, KvasirError):
                _logger.exception("a request ended in an unforeseen error")
            if record.status is None:
                known = error if isinstance(error, KvasirError) else InternalError(str(error))
                await refusal(known, record.path)(scope, receive, send)

    def _log(self, record: RequestRecord, *, is_probe: bool) -> None:
        counters, now_s = self._counters, monotonic_s()
        if record.is_gone:
            record.status = record.status or CLIENT_GONE_STATUS
            counters.disconnects.inc()
        is_named = record.path.startswith(API_PATHS) and record.status not in (401, 404)
        route = record.path if is_named else "other"
        for below in ("/v1/models/", "/v1/responses/"):
            if record.path.startswith(below):
                route = f"{below}{{id}}"
        counters.requests.labels(route, str(record.status)).inc()
        for name in record.ignored:
            counters.count_ignored(name)
        counters.prompt_tokens.inc(record.prompt_tokens or 0)
        counters.output_tokens.inc(record.completion_tokens or 0)
        accepted_s = record.accepted_s
        if accepted_s is not None and record.completion_tokens is not None:
            counters.request_s.observe(now_s - accepted_s)
            if record.figures is not None:
                record.count(record.figures, now_s - accepted_s)
            if record.first_token_s is not None:
                counters.first_token_s.observe(record.first_token_s)
        if is_named and record.method == "POST":
            counters.recent.add(record.ended(now_s))
        # Skip "not ready": probes ask twenty times a second while a stack starts.
        if is_probe and isinstance(record.error, UnavailableError | None):
            return
        log.canonical(_logger, "request", **record.fields(now_s))
        if self._recorder is not None and accepted_s is not None:
            account: dict[str, Any] = {
                "took_s": now_s - record.began_s,
                "since_accepted_s": now_s - accepted_s,
                "first_token_s": record.first_token_s,
                "status": record.status,
                "key": record.tenant[:8],
                "stream": bool(record.stream),
                "prompt_tokens": record.prompt_tokens or 0,
                "completion_tokens": record.completion_tokens or 0,
                "cached_tokens": record.cached_tokens,
                "client_gone": record.is_gone,
            }
            self._recorder.note("request", record.request_id, **account)


def key_of(headers: Headers, path: str, tenants: Mapping[str, Tenant]) -> tuple[str, Tenant]:
    """Return the digest of the request's key, and its tenant. The key is in `Authorization: Bearer …` or
    `x-api-key`; the latter wins on Anthropic's API. Raises Unauthorized, and HttpError for two Authorization
    headers: a proxy may have checked the other."""
    key = own = headers.get("x-api-key")
    if own is None or not path.startswith(MESSAGES):
        values = headers.getlist("authorization")
        if len(values) > 1:
            text = "there are several Authorization headers: send one"
            raise HttpError(400, text, error_code=HttpError.code)
        if values or own is None:
            scheme, _, key = (values[0] if values else "").partition(" ")
            key = key if scheme.lower() == "bearer" else ""
    key = (key or "").strip()
    if not key:
        raise Unauthorized("no API key: send it in a header, as in 'Authorization: Bearer sk-…'")
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    tenant = tenants.get(digest)
    if tenant is None:
        raise Unauthorized(
            "Incorrect API key provided; `kvasir env` prints the key of a stack on this machine"
        )
    return digest, tenant


def _stamped(record: RequestRecord, send: Send) -> Send:
    """Wrap `send` to add the ids as headers and note the status."""

    async def stamped(message: Message) -> None:
        if message["type"] == "http.response.start":
            record.status = message["status"]
            ours = record.request_id
            shown_id = record.client_request_id or ours
            added = [(b"x-request-id", shown_id.encode()), (b"x-kvasir-request-id", ours.encode())]
            if record.ignored:
                added.append((IGNORED_HEADER, ", ".join(map(quote, record.ignored)).encode()))
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        try:
            await send(message)
        except OSError:  # as ASGI has it; uvicorn itself says nothing
            raise ClientGone from None

    return stamped


OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""`gen_ai.operation.name` by path; other paths have no span."""


def _span_of(record: RequestRecord) -> Span | None:
    """Begin a span; None for paths without one and while tracing is off."""
    operation = OPERATIONS.get(record.path)
    if operation is None or record.method != "POST":
        return None
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "kvasir",
        "http.request.method": record.method,
        "url.path": record.path,
        "kvasir.request_id": record.request_id,
    }
    return spans.begin(operation, kind=SpanKind.SERVER, began_s=record.began_s, attributes=attributes)


def _end_span(span: Span, record: RequestRecord) -> None:
    """End the span with the record's attributes, as far as they are known."""
    now_s, error, sampling = monotonic_s(), record.error, record.sampling
    if record.model:
        span.update_name(f"{OPERATIONS[record.path]} {record.model}")
    if record.accepted_s is not None:
        spans.event(span, "accepted", record.accepted_s)
        if record.first_token_s is not None:
            spans.event(span, "first token", record.accepted_s + record.first_token_s)
    is_ours = error is not None and (record.status is None or record.status >= 500)
    code = error.code if isinstance(error, KvasirError) else type(error).__name__
    attributes: dict[str, str | bool | int | float | list[str] | None] = {
        "http.response.status_code": record.status,
        "kvasir.client_gone": record.is_gone or None,
        "gen_ai.request.model": record.model or None,
        "gen_ai.response.model": record.model or None,
        "error.type": None if error is None or is_ours else code,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.response.finish_reasons": list(record.finish_reasons.elements()) or None,
        "gen_ai.response.time_to_first_chunk": record.first_token_s,
    }
    if record.completion_tokens is not None:
        attributes["gen_ai.usage.output_tokens"] = record.completion_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens
    if sampling is not None:
        attributes |= {
            "gen_ai.request.stream": bool(record.stream),
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": record.choices,
            "gen_ai.request.top_k": sampling.top_k or None,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
            "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
        }
    known = {name: value for name, value in attributes.items() if value is not None}
    spans.end(span, ended_s=now_s, error=error if is_ours else None, attributes=known)
