"""Request spans for an OpenTelemetry collector, over OTLP; off unless `traces.endpoint` is set.

Most spans are created when they end, from recorded times. If spans are off, `is_on` is False, no other
function but `trace_id` is called, and the SDK is not imported; it is an extra (`deploy/locks/traces.txt`). A
thread sends spans from a bounded queue, and drops what the collector does not accept.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.clock import monotonic_s
from shared.config import TracesConfig
from shared.errors import ConfigError, KvasirError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_SEND_S = 2.0
"""Timeout for one batch, retries included, and for the last batch at exit."""
_MOST_WAITING, _MOST_AT_ONCE, _EVERY_MS = 8192, 512, 1000

Attributes = Mapping[str, str | bool | int | float | list[str]]

_propagator = TraceContextTextMapPropagator()
_tracer: Tracer | None = None


def is_on() -> bool:
    """Return True if this process creates spans."""
    return _tracer is not None


def begin(
    name: str,
    *,
    parent: context.Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    began_s: float | None = None,
    attributes: Attributes | None = None,
) -> Span | None:
    """Begin a span below `parent` (None: the current span), now or at a time of `monotonic_s`.

    Return None if spans are off or the request is not sampled."""
    if _tracer is None:
        return None
    start = None if began_s is None else unix_ns(began_s)
    span = _tracer.start_span(name, parent, kind, attributes, start_time=start)
    return span if span.is_recording() else None


def end(
    span: Span,
    *,
    ended_s: float | None = None,
    error: BaseException | str | None = None,
    attributes: Attributes | None = None,
) -> None:
    """End a span, now or at a time of `monotonic_s`. `error` is the cause if it failed, but not through the
    caller's fault."""
    if attributes:
        span.set_attributes(attributes)
    if error is not None:
        name = error.code if isinstance(error, KvasirError) else type(error).__name__
        kind = error if isinstance(error, str) else name
        span.set_attribute("error.type", kind)
        span.set_status(Status(StatusCode.ERROR, "" if isinstance(error, str) else str(error)[:200]))
    span.end(None if ended_s is None else unix_ns(ended_s))


def event(span: Span, name: str, at_s: float | None = None, attributes: Attributes | None = None) -> None:
    """Add an event to a span."""
    span.add_event(name, attributes, None if at_s is None else unix_ns(at_s))


def below(span: Span) -> context.Context:
    """Return the context for children of a span."""
    return trace.set_span_in_context(span, context.Context())


def context_of(traceparent: str) -> context.Context:
    """Return the context for children of a remote span."""
    return _propagator.extract({"traceparent": traceparent}, context.Context())


def current_traceparent() -> str:
    """Return the current span as text for message fields; empty if spans are off or none is current."""
    if _tracer is None:
        return ""
    span = trace.get_current_span().get_span_context()
    if not span.is_valid or not span.trace_flags.sampled:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def trace_id() -> str | None:
    """Return the current trace id as 32 hex digits, or None outside a trace."""
    span = trace.get_current_span().get_span_context()
    return f"{span.trace_id:032x}" if span.is_valid else None


def unix_ns(at_s: float) -> int:
    """Convert a time of `monotonic_s` to Unix nanoseconds."""
    return time.time_ns() - int((monotonic_s() - at_s) * 1e9)


@contextmanager
def exported(config: TracesConfig, service: str, instance: str) -> Iterator[None]:
    """Export spans inside the block if `config` names a collector. On exit, send the rest within two seconds.
    Raise ConfigError if the SDK is not installed."""
    global _tracer
    if not config.endpoint:
        yield
        return
    provider, tracer = _provider(config, service, instance)
    _tracer = tracer
    try:
        yield
    finally:
        _tracer = None
        closing = threading.Thread(target=provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(_SEND_S)


def check(config: TracesConfig) -> None:
    """Raise ConfigError if spans are configured and the SDK is not installed."""
    if not config.endpoint:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        raise ConfigError(
            "traces.endpoint needs OpenTelemetry's SDK: install it with `.venv/bin/python -m pip install "
            "--require-hashes -r deploy/locks/traces.txt`, or leave the setting empty",
            param="traces.endpoint",
        ) from None


def _provider(config: TracesConfig, service: str, instance: str) -> "tuple[TracerProvider, Tracer]":
    check(config)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource.create(
        {"service.namespace": "kvasir", "service.name": f"kvasir-{service}", "service.instance.id": instance}
    )
    sampler = ParentBased(TraceIdRatioBased(config.share))
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
    url = f"{config.endpoint.rstrip('/').removesuffix('/v1/traces')}/v1/traces"
    exporter = OTLPSpanExporter(url, timeout=_SEND_S)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=_MOST_WAITING,
            max_export_batch_size=_MOST_AT_ONCE,
            schedule_delay_millis=_EVERY_MS,
        )
    )
    return provider, provider.get_tracer("kvasir")
