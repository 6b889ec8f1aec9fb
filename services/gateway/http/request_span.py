"""One span per request, by OpenTelemetry's conventions for generative AI; it never holds texts.

Spans of other services are its children (docs/traces.md).
"""

from typing import TYPE_CHECKING

from opentelemetry.trace import Span, SpanKind

from shared import spans
from shared.clock import monotonic_s
from shared.errors import KvasirError

if TYPE_CHECKING:
    from services.gateway.http.middleware import RequestRecord

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""`gen_ai.operation.name` by path; other paths have no span."""


def begin(record: "RequestRecord") -> Span | None:
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


def end(span: Span, record: "RequestRecord") -> None:
    """End the span with the record's attributes."""
    now_s = monotonic_s()
    attributes: dict[str, str | bool | int | float | list[str]] = {}
    if record.status is not None:
        attributes["http.response.status_code"] = record.status
    if record.is_gone:
        attributes["kvasir.client_gone"] = True
    if record.model:
        span.update_name(f"{OPERATIONS[record.path]} {record.model}")
        attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = record.model
    attributes |= _asked(record)
    attributes |= _given(record)
    if record.accepted_s is not None:
        spans.event(span, "accepted", record.accepted_s)
        if record.first_token_s is not None:
            spans.event(span, "first token", record.accepted_s + record.first_token_s)
    is_ours = record.error is not None and (record.status is None or record.status >= 500)
    if record.error is not None and not is_ours:
        kind = record.error.code if isinstance(record.error, KvasirError) else type(record.error).__name__
        attributes["error.type"] = kind
    spans.end(span, ended_s=now_s, error=record.error if is_ours else None, attributes=attributes)


def _asked(record: "RequestRecord") -> dict[str, bool | int | float]:
    """Return the sampling attributes, defaults included."""
    sampling = record.sampling
    if sampling is None:
        return {}
    asked: dict[str, bool | int | float] = {
        "gen_ai.request.stream": bool(record.stream),
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.choice.count": record.choices,
    }
    if sampling.top_k:
        asked["gen_ai.request.top_k"] = sampling.top_k
    for name in ("frequency_penalty", "presence_penalty"):
        if penalty := getattr(sampling, name):
            asked[f"gen_ai.request.{name}"] = penalty
    return asked


def _given(record: "RequestRecord") -> dict[str, int | float | list[str]]:
    """Return usage, finish reasons and time to first token, as far as known."""
    given: dict[str, int | float | list[str]] = {}
    if record.prompt_tokens is not None:
        given["gen_ai.usage.input_tokens"] = record.prompt_tokens
    if record.completion_tokens is not None:
        given["gen_ai.usage.output_tokens"] = record.completion_tokens
        given["gen_ai.usage.cache_read.input_tokens"] = record.cached_tokens or 0
    if record.finish_reasons:
        reasons = [reason for reason, count in record.finish_reasons.items() for _ in range(count)]
        given["gen_ai.response.finish_reasons"] = reasons
    if record.first_token_s is not None:
        given["gen_ai.response.time_to_first_chunk"] = record.first_token_s
    return given
