"""One sequence against everything that may happen to it: the true tokens, each once, or it stays open. A
submission that fails is repeated ever more rarely; only the answer to the latest counts. A stream whose
attempts end without an answer: how often, and what its client is told."""

import msgspec
import pytest
from hypothesis import settings

from services.gateway.core.stream import (
    FRESH_S,
    LEFT_TOKENS,
    MAX_KV_LOSSES,
    OVERLAP_S,
    Acknowledge,
    Cancel,
    Extend,
    Fetch,
    Stream,
    StreamEffects,
    StreamPhase,
    Submit,
)
from shared.errors import (
    CreditorLost,
    DeadlineExceeded,
    ForeignSequence,
    InternalError,
    InvalidRequest,
    KvasirError,
    NoResponder,
    Overloaded,
    RoleMissing,
)
from shared.messages.sequence import FinishReason, proof_of
from shared.messages.tokens import TokenDelta, TokenLogprobs
from tests.services.gateway.core.stream_world import KEY, TIMING, A, Anything, B, begun, delta, listed, ref

TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_tokens_are_taken_once_and_in_order() -> None:
    stream = begun()
    stream.on_delta(delta(1, 0, (10, 11)), A, 0.3)
    stream.on_delta(delta(1, 1, (11, 12)), A, 0.3)
    assert stream.tokens == [10, 11, 12]
    assert stream.on_delta(delta(1, 3, (13,), FinishReason.STOP), A, 0.4) == (Acknowledge("a", ref(1)),)
    assert (stream.tokens, stream.phase) == ([10, 11, 12, 13], StreamPhase.ENDED)
    assert stream.finish_reason is FinishReason.STOP
    stream.check_integrity()


def test_a_gap_is_fetched() -> None:
    stream = begun()
    assert stream.on_delta(delta(1, 5, (15,)), A, 0.3) == (Fetch(A, ref(1), 2),)
    assert stream.on_delta(delta(1, 6, (16,)), A, 0.3) == (), "one fetch at a time"
    stream.on_fetched(ref(1), delta(1, 2, (12, 13, 14, 15, 16)), A, 0.4)
    assert stream.tokens == [10, 11, 12, 13, 14, 15, 16]


def test_a_lost_last_frame_is_fetched_when_a_heartbeat_shows_the_end() -> None:
    stream = begun()
    assert stream.on_report(listed(1, 3, FinishReason.LENGTH), A, 1.0) == (), "the frame may be on its way"
    assert stream.on_tick(1.2) == () and stream.on_tick(1.3) == (Fetch(A, ref(1), 2),)
    ended = stream.on_fetched(ref(1), delta(1, 2, (12,), FinishReason.LENGTH), A, 1.4)
    assert ended == (Acknowledge("a", ref(1)),) and stream.tokens == [10, 11, 12]


def test_a_lost_worker_means_a_higher_attempt_and_its_late_frames_mean_nothing() -> None:
    stream = begun()
    assert stream.on_worker_lost(A, 1, 1.0) == (Submit(2, 2),)
    assert stream.on_delta(delta(1, 2, (99,)), A, 1.1) == ()
    assert stream.on_report(listed(1, 9), A, 1.1) == (Cancel(ref(1), "a", is_final=False),)
    assert stream.on_report(listed(1, 9, FinishReason.STOP), A, 1.1) == (Acknowledge("a", ref(1)),)
    stream.on_delta(delta(2, 2, (12,)), B, 1.2)
    assert stream.tokens == [10, 11, 12] and stream.server == B and stream.handovers == {"worker_lost": 1}


def test_a_prepared_move_hands_over_what_is_held_and_the_source_is_told() -> None:
    stream = begun()
    assert stream.on_prepared(ref(2), 1.0) == (), "of an attempt that is not there yet"
    assert stream.on_prepared(ref(1), 1.0) == (Cancel(ref(1), "a", is_final=False), Submit(2, 2))
    assert stream.on_prepared(ref(1), 1.0) == (), "once"
    stream.on_delta(delta(1, 2, (99,)), A, 1.1)
    stream.on_delta(delta(2, 2, (12,), FinishReason.STOP), B, 1.2)
    assert (stream.tokens, stream.handovers) == ([10, 11, 12], {"moved": 1})
    assert stream.on_prepared(ref(2), 1.3) == (), "it is over"


def test_fetches_are_repeated_and_then_given_up() -> None:
    stream = begun()
    effects: StreamEffects = stream.on_delta(delta(1, 5, (15,)), A, 0.3)
    now_s, fetches = 0.3, 0
    while stream.attempt == 1:
        assert isinstance(effects[0], Fetch)
        fetches += 1
        effects = stream.on_fetch_failed(ref(1), now_s)
        now_s += 0.3
        effects = effects or stream.on_tick(now_s)
    assert fetches == 5


