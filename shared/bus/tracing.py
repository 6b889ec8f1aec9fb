"""W3C trace context in message headers: on commands only, never on token frames or step reports."""

from collections.abc import Mapping
from contextvars import Token

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_propagator = TraceContextTextMapPropagator()


def inject() -> dict[str, str] | None:
    """Headers that carry the current span; None when there is none."""
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return headers or None


def attach(headers: Mapping[str, str] | None) -> Token[context.Context] | None:
    """Make the trace in these headers current; hand the result to `detach`."""
    if not headers or "traceparent" not in headers:
        return None
    return context.attach(_propagator.extract(headers))


def detach(token: Token[context.Context] | None) -> None:
    """Undo `attach`."""
    if token is not None:
        context.detach(token)


def trace_id() -> str | None:
    """The current trace's id as 32 hex digits; None outside a trace."""
    span = trace.get_current_span().get_span_context()
    return f"{span.trace_id:032x}" if span.is_valid else None
