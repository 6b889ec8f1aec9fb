"""The former worker is read on until the next one has caught up; nothing twice, nothing missing, one text."""

from services.gateway.core.effects import Acknowledge, Cancel, Extend, Submit
from services.gateway.core.stream import FRESH_S, LEFT_TOKENS, OVERLAP_S, Stream, StreamPhase, StreamTiming
from shared.messages.sequence import FinishReason
from shared.messages.tokens import TokenDelta
from tests.shared.messages.builders import ref

OLD, NEW = ("a", 1), ("b", 1)


def delta(attempt: int, first: int, *tokens: int, reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta("r", 0, attempt, first, tokens, reason)


def moving() -> Stream:
    """Three tokens held, and a target that is prepared."""
    stream = Stream(("r", 0), StreamTiming(), 0.0)
    stream.submit(0.0)
    stream.on_delta(delta(1, 0, 10, 11, 12), OLD, 0.1)
    assert stream.on_prepared(ref("r", 1), 0.2, "b", 4) == (Submit(2, 2),), "the source is not told to stop"
    return stream


def test_what_the_source_says_counts_and_is_passed_on() -> None:
    stream = moving()
    assert stream.on_delta(delta(1, 3, 13), OLD, 0.21) == (Extend("b", ref("r", 2), 3, (13,)),)
    assert stream.tokens == [10, 11, 12, 13]
    assert stream.on_delta(delta(1, 6, 16), OLD, 0.22) == (), "a gap is the target's to fill"
    assert stream.on_delta(delta(1, 4, 14), ("c", 1), 0.22) == (), "not the source"
    stream.check_integrity()


def test_the_source_stops_when_the_target_is_level_and_what_it_said_before_still_counts() -> None:
    stream = moving()
    stream.on_delta(delta(1, 3, 13), OLD, 0.210)
    late_s = 0.210 + 2 * FRESH_S
    assert stream.on_delta(delta(2, 3, 13), NEW, late_s) == (), "not a good moment yet"
    stream.on_delta(delta(1, 4, 14), OLD, 0.220)
    level = stream.on_delta(delta(2, 4, 14), NEW, 0.221)
    assert level == (Cancel(ref("r", 1), "a", is_final=False),)
    assert stream.on_delta(delta(1, 5, 15), OLD, 0.222) == (), "counts, and nobody needs to hear of it"
    assert stream.on_delta(delta(2, 5, 15, 16), NEW, 0.23) == ()
    assert stream.tokens == [10, 11, 12, 13, 14, 15, 16]
    assert stream.on_delta(delta(1, 7, 99), OLD, 0.24) == () and stream.tokens[-1] == 16
    stream.check_integrity()


def test_answers_that_differ_are_handed_over_again_and_the_reader_keeps_what_it_has() -> None:
    stream = moving()
    stream.on_delta(delta(1, 3, 13), OLD, 0.21)
    effects = stream.on_delta(delta(2, 3, 77), NEW, 0.22)
    assert Submit(3, 3) in effects and Cancel(ref("r", 2), "b", is_final=False) in effects
    assert stream.tokens == [10, 11, 12, 13] and stream.handovers["diverged"] == 1
    stream.check_integrity()


def test_an_answer_that_ends_at_the_source_ends() -> None:
    stream = moving()
    effects = stream.on_delta(delta(1, 3, 13, reason=FinishReason.STOP), OLD, 0.21)
    assert effects == (Acknowledge("a", ref("r", 1)), Cancel(ref("r", 2), "b"))
    assert stream.phase is StreamPhase.ENDED and stream.tokens[-1] == 13


def test_deaths_and_silence_end_it() -> None:
    stream = moving()
    assert stream.on_worker_lost(OLD, 1, 0.3) == (), "the target goes on"
    assert stream.on_delta(delta(1, 3, 13), OLD, 0.31) == () and len(stream.tokens) == 3
    stream = moving()
    assert stream.on_tick(0.2 + OVERLAP_S) == (Cancel(ref("r", 1), "a", is_final=False),)
    stream = moving()
    assert set(stream.cancel()) == {Cancel(ref("r", 1), "a", is_final=False), Cancel(ref("r", 2), "b")}


def test_near_the_limit_nothing_is_left_open() -> None:
    stream = moving()
    assert stream.open_tokens(3 + 4 + LEFT_TOKENS) == 4
    assert stream.open_tokens(3 + 3 + LEFT_TOKENS) == 0