def test_silence_is_audited_under_the_same_attempt() -> None:
    stream = Stream(KEY, TIMING, 0.0)
    stream.submit(0.0)
    stream.on_submitted(1, 0.0)
    assert stream.on_tick(2.9) == () and stream.on_tick(3.0) == (Submit(1, 2),)
    assert stream.on_tick(3.5) == (), "the answer is still due"
    stream.on_submitted(2, 3.5)
    assert stream.on_tick(9.0) == (), "the second audit waits longer"
    assert stream.on_tick(9.5) == (Submit(1, 3),)


def test_a_worker_that_lists_it_no_more_loses_it() -> None:
    stream = begun()
    now_s = 0.2
    while stream.attempt == 1 and now_s < 20:
        now_s += 0.1
        for effect in stream.on_tick(now_s):
            if isinstance(effect, Submit):
                stream.on_submitted(effect.serial, now_s)
    assert stream.handovers == {"silent": 1} and 6 <= now_s <= 6.5


def test_a_new_scheduler_gets_the_same_attempt() -> None:
    stream = begun()
    assert stream.submit(1.0) == (Submit(1, 2),)
    assert stream.on_submit_failed(1, NoResponder("old"), 1.0) == (), "an answer to an earlier submission"
    stream.on_submit_failed(2, NoResponder("gone"), 1.0)
    assert stream.on_tick(1.1) == () and stream.on_tick(1.2) == (Submit(1, 3),)


def test_tries_come_ever_more_rarely_up_to_once_a_second() -> None:
    stream = Stream(KEY, TIMING, 0.0)
    stream.submit(0.0)
    now_s, tries = 0.0, []
    for serial in range(1, 7):
        stream.on_submit_failed(serial, NoResponder("away"), now_s)
        while not stream.on_tick(now_s):
            now_s = round(now_s + 0.1, 1)
        tries.append(now_s)
    assert tries == pytest.approx([0.2, 0.6, 1.4, 2.4, 3.4, 4.4], abs=0.5)
    assert tries[-1] - tries[-2] == pytest.approx(1.0, abs=0.11)


@pytest.mark.parametrize("error", [Overloaded("full"), RoleMissing("none"), ForeignSequence("not the first")])
def test_what_passes_refuses_only_what_was_not_accepted(error: KvasirError) -> None:
    """Keeps a gateway that submits another's names to a new scheduler from ending what runs under them."""
    fresh = Stream(KEY, TIMING, 0.0)
    fresh.submit(0.0)
    fresh.on_submit_failed(1, error, 0.1)
    assert fresh.failure is error
    running = begun()
    running.submit(1.0)
    running.on_submit_failed(2, error, 1.1)
    assert running.is_open and running.on_tick(2.0) == (Submit(1, 3),)
    running.on_submit_failed(3, InvalidRequest("no"), 2.1)
    assert running.phase is StreamPhase.FAILED


def test_after_an_absence_what_waits_is_handed_over_and_what_runs_is_not() -> None:
    waiting = Stream(KEY, TIMING, 0.0)
    waiting.submit(0.0)
    waiting.on_submitted(1, 0.1)
    assert waiting.on_silence(20.0) == (Submit(2, 2),) and begun().on_silence(20.0) == ()


def test_what_an_heir_has_taken_over_goes_on_under_a_new_attempt() -> None:
    """Workers were told in this gateway's name to forget the attempt: none takes it up again. It waited for
    40 s, and failed."""
    stream = begun()
    stream.on_delta(delta(1, 2, (12,)), A, 0.3)
    assert stream.on_silence(1.0, is_inherited=True)[-1] == Submit(2, 2)
    stream.on_delta(delta(2, 3, (13,), FinishReason.LENGTH), B, 1.1)
    assert (stream.tokens, stream.phase) == ([10, 11, 12, 13], StreamPhase.ENDED)
    assert stream.on_silence(1.2, is_inherited=True) == ()


def test_nobody_answering_ends_in_failure() -> None:
    stream = begun()
    effects = stream.on_tick(60.3)
    assert effects == (Cancel(ref(1), "a"),) and isinstance(stream.failure, DeadlineExceeded)
    stream.check_integrity()


@pytest.mark.parametrize("reason", [FinishReason.GATEWAY_LOST, FinishReason.KV_LOST])
def test_an_end_that_is_no_fault_of_the_engine_is_no_end(reason: FinishReason) -> None:
    stream = begun()
    for attempt in range(1, 5):
        effects = stream.on_delta(delta(attempt, 2, (), reason), A, 1.0)
        assert effects[0] == Acknowledge("a", ref(attempt))
        assert effects[-1] == Submit(attempt + 1, attempt + 1)
    assert stream.is_open


