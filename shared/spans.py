"""Spans of requests, for an OpenTelemetry collector, over OTLP; none unless `traces.endpoint` names one.

What a span covers is known where it is over, so most are made then, from moments that were noted. Without an
endpoint `is_on` is False, nobody calls anything else here, and the SDK is not imported: it is an extra
(`deploy/locks/traces.txt`). Sending happens on a thread of its own, from a bounded queue; what a collector
does not take is dropped.
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
"""For one batch, retries included, and for what is left at the end."""
_MOST_WAITING, _MOST_AT_ONCE, _EVERY_MS = 8192, 512, 1000

Attributes = Mapping[str, str | bool | int | float | list[str]]

_propagator = TraceContextTextMapPropagator()
_tracer: Tracer | None = None


def is_on() -> bool:
    """Whether this process makes spans."""
    return _tracer is not None


def begin(
    name: str,
    *,
    parent: context.Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    began_s: float | None = None,
    attributes: Attributes | None = None,
) -> Span | None:
    """A span that began now, or at a moment of `monotonic_s`, below `parent` (None: below what is current).

    None where nothing is recorded: spans are off, or the request is none of those that are traced."""
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
    """It ended now, or at a moment of `monotonic_s`; `error`: what it ended with, where that is none of the
    caller's doing."""
    if attributes:
        span.set_attributes(attributes)
    if error is not None:
        kind = error if isinstance(error, str) else _kind_of(error)
        span.set_attribute("error.type", kind)
        span.set_status(Status(StatusCode.ERROR, "" if isinstance(error, str) else str(error)[:200]))
    span.end(None if ended_s is None else unix_ns(ended_s))


def event(span: Span, name: str, at_s: float | None = None, attributes: Attributes | None = None) -> None:
    """Something happened to it."""
    span.add_event(name, attributes, None if at_s is None else unix_ns(at_s))


def below(span: Span) -> context.Context:
    """Where its children begin."""
    return trace.set_span_in_context(span, context.Context())


def context_of(traceparent: str) -> context.Context:
    """Where the children of a span elsewhere begin."""
    return _propagator.extract({"traceparent": traceparent}, context.Context())


def current_traceparent() -> str:
    """Of what is current, for messages that name many; empty where spans are off, or there is none."""
    if _tracer is None:
        return ""
    span = trace.get_current_span().get_span_context()
    if not span.is_valid or not span.trace_flags.sampled:
        return ""
    return f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"


def unix_ns(at_s: float) -> int:
    """A moment of `monotonic_s`, by the wall clock."""
    return time.time_ns() - int((monotonic_s() - at_s) * 1e9)


@contextmanager
def exported(config: TracesConfig, service: str, instance: str) -> Iterator[None]:
    """Inside, spans are made where `config` names a collector, and sent to it; what is left when it ends is
    sent within two seconds. Raises ConfigError where the SDK is not installed."""
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
    """Raises ConfigError where spans are wanted and the SDK is not installed."""
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
        {
            "service.namespace": "kvasir",
            "service.name": f"kvasir-{service}",
            "service.instance.id": instance,
        }
    )
    sampler = ParentBased(TraceIdRatioBased(config.share))
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(_traces_url(config.endpoint), timeout=_SEND_S)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=_MOST_WAITING,
            max_export_batch_size=_MOST_AT_ONCE,
            schedule_delay_millis=_EVERY_MS,
        )
    )
    return provider, provider.get_tracer("kvasir")


def _traces_url(endpoint: str) -> str:
    """OTLP's own path below a collector's address."""
    bare = endpoint.rstrip("/")
    return bare if bare.endswith("/v1/traces") else f"{bare}/v1/traces"


def _kind_of(error: BaseException) -> str:
    return error.code if isinstance(error, KvasirError) else type(error).__name__
