"""One span per request, by OpenTelemetry's conventions for generative AI; it never holds texts. Spans of
other services are its children (docs/traces.md)."""

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
