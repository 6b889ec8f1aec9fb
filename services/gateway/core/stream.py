"""One sequence as the gateway that owns it sees it: which tokens count, and what to do when none come.

Pure. A `Stream` is told what happened (`on_x(event, now_s)`) and answers with effects for its shell to carry
out. It accepts a delta only of the current attempt, from the one worker that serves that attempt (the first
that proves that it was given it, by the capability that goes along with the submission), and only where it
joins what is held; whatever else happens it asks again, fetches, or hands the sequence over under a higher
attempt. It never waits without a reason to wake: every open stream reacts to `on_tick`. Knows neither
text nor HTTP.
"""

from enum import StrEnum
from hashlib import blake2b
from hmac import compare_digest

from services.gateway.core.effects import (
    Acknowledge,
    Cancel,
    Fetch,
    StreamEffects,
    StreamTiming,
    Submit,
    WorkerStart,
    disown,
)
from services.gateway.core.gap_fetch import Missing
from services.gateway.core.handover import OVERLAP_S, Overlap, agrees
from services.gateway.core.liveness import Signs
from shared.errors import CallerError, CreditorLost, InternalError, KvasirError, Overloaded
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import FinishReason, SequenceKey, SequenceRef, proof_of
from shared.messages.tokens import TokenDelta, TokenLogprobs

MAX_RETRY_S = 1.0
"""Tries of a submission come ever more rarely up to this: thousands of streams may wait for a scheduler."""
_MOST_DOUBLINGS = 10


class Submission:
    """The latest of one stream; answers to earlier ones mean nothing."""

    def __init__(self, timing: StreamTiming) -> None:
        self._timing = timing
        self._serial = 0
        self._is_under_way = False
        self._again_at_s: float | None = None
        self._failures = 0

    @property
    def is_settled(self) -> bool:
        """Neither under way nor to be tried again."""
        return not self._is_under_way and self._again_at_s is None

    def begin(self) -> int:
        """A new one goes out; its serial."""
        self._serial += 1
        self._is_under_way, self._again_at_s = True, None
        return self._serial

    def is_latest(self, serial: int) -> bool:
        return serial == self._serial

    def on_known(self) -> None:
        """The scheduler has it."""
        self._is_under_way, self._failures = False, 0

    def on_refused(self) -> None:
        """It failed; whether it is tried again (`again_later`) is the stream's to decide."""
        self._is_under_way = False

    def again_later(self, now_s: float) -> None:
        self._again_at_s = now_s + min(self._timing.retry_s * 2**self._failures, MAX_RETRY_S)
        self._failures = min(self._failures + 1, _MOST_DOUBLINGS)

    def is_due(self, now_s: float) -> bool:
        """To be tried again now."""
        return self._again_at_s is not None and now_s >= self._again_at_s

    def check_integrity(self) -> None:
        """AssertionError where one is under way and to be tried again."""
        assert not (self._is_under_way and self._again_at_s is not None)


class Faults:
    """Of one stream. Losses of lent KV count as long as no token comes in between."""

    def __init__(self, timing: StreamTiming) -> None:
        self._timing = timing
        self._internal_errors = 0
        self._kv_losses = 0
        self._tokens_at_loss = -1

    def on_internal_error(self) -> bool:
        """Of the scheduler, or of an engine; true when that was one too many."""
        self._internal_errors += 1
        return self._internal_errors >= self._timing.max_internal_errors

    def on_end(self, reason: FinishReason, tokens: int) -> KvasirError | None:
        """An attempt ended without an answer, with so many tokens held; the error to end the stream with."""
        if reason is FinishReason.KV_LOST:
            has_gone_on = tokens > self._tokens_at_loss
            self._kv_losses = 1 if has_gone_on else self._kv_losses + 1
            self._tokens_at_loss = tokens
            if self._kv_losses >= self._timing.max_kv_losses:
                return CreditorLost(
                    f"workers that lent KV for this request were lost {self._kv_losses} times in a row"
                    " without a new token: try again later, or ask for less",
                    retry_after_s=5.0,
                )
        elif reason is not FinishReason.GATEWAY_LOST and self.on_internal_error():
            return InternalError(f"the engine ended the sequence {self._internal_errors} times")
        return None


