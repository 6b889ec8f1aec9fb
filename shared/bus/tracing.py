"""W3C trace context in the headers of commands; token frames and step reports carry none. A command that
carries a context is served in a child span of its sender (`shared.spans`)."""

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
    """Return headers for the current span, or None without one."""
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return headers or None


def attach(headers: Mapping[str, str] | None) -> Token[context.Context] | None:
    """Make the trace of these headers current; pass the result to `detach`."""
    if not headers or "traceparent" not in headers:
        return None
    return context.attach(_propagator.extract(headers))


def enter(span: Span | None) -> Token[context.Context] | None:
    """Make a span current, if there is one; pass the result to `detach`."""
    return None if span is None else context.attach(trace.set_span_in_context(span))


def detach(token: Token[context.Context] | None) -> None:
    """Undo `attach` or `enter`."""
    if token is not None:
        context.detach(token)


def in_context(within: context.Context) -> contextvars.Context:
    """Return a context for running a task in that trace instead of the current one."""
    copied = contextvars.copy_context()
    copied.run(context.attach, within)
    return copied


@contextmanager
def served(headers: Mapping[str, str] | None, command: str, subject: str) -> Iterator[None]:
    """Run the body in the command's trace, in a span of its own if tracing is on."""
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
