"""State machine of one sequence: which tokens count, and how to recover missing ones. Pure.

Each `on_x(event, now_s)` returns effects for the shell to carry out. A stream accepts deltas only of the
current attempt, from one worker, and only where they join the held tokens. That worker is the first to prove,
with the submission's capability, that it was given the attempt. Otherwise the stream resubmits, fetches, or
hands the sequence over under a higher attempt. Every open stream reacts to `on_tick`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from hmac import compare_digest

from services.gateway.core.effects import (
    Acknowledge,
    Cancel,
    Extend,
    Fetch,
    StreamEffects,
    Submit,
    disown,
)
from services.gateway.core.retries import Faults, GapFetch, SignsOfLife, StreamTiming, Submission
from shared.errors import (
    CallerError,
    ForeignSequence,
    InternalError,
    KvasirError,
    Overloaded,
    PolicyFailed,
    RoleMissing,
)
from shared.liveness import Start
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import FinishReason, SequenceKey, SequenceRef, proof_of
from shared.messages.tokens import TokenDelta, TokenLogprobs

FRESH_S = 0.003
"""Largest lag, in seconds, of the target behind the source for an early changeover."""
MOST_FRAMES = 8
"""Number of frames from the target after which the changeover no longer waits."""
LEFT_TOKENS = 32
"""Least number of remaining tokens for a hand-over with overlap."""
OVERLAP_S = 1.0
"""Seconds after which the source is stopped even if the target is silent."""


@dataclass(slots=True)
class Handover:
    """The previous attempt, still read until the next attempt catches up (docs/migration.md).

    Sampling depends on seed and index, so both workers compute the same answer; tokens of one index are
    compared. A stream has at most one overlap.
    """

    ref: SequenceRef
    """The previous attempt."""
    server: Start
    target: str
    open_tokens: int
    """Number of tokens the target accepts after the submission."""
    until_s: float
    heard_s: float = 0.0
    """Time of the source's last token."""
    frames: int = 0
    """Number of frames received from the target."""
    is_leaving: bool = False
    """The source was told to stop; its earlier tokens still count."""

    def leave(self) -> tuple[Cancel, ...]:
        """Tell the source to stop, once."""
        if self.is_leaving:
            return ()
        self.is_leaving = True
        return (Cancel(self.ref, self.server[0], is_final=False),)

    def open_for(self, left_tokens: int) -> int:
        """Return how many tokens may follow the submission; 0 near the answer's limit."""
        is_open = not self.is_leaving and left_tokens >= self.open_tokens + LEFT_TOKENS
        return self.open_tokens if is_open else 0

    def on_target(self, end: int, held: int, now_s: float) -> tuple[Cancel, ...]:
        """Process the target's tokens up to index `end`, with `held` held; stop the source if it is time."""
        self.frames += 1
        is_level = end == held and now_s - self.heard_s <= FRESH_S
        return self.leave() if end > held or is_level or self.frames >= MOST_FRAMES else ()

    def on_source(
        self, delta: TokenDelta, worker: Start, tokens: list[int], ref: SequenceRef, now_s: float
    ) -> tuple[StreamEffects, FinishReason | None]:
        """Append the source's new tokens to `tokens` and forward them to the target, whose attempt is `ref`.

        Also return the source's finish reason, if it ended.
        """
        held = len(tokens)
        if worker != self.server or delta.first_index > held:
            return (), None
        news = delta.tokens[held - delta.first_index :]
        tokens.extend(news)
        self.heard_s = now_s
        if delta.finish_reason is not None:
            return (Acknowledge(worker[0], self.ref),), delta.finish_reason
        if self.is_leaving or not news:
            return (), None
        return (Extend(self.target, ref, held, news),), None


def agrees(delta: TokenDelta, tokens: Sequence[int]) -> bool:
    """Whether the delta matches `tokens` at every index that both have."""
    first, both = delta.first_index, min(delta.first_index + len(delta.tokens), len(tokens))
    return delta.tokens[: max(0, both - first)] == tuple(tokens[first:both])


ANSWERS = (FinishReason.STOP, FinishReason.LENGTH)


