"""What a process tells of itself: lines of its log, metrics, spans at a collector, and a flight recorder."""

import io
import itertools
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import SpanKind
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from services.stack.obstructions import free_port
from shared import log, metrics, spans
from shared.bus import tracing
from shared.clock import monotonic_s
from shared.config import TracesConfig
from shared.errors import InvalidRequest
from shared.log import ConsoleFormatter, JsonFormatter
from shared.messages.recordings import Recorded, TellRecorded
from shared.messages.sequence import SequenceRef
from shared.recorder import Batch, Recorder
from tests.otlp import Collector

ROOT = Path(__file__).parents[2]


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    """Writes nowhere until a test gives it a handler."""
    made = log.get_logger("test_log")
    made.setLevel(logging.DEBUG)
    made.propagate = False
    yield made
    made.handlers.clear()
    made.propagate = True


def lines(logger: logging.Logger, formatter: logging.Formatter) -> io.StringIO:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    logger.addHandler(handler)
    return out


def test_a_canonical_line_as_json(logger: logging.Logger) -> None:
    out = lines(logger, JsonFormatter("worker", "worker-0"))
    log.canonical(logger, "request", request_id="req_1", tokens=5, seconds=0.25, reason=None, odd={1: {2}})
    line = json.loads(out.getvalue())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "kvasir.test_log",
        "service": "worker",
        "instance": "worker-0",
        "event": "request",
        "request_id": "req_1",
        "tokens": 5,
        "seconds": 0.25,
        "odd": {"1": "{2}"},
    }


def test_fields_never_overwrite_where_a_line_comes_from(logger: logging.Logger) -> None:
    out = lines(logger, JsonFormatter("worker", "worker-0"))
    log.canonical(logger, "request", service="forged", level="forged", extra="kept")
    line = json.loads(out.getvalue())
    assert (line["service"], line["level"], line["extra"]) == ("worker", "info", "kept")


def test_a_canonical_line_for_people(logger: logging.Logger) -> None:
    out = lines(logger, ConsoleFormatter("worker-0"))
    log.canonical(logger, "request", tokens=5, seconds=0.123456789, words="two words", empty="")
    assert out.getvalue().endswith(
        " INFO    worker-0 request tokens=5 seconds=0.123457 words='two words' empty=''\n"
    )


@pytest.mark.parametrize("formatter", [ConsoleFormatter("worker-0"), JsonFormatter("worker", "worker-0")])
def test_nothing_logged_makes_a_second_line(logger: logging.Logger, formatter: logging.Formatter) -> None:
    out = lines(logger, formatter)
    log.canonical(logger, "one\ntwo", name="a\r\nINFO forged\x1b[31m\u2028")
    assert out.getvalue().count("\n") == 1 and "\r" not in out.getvalue() and "\x1b" not in out.getvalue()


@pytest.mark.parametrize("formatter", [ConsoleFormatter("worker-0"), JsonFormatter("worker", "worker-0")])
def test_tracebacks_are_kept(logger: logging.Logger, formatter: logging.Formatter) -> None:
    out = lines(logger, formatter)
    try:
        raise ZeroDivisionError("the cause")
    except ZeroDivisionError:
        logger.exception("it broke: %d", 7)
    assert "ZeroDivisionError: the cause" in out.getvalue() and "it broke: 7" in out.getvalue()


SCRIPT = """
import logging, sys
from shared import log
log.configure(*sys.argv[1:])
log.get_logger("x").debug("fine")
log.get_logger("x").info("said")
logging.getLogger("another").info("unsaid")
logging.getLogger("another").warning("warned")
log.configure(*sys.argv[1:])
log.get_logger("x").info("once")
"""


@pytest.mark.parametrize(
    ("level", "log_format", "events"),
    [
        ("info", "auto", ["said", "warned", "once"]),
        ("debug", "json", ["fine", "said", "warned", "once"]),
        ("error", "json", ["warned"]),
    ],
)
def test_configure(level: str, log_format: str, events: list[str]) -> None:
    """Standard error is no terminal here, so `auto` is JSON."""
    command = [sys.executable, "-c", SCRIPT, level, "worker", "worker-0", log_format]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == events and done.stdout == ""


def test_a_name_is_one_metric_per_registry() -> None:
    here, there = CollectorRegistry(), CollectorRegistry()
    metrics.counter("a_total", "A", ("kind",), registry=here).labels("x").inc(2)
    metrics.counter("a_total", "A", ("kind",), registry=here).labels("x").inc()
    metrics.counter("a_total", "A", ("kind",), registry=there).labels("x").inc()
    assert here.get_sample_value("a_total", {"kind": "x"}) == 3
    assert there.get_sample_value("a_total", {"kind": "x"}) == 1


def test_a_name_cannot_be_two_kinds_of_metric() -> None:
    registry = CollectorRegistry()
    metrics.gauge("size_blocks", "Size", registry=registry)
    with pytest.raises(ValueError, match="size_blocks is a Gauge already"):
        metrics.counter("size_blocks", "Size", registry=registry)