ANSWERS = (FinishReason.STOP, FinishReason.LENGTH)


class StreamPhase(StrEnum):
    OPEN = "open"
    ENDED = "ended"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Stream:
    """The gateway's record of one sequence. `tokens` is the answer so far and only ever grows."""

    def __init__(self, key: SequenceKey, timing: StreamTiming, now_s: float, secret: bytes = b"") -> None:
        """`secret` is what capabilities are made from; without one whoever speaks first serves an attempt."""
        self.key = key
        self._secret = secret
        self.tokens: list[int] = []
        self.logprobs: dict[int, TokenLogprobs] = {}
        """By index in the answer, until its reader takes them."""
        self.attempt = 1
        self.phase = StreamPhase.OPEN
        self.finish_reason: FinishReason | None = None
        self.failure: KvasirError | None = None
        self.accepted = False
        self.cached_tokens = 0
        self.server: WorkerStart | None = None
        self.handovers: dict[str, int] = {}
        self.stale_deltas = 0
        self._signs = Signs(timing, now_s)
        self._submission = Submission(timing)
        self._missing = Missing(timing)
        self._faults = Faults(timing)
        self._before: Overlap | None = None
        """Of a hand-over that was prepared, until the new attempt has said something new."""

    @property
    def is_open(self) -> bool:
        return self.phase is StreamPhase.OPEN

    @property
    def ref(self) -> SequenceRef:
        return SequenceRef(request_id=self.key[0], choice=self.key[1], attempt=self.attempt)

    @property
    def capability(self) -> bytes:
        """Of the current attempt: for whom the scheduler gives it to, and nobody else to guess."""
        if not self._secret:
            return b""
        return blake2b(str(self.ref).encode(), key=self._secret, digest_size=16).digest()

    def open_tokens(self, max_tokens: int) -> int:
        """That may follow a submission made now, from the former worker."""
        return 0 if self._before is None else self._before.open_for(max_tokens - len(self.tokens))

    def reads(self, attempt: int) -> bool:
        """Whether tokens of that attempt may count."""
        return attempt == self.attempt or (self._before is not None and attempt == self._before.ref.attempt)

    # --- the scheduler

    def submit(self, now_s: float) -> StreamEffects:
        """Submit (again) under the current attempt: at the start, and to a new scheduler."""
        if not self.is_open:
            return ()
        return (Submit(self.attempt, self._submission.begin()),)

    def on_submitted(self, serial: int, now_s: float) -> StreamEffects:
        """The scheduler knows the attempt."""
        if not self.is_open or not self._submission.is_latest(serial):
            return ()
        self._submission.on_known()
        self.accepted = True
        self._signs.on_scheduler(now_s)
        return ()

    def on_submit_failed(self, serial: int, error: KvasirError, now_s: float) -> StreamEffects:
        """Refusals end a stream (overload only one that is not accepted yet), and so do repeated errors of
        the scheduler; anything else is tried again."""
        if not self.is_open or not self._submission.is_latest(serial):
            return ()
        self._submission.on_refused()
        if isinstance(error, CallerError) or (isinstance(error, Overloaded) and not self.accepted):
            return self._fail(error)
        if isinstance(error, InternalError) and self._faults.on_internal_error():
            return self._fail(error)
        self._submission.again_later(now_s)
        return ()

    # --- workers

    def on_delta(self, delta: TokenDelta, worker: WorkerStart, now_s: float) -> StreamEffects:
        """Tokens from a frame or a fetch."""
        if self._before is not None and self.is_open and delta.attempt == self._before.ref.attempt:
            return self._on_late(self._before, delta, worker, now_s)
        if not self.is_open or delta.attempt != self.attempt or not self._is_proven(worker, delta.proof):
            self.stale_deltas += 1
            return ()
        if not self._is_served_by(worker, now_s):
            return self._hand_over("second_server", now_s)
        end = delta.first_index + len(delta.tokens)
        held = len(self.tokens)
        left: StreamEffects = () if self._before is None else self._before.on_target(end, held, now_s)
        if not agrees(delta, self.tokens):
            return self._hand_over("diverged", now_s)
        if end > held:
            self._before = None
        return (*left, *self._join(delta, worker, now_s))

    def _join(self, delta: TokenDelta, worker: WorkerStart, now_s: float) -> StreamEffects:
        """A delta of the current attempt that agrees with what is held."""
        end = delta.first_index + len(delta.tokens)
        held = len(self.tokens)
        if delta.first_index > held:
            self._missing.on_gap(end, ended=delta.finish_reason is not None, now_s=now_s)
            return self._fetch_if_due(now_s)
        if end > held:
            self.tokens.extend(delta.tokens[held - delta.first_index :])
            self.logprobs.update(
                zip(range(held, end), delta.logprobs[held - delta.first_index :], strict=False)
            )
        self.cached_tokens = self.cached_tokens or delta.cached_tokens
        if delta.finish_reason is not None and end >= held:
            return self._end(delta.finish_reason, worker, now_s)
        return ()

    def _on_late(
        self, before: Overlap, delta: TokenDelta, worker: WorkerStart, now_s: float
    ) -> StreamEffects:
        """The former attempt goes on while the new one gets ready."""
        effects, reason = before.on_source(delta, worker, self.tokens, self.ref, now_s)
        if reason is not None:
            self._before = None
        if reason not in ANSWERS:
            return effects
        self._finish(reason)
        return (*effects, Cancel(self.ref, before.target))

    def on_report(self, report: SequenceReport, worker: WorkerStart, now_s: float) -> StreamEffects:
        """A worker's heartbeat lists this sequence."""
        if self.is_open and self._before is not None and report.ref == self._before.ref:
            return ()
        if not self.is_open or report.ref.attempt < self.attempt:
            return (disown(report, worker, goes_on=self.is_open),)
        if report.ref.attempt > self.attempt or not self._is_proven(worker, report.proof):
            return ()
        if not self._is_served_by(worker, now_s):
            return self._hand_over("second_server", now_s)
        ended = report.state is SequenceState.ENDED
        if not ended and report.generated_tokens <= len(self.tokens):
            return ()
        self._missing.on_listed(report.generated_tokens, ended=ended, now_s=now_s)
        return self._fetch_if_due(now_s)

    def on_fetched(
        self, ref: SequenceRef, delta: TokenDelta | None, worker: WorkerStart, now_s: float
    ) -> StreamEffects:
        """The worker's answer to a fetch; None when it does not hold the attempt."""
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        self._missing.forget()
        if delta is None:
            return self._hand_over("not_held", now_s)
        return self.on_delta(delta, worker, now_s)

    def on_fetch_failed(self, ref: SequenceRef, now_s: float) -> StreamEffects:
        """No answer to a fetch. Repeated: the worker counts as lost for this sequence."""
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        return self._hand_over("fetch_failed", now_s) if self._missing.on_failed(now_s) else ()

    def on_worker_lost(self, worker: WorkerStart, lost_attempt: int | None, now_s: float) -> StreamEffects:
        """That run of a worker is over; `lost_attempt` is what its scheduler had sent it, if it says so."""
        if not self.is_open:
            return ()
        if self._before is not None and self._before.server == worker:
            self._before = None
        if self.server == worker or (self.server is None and lost_attempt == self.attempt):
            return self._hand_over("worker_lost", now_s)
        return ()

    def on_prepared(
        self, ref: SequenceRef, now_s: float, target: str = "", open_tokens: int = 0
    ) -> StreamEffects:
        """Another worker has all that is needed to go on: hand over what is held by now. With `open_tokens`
        the old one is read until the new one has something new to say."""
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        server = self.server
        effects = self._hand_over("moved", now_s)
        if not open_tokens or server is None:
            return effects
        self._before = Overlap(ref, server, target, open_tokens, now_s + OVERLAP_S)
        return tuple(effect for effect in effects if not isinstance(effect, Cancel))

    # --- time and the client

    def on_tick(self, now_s: float) -> StreamEffects:
        """To be called about ten times a second."""
        if not self.is_open:
            return ()
        error = self._signs.error(now_s)
        if error is not None:
            return (Cancel(self.ref, self.server[0] if self.server else None), *self._fail(error))
        if self._before is not None and now_s >= self._before.until_s:
            left, self._before = self._before.leave(), None
            return left
        if self._submission.is_due(now_s):
            return self.submit(now_s)
        if self._missing.is_anything:
            return self._fetch_if_due(now_s)
        if self.server is not None and self._signs.is_worker_silent(now_s):
            return self._hand_over("silent", now_s)
        if self._submission.is_settled and self._signs.is_audit_due(now_s):
            return self.submit(now_s)
        return ()

    def on_absence(self, now_s: float) -> StreamEffects:
        """Nobody heard of this gateway for so long that they may have ended what it has waiting."""
        return self._hand_over("absence", now_s) if self.is_open and self.server is None else ()

    def cancel(self) -> StreamEffects:
        """Nobody wants the rest: the client left, or a stop string was completed."""
        if not self.is_open:
            return ()
        self.phase = StreamPhase.CANCELLED
        left, target = self._leave_former()
        return (*left, Cancel(self.ref, self.server[0] if self.server else target))

    def check_integrity(self) -> None:
        """Raises AssertionError when the record contradicts itself."""
        assert self.attempt >= 1
        assert (self.phase is StreamPhase.ENDED) == (self.finish_reason is not None)
        assert self.finish_reason is None or self.finish_reason in ANSWERS
        assert (self.phase is StreamPhase.FAILED) == (self.failure is not None)
        assert self.attempt == 1 + sum(self.handovers.values())
        for part in (self._missing, self._submission, self._signs):
            part.check_integrity()

    # --- inside

    def _is_proven(self, worker: WorkerStart, proof: bytes) -> bool:
        """Whether it serves the attempt, or shows that it was given it."""
        return self.server == worker or compare_digest(proof, proof_of(self.capability, *worker))

    def _is_served_by(self, worker: WorkerStart, now_s: float) -> bool:
        """Binds the attempt to the first worker that shows it; two could differ in a near tie."""
        if self.server is not None and self.server != worker:
            return False
        self.server = worker
        self.accepted = True
        self._signs.on_worker(now_s)
        return True

    def _fetch_if_due(self, now_s: float) -> StreamEffects:
        if self.server is None or not self._missing.begin_fetch(len(self.tokens), now_s):
            return ()
        return (Fetch(self.server, self.ref, len(self.tokens)),)

    def _leave_former(self) -> tuple[StreamEffects, str | None]:
        """Reads the former attempt no more; also which worker was to take over from it."""
        before, self._before = self._before, None
        return ((), None) if before is None else (before.leave(), before.target)

    def _hand_over(self, cause: str, now_s: float) -> StreamEffects:
        """Raise the attempt: whatever lower ones still say is stale from here on."""
        left, _ = self._leave_former()
        if self.server is not None and cause != "worker_lost":
            left = (*left, Cancel(self.ref, self.server[0], is_final=False))
        self.handovers[cause] = self.handovers.get(cause, 0) + 1
        self.attempt += 1
        self.server = None
        self._missing.forget()
        self._signs.begin_anew()
        return (*left, *self.submit(now_s))

    def _end(self, reason: FinishReason, worker: WorkerStart, now_s: float) -> StreamEffects:
        seen = Acknowledge(worker[0], self.ref)
        if reason in ANSWERS:
            self._finish(reason)
            return (seen,)
        failure = self._faults.on_end(reason, len(self.tokens))
        if failure is not None:
            return (seen, *self._fail(failure))
        return (seen, *self._hand_over(f"ended_{reason}", now_s))

    def _finish(self, reason: FinishReason) -> None:
        self.phase, self.finish_reason = StreamPhase.ENDED, reason
        self._missing.forget()

    def _fail(self, error: KvasirError) -> StreamEffects:
        self.phase, self.failure = StreamPhase.FAILED, error
        return ()
