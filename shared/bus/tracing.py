"""W3C trace context in message headers: on commands only, never on token frames or step reports.

A command that comes with one gets a span where it is served, below its sender's (`shared.spans`).
"""

import contextvars
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Token

from opentelemetry import context, trace
from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared import spans

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


def enter(span: Span | None) -> Token[context.Context] | None:
    """Make a span current, where there is one; hand the result to `detach`."""
    return None if span is None else context.attach(trace.set_span_in_context(span))


def detach(token: Token[context.Context] | None) -> None:
    """Undo `attach` or `enter`."""
    if token is not None:
        context.detach(token)


def in_context(within: context.Context) -> contextvars.Context:
    """For a task that runs in that trace, whatever is current here."""
    copied = contextvars.copy_context()
    copied.run(context.attach, within)
    return copied


@contextmanager
def served(headers: Mapping[str, str] | None, command: str, subject: str) -> Iterator[None]:
    """A command is carried out in the trace that it came with, in a span of its own where spans are on."""
    outer = attach(headers)
    span = None
    if outer is not None and spans.is_on():
        attributes = {"messaging.system": "nats", "messaging.destination.name": subject}
        span = spans.begin(command, kind=SpanKind.SERVER, attributes=attributes)
    inner = enter(span)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        detach(inner)
        detach(outer)
        if span is not None:
            spans.end(span, error=error)


def trace_id() -> str | None:
    """The current trace's id as 32 hex digits; None outside a trace."""
    span = trace.get_current_span().get_span_context()
    return f"{span.trace_id:032x}" if span.is_valid else None