def test_rendered_text_is_what_prometheus_reads() -> None:
    registry = CollectorRegistry()
    metrics.counter("steps_total", "Steps", registry=registry).inc(3)
    metrics.gauge("free_blocks", "Free", registry=registry).set(7)
    metrics.histogram("step_seconds", "Step", buckets=(0.1, 1.0), registry=registry).observe(0.5)
    families = {f.name: f for f in text_string_to_metric_families(metrics.render(registry).decode())}
    assert {sample.name: sample.value for sample in families["steps"].samples}["steps_total"] == 3
    assert families["free_blocks"].samples[0].value == 7
    buckets = {s.labels["le"]: s.value for s in families["step_seconds"].samples if "_bucket" in s.name}
    assert buckets == {"0.1": 0, "1.0": 1, "+Inf": 1}


def test_who_was_forked_from_one_that_loads_all_services_keeps_its_own_metrics() -> None:
    registry = CollectorRegistry()
    for name in ("kvasir_worker_steps_total", "kvasir_gateway_requests_total", "kvasir_bus_messages_total"):
        metrics.counter(name, "Some", registry=registry)
    metrics.keep_own("gateway", registry=registry)
    text = metrics.render(registry).decode()
    assert "kvasir_worker" not in text and "kvasir_gateway_requests_total 0.0" in text
    assert "kvasir_bus_messages_total 0.0" in text
    again = metrics.counter("kvasir_worker_steps_total", "Some", registry=registry)
    again.inc()
    assert "kvasir_worker_steps_total 1.0" in metrics.render(registry).decode()


def a_recorder(**bounds: int) -> Recorder:
    ticks = itertools.count()
    return Recorder("worker", "worker-0", 7, clock=lambda: float(next(ticks)), **bounds)


def ref(request_id: str) -> SequenceRef:
    return SequenceRef(request_id=request_id, choice=0, attempt=1)


@given(st.lists(st.one_of(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=5)), max_size=60))
def test_bounds_hold_and_the_latest_stays(program: list[int | list[int]]) -> None:
    recorder = a_recorder(most_events=8, most_batches=6, most_rows=12)
    for step in program:
        if isinstance(step, int):
            recorder.note("event", f"r{step}", number=step)
        else:
            recorder.file(0.0, "step", Batch(decodes=tuple(ref(f"r{each}") for each in step)))
    told = recorder.recorded(TellRecorded())
    notes = [event for event in told.events if event.kind == "event"]
    steps = [event for event in told.events if event.kind == "step"]
    expected = [step for step in program if isinstance(step, int)][-8:]
    assert [event.fields["number"] for event in notes] == expected and len(steps) <= 6
    assert sum(len(event.fields["own"]) for event in steps) <= 12 or len(steps) == 1
    filed = [step for step in program if isinstance(step, list)]
    assert [len(e.fields["own"]) for e in steps] == [len(s) for s in filed[len(filed) - len(steps) :]]
    assert [event.seq for event in told.events] == sorted(event.seq for event in told.events)


def test_one_request_sees_its_own_events_and_only_sizes_of_others() -> None:
    recorder = a_recorder()
    recorder.note("submitted", "a", prompt_tokens=3)
    recorder.note("submitted", "b", prompt_tokens=9)
    recorder.file(5.0, "step", Batch(((ref("a"), 0, 3),), (ref("b"),), {"step_s": 0.5}))
    recorder.file(6.0, "step", Batch((), (ref("b"),)))
    told = recorder.recorded(TellRecorded(request_id="a"))
    assert [event.kind for event in told.events] == ["submitted", "step"]
    step = told.events[1].fields
    assert step["chunks"] == [(0, 1, 0, 3)]
    assert (step["own"], step["decodes"], step["step_s"]) == ([], 1, 0.5) and "b" not in repr(step)
    brief = recorder.recorded(TellRecorded(kinds=("step",), is_brief=True)).events[0].fields
    assert brief == {"step_s": 0.5, "prefills": 1, "decodes": 1, "prefill_tokens": 3}


def test_what_comes_after_a_number_is_told_in_pages_without_a_gap() -> None:
    recorder = a_recorder()
    for number in range(50):
        recorder.note("event", number=number)
    seen: list[int] = []
    since = 0
    while len(seen) < 50:
        told = recorder.recorded(TellRecorded(since_seq=since, most=7))
        seen += [event.fields["number"] for event in told.events]
        assert told.next_seq > since
        since = told.next_seq
    assert seen == list(range(50))


def test_an_answer_fits_a_message() -> None:
    recorder = a_recorder()
    for _ in range(3000):
        recorder.note("event", text="x" * 500)
    told = recorder.recorded(TellRecorded())
    data = msgspec.msgpack.encode(told)
    assert len(data) < 500_000 and msgspec.msgpack.decode(data, type=Recorded).events[-1].seq == 3000


def test_noting_costs_little() -> None:
    """So that it may stay on: a hundred thousand events take less than a second, at any load."""
    import time

    recorder = a_recorder()
    began_s = time.process_time()
    for _ in range(100_000):
        recorder.note("submitted", "r", choice=0, attempt=1, prompt_tokens=100)
    assert time.process_time() - began_s < 1.0


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
        assert spans.trace_id() is None
    asked, refused = collector.spans
    assert headers == {"traceparent": f"00-{TRACE}-{asked.span_id}-01"}
    subject = {"messaging.destination.name": "kvasir.v1.cmd.desk.ask"}
    assert asked.attributes == {"messaging.system": "nats", **subject}
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
    assert made_s < 1.5 and time.monotonic() - began_s < made_s + 4.0 and spans.begin("after") is None


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
