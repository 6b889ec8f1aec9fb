"""What tests say to one stream: deltas, reports of workers, and a stream that has begun."""

from services.gateway.core.effects import Submit
from services.gateway.core.stream import Stream, StreamTiming
from shared.liveness import Start
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import FinishReason, SequenceRef
from shared.messages.tokens import TokenDelta
from tests.shared.messages.builders import sequence_report

KEY = ("req_1", 0)
TIMING = StreamTiming(frame_timeout_s=3, give_up_s=60)
A: Start = ("a", 1)
B: Start = ("b", 1)


def delta(
    attempt: int, first: int, tokens: tuple[int, ...], end: FinishReason | None = None, cached: int = 0
) -> TokenDelta:
    return TokenDelta(*KEY, attempt, first, tokens, end, cached)


def ref(attempt: int) -> SequenceRef:
    return SequenceRef(request_id=KEY[0], choice=KEY[1], attempt=attempt)


def listed(
    attempt: int, tokens: int, end: FinishReason | None = None, state: SequenceState = SequenceState.DECODING
) -> SequenceReport:
    return sequence_report(
        ref(attempt),
        SequenceState.ENDED if end else state,
        prompt_tokens=3,
        generated_tokens=tokens,
        finish_reason=end,
    )


def begun() -> Stream:
    """Submitted, taken by the scheduler, two tokens received from A."""
    stream = Stream(KEY, TIMING, 0.0)
    assert stream.submit(0.0) == (Submit(1, 1),)
    assert stream.on_submitted(1, 0.1) == ()
    assert stream.on_delta(delta(1, 0, (10, 11)), A, 0.2) == ()
    stream.check_integrity()
    return stream
