"""Spans reach a collector as OTLP over a socket; off they cost nothing, and a collector that is gone holds
nobody up.
"""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from opentelemetry.trace import SpanKind

from services.stack.obstructions import free_port
from shared import spans
from shared.bus import tracing
from shared.clock import monotonic_s
from shared.config import TracesConfig
from shared.errors import InvalidRequest
from tests.otlp import Collector

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
UNSAMPLED = f"00-{TRACE}-b7ad6b7169203331-00"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().serving() as serving:
        yield serving


def test_a_span_arrives_with_its_parent_its_times_and_what_it_says(collector: Collector) -> None:
    now_s = monotonic_s()
    with spans.exported(TracesConfig(endpoint=collector.url), "toy", "toy-0"):
        parent = spans.context_of(PARENT)
        whole = spans.begin("whole", parent=parent, kind=SpanKind.SERVER, began_s=now_s - 2.0)
        assert whole is not None
        part = spans.begin("part", parent=spans.below(whole), attributes={"number": 3, "words": ["a", "b"]})
        assert part is not None
        spans.event(part, "half", now_s - 0.5)
        spans.end(part, ended_s=now_s)
        spans.end(whole, ended_s=now_s, error=InvalidRequest("no"))
    part_sent, whole_sent = collector.spans
    assert (whole_sent.service, whole_sent.instance, whole_sent.kind) == ("kvasir-toy", "toy-0", 2)
    assert whole_sent.trace_id == part_sent.trace_id == TRACE
    assert whole_sent.parent_id == "b7ad6b7169203331" and part_sent.parent_id == whole_sent.span_id
    assert (whole_sent.end_ns - whole_sent.start_ns) / 1e9 == pytest.approx(2.0, abs=0.05)
    assert part_sent.attributes == {"number": 3, "words": ["a", "b"]} and part_sent.events == ("half",)
    assert whole_sent.is_error and whole_sent.attributes["error.type"] == InvalidRequest.code
    assert not part_sent.is_error


def test_a_command_has_a_span_where_it_is_served_and_what_it_asks_is_below(collector: Collector) -> None:
    with spans.exported(TracesConfig(endpoint=collector.url), "toy", "toy-0"):
        with tracing.served({"traceparent": PARENT}, "Question", "kvasir.v1.cmd.desk.ask"):
            headers = tracing.inject()
        with pytest.raises(InvalidRequest), tracing.served({"traceparent": PARENT}, "Refused", "subject"):
            raise InvalidRequest("no")
        with tracing.served({"traceparent": UNSAMPLED}, "Unsampled", "subject"):
            assert tracing.inject() == {"traceparent": UNSAMPLED}
        with tracing.served(None, "Untraced", "subject"):
            assert tracing.inject() is None
        assert tracing.trace_id() is None
    asked, refused = collector.spans
    assert headers == {"traceparent": f"00-{TRACE}-{asked.span_id}-01"}
    assert asked.attributes == {
        "messaging.system": "nats",
        "messaging.destination.name": "kvasir.v1.cmd.desk.ask",
    }
    assert (refused.name, refused.is_error) == ("Refused", True)


def test_a_share_of_the_requests_that_come_without_a_trace_begins_one(collector: Collector) -> None:
    with spans.exported(TracesConfig(endpoint=collector.url, share=0.0), "toy", "toy-0"):
        assert [spans.begin("root") for _ in range(20)] == [None] * 20
        child = spans.begin("child", parent=spans.context_of(PARENT))
        assert child is not None
        spans.end(child)
    assert [span.name for span in collector.spans] == ["child"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_there", [True, False])
def test_a_collector_that_takes_nothing_holds_nobody_up(is_there: bool, collector: Collector) -> None:
    collector.refuses = True
    url = collector.url if is_there else f"http://127.0.0.1:{free_port()}"
    began_s = time.monotonic()
    with spans.exported(TracesConfig(endpoint=url), "toy", "toy-0"):
        for _ in range(100):
            span = spans.begin("lost")
            assert span is not None
            spans.end(span)
        made_s = time.monotonic() - began_s
    assert made_s < 1.5
    assert time.monotonic() - began_s < made_s + 4.0
    assert spans.begin("after") is None


def test_off_there_is_no_span_no_traceparent_and_no_sdk() -> None:
    """Also keeps `opentelemetry.sdk` out of what services import."""
    with spans.exported(TracesConfig(), "toy", "toy-0"):
        assert not spans.is_on()
        token = tracing.attach({"traceparent": PARENT})
        assert spans.begin("none") is None and spans.current_traceparent() == ""
        tracing.detach(token)
    code = (
        "import sys, services.gateway.service, services.scheduler.service, services.worker.service; "
        "sys.exit('opentelemetry.sdk' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