def test_cancelling_tells_scheduler_and_worker_once() -> None:
    stream = begun()
    assert stream.cancel() == (Cancel(ref(1), "a"),) and stream.cancel() == ()
    assert stream.on_tick(100.0) == stream.submit(100.0) == stream.on_worker_lost(A, 1, 100.0) == ()
    assert stream.on_delta(delta(1, 2, (12,)), A, 1.0) == () and stream.tokens == [10, 11]


def test_log_probabilities_of_new_tokens_only_are_kept_over_overlaps_gaps_and_resumes() -> None:
    def with_logprobs(attempt: int, first: int, last: int) -> TokenDelta:
        values = tuple(TokenLogprobs(-at - attempt / 10) for at in range(first, last))
        return TokenDelta(*KEY, attempt, first, tuple(range(first, last)), logprobs=values)

    stream = Stream(KEY, TIMING, 0.0)
    stream.on_delta(with_logprobs(1, 0, 3), A, 1.0)
    stream.on_delta(with_logprobs(1, 1, 5), A, 1.0)
    stream.on_delta(with_logprobs(1, 6, 7), A, 1.0)
    assert {at: kept.chosen for at, kept in stream.logprobs.items()} == {at: -at - 0.1 for at in range(5)}
    stream.on_worker_lost(A, 1, 2.0)
    stream.on_delta(with_logprobs(2, 5, 7), B, 3.0)
    assert [stream.logprobs[at].chosen for at in range(7)] == [-0.1, -1.1, -2.1, -3.1, -4.1, -5.2, -6.2]
    stream.on_delta(delta(2, 7, (7,)), B, 3.0)
    assert 7 not in stream.logprobs, "a worker that sends none is taken at its word"


def test_only_who_was_given_the_attempt_may_speak_for_it() -> None:
    """A worker that has read a sequence's name somewhere neither serves it nor disturbs who does."""
    stream = Stream(KEY, TIMING, 0.0, secret=b"of this gateway")
    stream.submit(0.0)
    stream.on_submitted(1, 0.1)
    proofs = {worker: proof_of(stream.capability, *worker) for worker in (A, B)}
    proven = [msgspec.structs.replace(delta(1, 0, (10, 11)), proof=proofs[worker]) for worker in (A, B)]
    forged = (
        delta(1, 0, (66,), FinishReason.STOP),
        proven[0],
        msgspec.structs.replace(proven[0], proof=b"x"),
    )
    for one in forged:
        assert stream.on_delta(one, B, 0.2) == ()
    claim = msgspec.structs.replace(listed(1, 9), proof=proofs[A])
    assert stream.on_report(claim, B, 0.2) == () and stream.on_report(listed(1, 9), B, 0.2) == ()
    assert (stream.tokens, stream.server) == ([], None)
    stream.on_delta(proven[0], A, 0.3)
    for one in (*forged, delta(1, 2, (66,))):
        assert stream.on_delta(one, B, 0.4) == ()
    assert stream.on_report(claim, B, 0.4) == ()
    assert (stream.tokens, stream.server, stream.handovers) == ([10, 11], A, {})
    stream.on_delta(delta(1, 2, (12,)), A, 0.5)
    assert stream.tokens == [10, 11, 12], "once proven, its frames need no proof"
    assert Submit(2, 2) in stream.on_delta(proven[1], B, 0.6), "two were given it: neither goes on"
    stream.on_delta(proven[0], A, 0.7)
    assert stream.server is None and proof_of(stream.capability, *A) != proofs[A]


LOST = FinishReason.KV_LOST


def test_losses_count_while_no_token_comes_in_between() -> None:
    stream = begun()
    for attempt in range(1, 2 * MAX_KV_LOSSES):
        if attempt == MAX_KV_LOSSES:
            stream.on_delta(delta(attempt, 2, (12,)), A, 1.0)
        stream.on_delta(delta(attempt, len(stream.tokens), (), LOST), A, 1.0)
    assert isinstance(stream.failure, CreditorLost) and stream.failure.retry_after_s
    assert "lost 5 times" in stream.failure.message and stream.phase is StreamPhase.FAILED
    stream.check_integrity()
    assert stream.attempt == 2 * MAX_KV_LOSSES - 1