class StreamPhase(StrEnum):
    OPEN = "open"
    ENDED = "ended"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Stream:
    """Record of one sequence. `tokens` is the answer so far; it only grows."""

    def __init__(self, key: SequenceKey, timing: StreamTiming, now_s: float, secret: bytes = b"") -> None:
        """`secret` derives the capabilities. Without it, the first worker to send tokens is accepted."""
        self.key = key
        self._secret = secret
        self.tokens: list[int] = []
        self.logprobs: dict[int, TokenLogprobs] = {}
        """By answer index, until the reader takes them."""
        self.attempt = 1
        self.phase = StreamPhase.OPEN
        self.finish_reason: FinishReason | None = None
        self.failure: KvasirError | None = None
        self.accepted = False
        self.cached_tokens = 0
        self.server: Start | None = None
        self.handovers: dict[str, int] = {}
        self.stale_deltas = 0
        self._signs = SignsOfLife(timing, now_s)
        self._submission = Submission(timing)
        self._missing = GapFetch(timing)
        self._faults = Faults(timing)
        self._before: Handover | None = None
        """A prepared hand-over, until the new attempt sends a new token."""

    @property
    def is_open(self) -> bool:
        return self.phase is StreamPhase.OPEN

    @property
    def ref(self) -> SequenceRef:
        return SequenceRef(request_id=self.key[0], choice=self.key[1], attempt=self.attempt)

    @property
    def capability(self) -> bytes:
        """Proof of assignment for the current attempt, sent only to the worker the scheduler chooses."""
        if not self._secret:
            return b""
        return blake2b(str(self.ref).encode(), key=self._secret, digest_size=16).digest()

    def open_tokens(self, max_tokens: int) -> int:
        """Number of tokens from the previous worker that may follow a submission made now."""
        return 0 if self._before is None else self._before.open_for(max_tokens - len(self.tokens))

    def reads(self, attempt: int) -> bool:
        """Whether tokens of that attempt may count."""
        return attempt == self.attempt or (self._before is not None and attempt == self._before.ref.attempt)

    def take_over(self, tokens: Sequence[int], reason: FinishReason | None, cached_tokens: int) -> None:
        """Adopt another gateway's partial answer. Call first. A reason outside ANSWERS does not end it."""
        self.tokens.extend(tokens)
        self.cached_tokens = cached_tokens
        if reason in ANSWERS:
            self.accepted = True
            self._finish(reason)

    # --- the scheduler

    def submit(self, now_s: float) -> StreamEffects:
        """Submit the current attempt, at the start or again."""
        if not self.is_open:
            return ()
        return (Submit(self.attempt, self._submission.begin()),)

    def on_submitted(self, serial: int, now_s: float) -> StreamEffects:
        """Note that the scheduler has accepted the attempt."""
        if not self.is_open or serial != self._submission.serial:
            return ()
        self._submission.on_known()
        self.accepted = True
        self._signs.on_scheduler(now_s)
        return ()

    def on_submit_failed(self, serial: int, error: KvasirError, now_s: float) -> StreamEffects:
        """End the stream on a refusal or repeated internal errors; otherwise retry.

        Overloaded, RoleMissing and ForeignSequence end only a stream that was never accepted.
        """
        if not self.is_open or serial != self._submission.serial:
            return ()
        self._submission.on_refused()
        if isinstance(error, Overloaded | RoleMissing | ForeignSequence):
            is_final = not self.accepted
        else:
            is_final = isinstance(error, CallerError | PolicyFailed)
        if is_final:
            return self._fail(error)
        if isinstance(error, InternalError) and self._faults.on_internal_error():
            return self._fail(error)
        self._submission.again_later(now_s)
        return ()

    # --- workers

    def on_delta(self, delta: TokenDelta, worker: Start, now_s: float) -> StreamEffects:
        """Process tokens from a frame or a fetch."""
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

    def _join(self, delta: TokenDelta, worker: Start, now_s: float) -> StreamEffects:
        """Append a delta of the current attempt that agrees with the held tokens."""
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

    def _on_late(self, before: Handover, delta: TokenDelta, worker: Start, now_s: float) -> StreamEffects:
        """Process tokens of the previous attempt during an overlap."""
        effects, reason = before.on_source(delta, worker, self.tokens, self.ref, now_s)
        if reason is not None:
            self._before = None
        if reason not in ANSWERS:
            return effects
        self._finish(reason)
        return (*effects, Cancel(self.ref, before.target))

    def on_report(self, report: SequenceReport, worker: Start, now_s: float) -> StreamEffects:
        """Process a heartbeat that lists this sequence."""
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
        self, ref: SequenceRef, delta: TokenDelta | None, worker: Start, now_s: float
    ) -> StreamEffects:
        """Process the reply to a fetch; None when the worker does not hold the attempt."""
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        self._missing.forget()
        if delta is None:
            return self._hand_over("not_held", now_s)
        return self.on_delta(delta, worker, now_s)

    def on_fetch_failed(self, ref: SequenceRef, now_s: float) -> StreamEffects:
        """Process a failed fetch. Repeated failures hand the sequence over."""
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        return self._hand_over("fetch_failed", now_s) if self._missing.on_failed(now_s) else ()

    def on_worker_lost(self, worker: Start, lost_attempt: int | None, now_s: float) -> StreamEffects:
        """Hand over if that run served this; `lost_attempt` is the attempt its scheduler had sent it."""
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
        """Hand over to a worker that is prepared.

        With `open_tokens`, keep reading the old worker until the new one sends a new token.
        """
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        server = self.server
        effects = self._hand_over("moved", now_s)
        if not open_tokens or server is None:
            return effects
        self._before = Handover(ref, server, target, open_tokens, now_s + OVERLAP_S)
        return tuple(effect for effect in effects if not isinstance(effect, Cancel))

    # --- time and the client

    def on_tick(self, now_s: float) -> StreamEffects:
        """Advance the timeouts. Call about ten times a second."""
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
        """Hand over if unserved: this gateway was silent so long that others may have ended the sequence."""
        return self._hand_over("absence", now_s) if self.is_open and self.server is None else ()

    def on_inherited(self, now_s: float) -> StreamEffects:
        """Hand over: another gateway took this one for dead and made workers forget the sequence."""
        return self._hand_over("inherited", now_s) if self.is_open else ()

    def cancel(self) -> StreamEffects:
        """Cancel the rest: the client left, or a stop string is complete."""
        if not self.is_open:
            return ()
        self.phase = StreamPhase.CANCELLED
        left, target = self._leave_former()
        return (*left, Cancel(self.ref, self.server[0] if self.server else target))

    def check_integrity(self) -> None:
        """Raise AssertionError when the record contradicts itself."""
        assert self.attempt >= 1
        assert (self.phase is StreamPhase.ENDED) == (self.finish_reason is not None)
        assert self.finish_reason is None or self.finish_reason in ANSWERS
        assert (self.phase is StreamPhase.FAILED) == (self.failure is not None)
        assert self.attempt == 1 + sum(self.handovers.values())
        for part in (self._missing, self._submission, self._signs):
            part.check_integrity()

    # --- inside

    def _is_proven(self, worker: Start, proof: bytes) -> bool:
        """Whether the worker serves the attempt, or proves that it was given it."""
        return self.server == worker or compare_digest(proof, proof_of(self.capability, *worker))

    def _is_served_by(self, worker: Start, now_s: float) -> bool:
        """Bind the attempt to the first worker that proves it; two workers could differ in a near tie."""
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
        """Stop reading the previous attempt; also return its target worker."""
        before, self._before = self._before, None
        return ((), None) if before is None else (before.leave(), before.target)

    def _hand_over(self, cause: str, now_s: float) -> StreamEffects:
        """Raise the attempt; later messages of lower attempts are stale."""
        left, _ = self._leave_former()
        if self.server is not None and cause != "worker_lost":
            left = (*left, Cancel(self.ref, self.server[0], is_final=False))
        self.handovers[cause] = self.handovers.get(cause, 0) + 1
        self.attempt += 1
        self.server = None
        self._missing.forget()
        self._signs.begin_anew()
        return (*left, *self.submit(now_s))

    def _end(self, reason: FinishReason, worker: Start, now_s: float) -> StreamEffects:
        seen = Acknowledge(worker[0], self.ref)
        if reason in ANSWERS:
            self._finish(reason)
            return (seen,)
        failure = self._faults.on_end(reason, len(self.tokens))
        if failure is not None:
            return (seen, *self._fail(failure))
        return (seen, *self._hand_over(f"ended_{reason}", now_s))

    def _finish(self, reason: FinishReason | None) -> None:
        self.phase, self.finish_reason = StreamPhase.ENDED, reason
        self._missing.forget()

    def _fail(self, error: KvasirError) -> StreamEffects:
        self.phase, self.failure = StreamPhase.FAILED, error
        return ()
