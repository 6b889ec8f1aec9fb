"""Trace context survives the headers; its absence costs nothing."""

from opentelemetry import context, trace

from shared.bus import tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_headers_become_the_current_trace_and_headers_again() -> None:
    token = tracing.attach({"traceparent": PARENT, "tracestate": "vendor=1"})
    assert tracing.trace_id() == "0af7651916cd43dd8448eb211c80319c"
    assert tracing.inject() == {"traceparent": PARENT, "tracestate": "vendor=1"}
    tracing.detach(token)
    assert tracing.trace_id() is None and tracing.inject() is None


def test_no_or_broken_headers_leave_no_trace() -> None:
    for headers in (
        None,
        {},
        {"other": "x"},
        {"traceparent": "nonsense"},
        {"traceparent": PARENT.replace("-", "_")},
    ):
        before = context.get_current()
        token = tracing.attach(headers)
        assert tracing.trace_id() is None
        tracing.detach(token)
        assert context.get_current() == before


def test_a_span_of_this_process_is_injected() -> None:
    span = trace.NonRecordingSpan(trace.SpanContext(0xAB, 0xCD, is_remote=False))
    with trace.use_span(span):
        assert tracing.inject() == {"traceparent": f"00-{0xAB:032x}-{0xCD:016x}-00"}