def test_errors_of_scheduler_and_engines_count_together() -> None:
    stream = begun()
    stream.submit(1.0)
    stream.on_submit_failed(2, InternalError("x"), 1.0)
    stream.on_delta(delta(1, 2, (), FinishReason.ERROR), A, 1.1)
    stream.on_delta(delta(2, 2, (), FinishReason.GATEWAY_LOST), A, 1.2)
    assert stream.is_open
    stream.on_delta(delta(3, 2, (), FinishReason.ERROR), A, 1.3)
    assert isinstance(stream.failure, InternalError)


def test_a_heartbeat_proves_it_too() -> None:
    """Where the first frame was lost, what it missed is fetched, and so on."""
    stream = Stream(KEY, TIMING, 0.0, secret=b"of this gateway")
    stream.submit(0.0)
    proof = proof_of(stream.capability, *A)
    stream.on_report(msgspec.structs.replace(listed(1, 0), proof=proof), A, 0.2)
    assert stream.server == A
    assert Fetch(A, ref(1), 0) in (*stream.on_delta(delta(1, 2, (12,)), A, 0.3), *stream.on_tick(0.9))


def said(attempt: int, first: int, *tokens: int, reason: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(*KEY, attempt, first, tokens, reason)


def moving() -> Stream:
    """Three tokens held, and a target that is prepared."""
    stream = Stream(KEY, TIMING, 0.0)
    stream.submit(0.0)
    stream.on_delta(said(1, 0, 10, 11, 12), A, 0.1)
    assert stream.on_prepared(ref(1), 0.2, "b", 4) == (Submit(2, 2),), "the source is not told to stop"
    return stream


def test_what_the_source_says_counts_and_is_passed_on() -> None:
    stream = moving()
    assert stream.on_delta(said(1, 3, 13), A, 0.21) == (Extend("b", ref(2), 3, (13,)),)
    assert stream.tokens == [10, 11, 12, 13]
    assert stream.on_delta(said(1, 6, 16), A, 0.22) == (), "a gap is the target's to fill"
    assert stream.on_delta(said(1, 4, 14), ("c", 1), 0.22) == (), "not the source"
    stream.check_integrity()


def test_the_source_stops_when_the_target_is_level_and_what_it_said_before_still_counts() -> None:
    stream = moving()
    stream.on_delta(said(1, 3, 13), A, 0.210)
    late_s = 0.210 + 2 * FRESH_S
    assert stream.on_delta(said(2, 3, 13), B, late_s) == (), "not a good moment yet"
    stream.on_delta(said(1, 4, 14), A, 0.220)
    level = stream.on_delta(said(2, 4, 14), B, 0.221)
    assert level == (Cancel(ref(1), "a", is_final=False),)
    assert stream.on_delta(said(1, 5, 15), A, 0.222) == (), "counts, and nobody needs to hear of it"
    assert stream.on_delta(said(2, 5, 15, 16), B, 0.23) == ()
    assert stream.tokens == [10, 11, 12, 13, 14, 15, 16]
    assert stream.on_delta(said(1, 7, 99), A, 0.24) == () and stream.tokens[-1] == 16
    stream.check_integrity()


def test_answers_that_differ_are_handed_over_again_and_the_reader_keeps_what_it_has() -> None:
    stream = moving()
    stream.on_delta(said(1, 3, 13), A, 0.21)
    effects = stream.on_delta(said(2, 3, 77), B, 0.22)
    assert Submit(3, 3) in effects and Cancel(ref(2), "b", is_final=False) in effects
    assert stream.tokens == [10, 11, 12, 13] and stream.handovers["diverged"] == 1
    stream.check_integrity()


def test_an_answer_that_ends_at_the_source_ends() -> None:
    stream = moving()
    effects = stream.on_delta(said(1, 3, 13, reason=FinishReason.STOP), A, 0.21)
    assert effects == (Acknowledge("a", ref(1)), Cancel(ref(2), "b"))
    assert stream.phase is StreamPhase.ENDED and stream.tokens[-1] == 13


def test_deaths_and_silence_end_it() -> None:
    stream = moving()
    assert stream.on_worker_lost(A, 1, 0.3) == (), "the target goes on"
    assert stream.on_delta(said(1, 3, 13), A, 0.31) == () and len(stream.tokens) == 3
    stream = moving()
    assert stream.on_tick(0.2 + OVERLAP_S) == (Cancel(ref(1), "a", is_final=False),)
    stream = moving()
    assert set(stream.cancel()) == {Cancel(ref(1), "a", is_final=False), Cancel(ref(2), "b")}


def test_near_the_limit_nothing_is_left_open() -> None:
    stream = moving()
    assert stream.open_tokens(3 + 4 + LEFT_TOKENS) == 4 and stream.open_tokens(3 + 3 + LEFT_TOKENS) == 0
