"""Spans of a sequence: one for each attempt, ended whatever becomes of it; none where it is not traced."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from services.scheduler.core.effects import SequenceLeft
from services.scheduler.core.sequence import Phase
from services.scheduler.sequence_spans import SequenceSpans
from shared import spans
from shared.bus import tracing
from shared.config import TracesConfig
from shared.messages.sequence import NOBODY, FinishReason, SequenceSpec
from tests.otlp import Collector, Sent
from tests.shared.messages.builders import ref, spec

PARENT = f"00-{0xA:032x}-{0xB:016x}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector().serving() as serving:
        yield serving


def traced(attempt: int = 1, request: str = "req") -> SequenceSpec:
    return msgspec.structs.replace(spec(ref(request, attempt=attempt), [1, 2, 3]), traceparent=PARENT)


def left(attempt: int = 1) -> SequenceLeft:
    known: dict[str, Any] = {"finish_reason": FinishReason.STOP, "worker_id": "worker-0", "tenant": NOBODY}
    known |= {"prompt_tokens": 3, "generated_tokens": 5, "cached_tokens": 0, "expected_tokens": None}
    known |= {"held_s": 1.0, "queued_s": 0.5, "total_s": 1.5}
    return SequenceLeft(ref=ref("req", attempt=attempt), phase=Phase.ENDED, **known)


def test_each_attempt_has_a_span_and_all_end(collector: Collector) -> None:
    with spans.exported(TracesConfig(endpoint=collector.url), "scheduler", "scheduler-0"):
        term = SequenceSpans()
        term.submitted(traced(), known=False)
        term.submitted(traced(), known=True)
        term.started(ref("req"), "worker-0", 1.0)
        term.submitted(traced(attempt=2), known=True)
        term.left(left(attempt=1))
        term.left(left(attempt=2))
        term.submitted(traced(request="other"), known=False)
        term.close()
    became = [(s.attributes["kvasir.attempt"], s.attributes["kvasir.became"]) for s in sequences(collector)]
    assert became == [(1, "superseded"), (2, str(Phase.ENDED)), (1, "the term is over")]
    assert [span.name for span in collector.spans].count("queued") == 3
    assert {span.parent_id for span in sequences(collector)} == {f"{0xB:016x}"}


def sequences(collector: Collector) -> list[Sent]:
    return [span for span in collector.spans if span.name == "sequence"]


def test_what_nobody_traces_has_no_span_and_asks_in_nobodys(collector: Collector) -> None:
    token = tracing.attach({"traceparent": PARENT})
    with spans.exported(TracesConfig(endpoint=collector.url), "scheduler", "scheduler-0"):
        term = SequenceSpans()
        term.submitted(spec(ref("untraced"), [1]), known=False)
        asking = tracing.in_context(term.within([ref("untraced")]))
        assert asking.run(tracing.inject) is None
        term.submitted(traced(), known=False)
        headers = tracing.in_context(term.within([ref("untraced"), ref("req")])).run(tracing.inject)
        term.close()
    tracing.detach(token)
    (whole,) = sequences(collector)
    assert headers == {"traceparent": f"00-{0xA:032x}-{whole.span_id}-01"}
