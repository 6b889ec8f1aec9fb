"""State machine of one sequence: which tokens count, and how to recover missing ones. Pure. Tokens count only
of the current attempt and from the first worker that proves, with the submission's capability, that it was
given the attempt. Otherwise the stream resubmits, fetches, or hands over under a higher attempt."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from hmac import compare_digest

from shared.errors import (
    CallerError,
    CreditorLost,
    DeadlineExceeded,
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


@dataclass(frozen=True, slots=True)
class Submit:
    """Send the scheduler the prompt and held tokens as `attempt`; report the result with `serial`."""

    attempt: int
    serial: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch the tokens from `first_index` on from the worker."""

    worker: Start
    ref: SequenceRef
    first_index: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the worker that this end was seen and can be forgotten."""

    worker_id: str
    ref: SequenceRef


@dataclass(frozen=True, slots=True)
class Cancel:
    """End this and lower attempts at the worker, if known; also at the scheduler if `is_final`."""

    ref: SequenceRef
    worker_id: str | None
    is_final: bool = True
    """False when a higher attempt follows: its submission informs the scheduler."""


@dataclass(frozen=True, slots=True)
class Extend:
    """Send the target of a hand-over the tokens that the source has computed since."""

    worker_id: str
    ref: SequenceRef
    first_index: int
    tokens: tuple[int, ...]


StreamEffect = Submit | Fetch | Acknowledge | Cancel | Extend
StreamEffects = tuple[StreamEffect, ...]


def disown(report: SequenceReport, worker: Start, *, goes_on: bool) -> Acknowledge | Cancel:
    """Return the reply to a worker that lists an orphan sequence, or a stale attempt (`goes_on`)."""
    if report.state is SequenceState.ENDED:
        return Acknowledge(worker[0], report.ref)
    return Cancel(report.ref, worker[0], is_final=not goes_on)


FRESH_S = 0.003
"""Largest lag, in seconds, of the target behind the source for an early changeover."""
MOST_FRAMES = 8
"""Number of frames from the target after which the changeover no longer waits."""
LEFT_TOKENS = 32
"""Least number of remaining tokens for a hand-over with overlap."""
OVERLAP_S = 1.0
"""Seconds after which the source is stopped even if the target is silent."""

MAX_RETRY_S = 1.0
"""Longest delay between submissions: thousands of streams may wait for a scheduler."""
_MOST_DOUBLINGS = 10
MAX_AUDIT_FACTOR = 4
"""The audit interval doubles up to this multiple of `frame_timeout_s`."""
MAX_FETCH_FAILURES = 5
"""Number of failed fetches in a row after which the worker counts as lost for this sequence."""
MAX_INTERNAL_ERRORS = 3
MAX_KV_LOSSES = 5
FETCH_GRACE_S = 0.25
"""Time by which a heartbeat may overtake the frames it counts."""
RETRY_S = 0.2
ANSWERS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """Timeouts of a stream, in seconds."""

    frame_timeout_s: float = 3.0
    """Silence after which the stream audits: it resubmits the same attempt."""
    give_up_s: float = 60.0
    """Silence of all parties after which the stream fails."""


@dataclass(slots=True)
class Handover:
    """The previous attempt, still read until the next attempt catches up (docs/migration.md). Sampling
    depends on seed and index, so both workers compute the same answer; tokens of one index are compared. A
    stream has at most one overlap."""

    ref: SequenceRef
    server: Start
    target: str
    open_tokens: int
    """Number of tokens the target accepts after the submission."""
    until_s: float
    heard_s: float = 0.0
    frames: int = 0
    is_leaving: bool = False
    """The source was told to stop; its earlier tokens still count."""

    def leave(self) -> tuple[Cancel, ...]:
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
        Also return the source's finish reason, if it ended."""
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
        self._timing = timing
        self._secret = secret
        self.tokens: list[int] = []
        self.logprobs: dict[int, TokenLogprobs] = {}
        """By answer index, until the reader takes them."""
        self.attempt = 0
        self.ref: SequenceRef
        self.capability = b""
        """Proof of assignment for the current attempt, sent only to the worker the scheduler chooses."""
        self._next_attempt()
        self.is_open = True
        self.phase = StreamPhase.OPEN
        self.finish_reason: FinishReason | None = None
        self.failure: KvasirError | None = None
        self.accepted = False
        self.cached_tokens = 0
        self.server: Start | None = None
        self.handovers: dict[str, int] = {}
        self._before: Handover | None = None
        """A prepared hand-over, until the new attempt sends a new token."""
        self._serial = 0
        """Number of the latest submission; replies to earlier ones are ignored."""
        self._is_under_way = False
        self._again_at_s: float | None = None
        self._refusals = 0
        self._anyone_s = self._worker_s = now_s
        """Last signs of life, by anyone and by the serving worker."""
        self._audit_s = timing.frame_timeout_s
        self._behind: tuple[int, bool, float] | None = None
        """Number of tokens that the worker has, whether it has the end, and when to fetch them."""
        self._is_fetching = False
        self._fetch_failures = self._internal_errors = self._kv_losses = 0
        self._tokens_at_loss = -1

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

    def submit(self, now_s: float) -> StreamEffects:
        if not self.is_open:
            return ()
        self._serial += 1
        self._is_under_way, self._again_at_s = True, None
        return (Submit(self.attempt, self._serial),)

    def on_submitted(self, serial: int, now_s: float) -> StreamEffects:
        if not self.is_open or serial != self._serial:
            return ()
        self._is_under_way, self._refusals = False, 0
        self.accepted = True
        self._anyone_s = now_s
        return ()

    def on_submit_failed(self, serial: int, error: KvasirError, now_s: float) -> StreamEffects:
        """End the stream on a refusal or repeated internal errors; otherwise retry."""
        if not self.is_open or serial != self._serial:
            return ()
        self._is_under_way = False
        if isinstance(error, Overloaded | RoleMissing | ForeignSequence):
            is_final = not self.accepted
        else:
            is_final = isinstance(error, CallerError | PolicyFailed)
        if is_final:
            return self._fail(error)
        if isinstance(error, InternalError):
            self._internal_errors += 1
            if self._internal_errors >= MAX_INTERNAL_ERRORS:
                return self._fail(error)
        self._again_at_s = now_s + min(RETRY_S * 2**self._refusals, MAX_RETRY_S)
        self._refusals = min(self._refusals + 1, _MOST_DOUBLINGS)
        return ()

    def on_delta(self, delta: TokenDelta, worker: Start, now_s: float) -> StreamEffects:
        is_next = delta.attempt == self.attempt and delta.first_index == len(self.tokens)
        if is_next and self.server == worker and self._before is None and self.is_open:
            self._is_served_by(worker, now_s)
            return self._append(delta, worker, now_s)  # as what follows would, sooner
        if self._before is not None and self.is_open and delta.attempt == self._before.ref.attempt:
            return self._on_late(self._before, delta, worker, now_s)
        if not self.is_open or delta.attempt != self.attempt or not self._is_proven(worker, delta.proof):
            return ()
        if not self._is_served_by(worker, now_s):
            return self._hand_over("second_server", now_s)
        first, held = delta.first_index, len(self.tokens)
        end = first + len(delta.tokens)
        left: StreamEffects = () if self._before is None else self._before.on_target(end, held, now_s)
        common = max(0, min(end, held) - first)
        if delta.tokens[:common] != tuple(self.tokens[first : first + common]):
            return self._hand_over("diverged", now_s)
        if end > held:
            self._before = None
        if first > held:
            self._behind = end, delta.finish_reason is not None, now_s
            return (*left, *self._fetch_if_due(now_s))
        return (*left, *self._append(delta, worker, now_s)) if end >= held else left

    def _append(self, delta: TokenDelta, worker: Start, now_s: float) -> StreamEffects:
        """Take the tokens of a delta that goes on where these end, or overlaps them."""
        held = len(self.tokens)
        common = held - delta.first_index
        self.tokens += delta.tokens[common:]
        if delta.logprobs:
            self.logprobs.update(enumerate(delta.logprobs[common:], held))
        self.cached_tokens = self.cached_tokens or delta.cached_tokens
        return () if delta.finish_reason is None else self._end(delta.finish_reason, worker, now_s)

    def _on_late(self, before: Handover, delta: TokenDelta, worker: Start, now_s: float) -> StreamEffects:
        effects, reason = before.on_source(delta, worker, self.tokens, self.ref, now_s)
        if reason is not None:
            self._before = None
        if reason not in ANSWERS:
            return effects
        self._finish(reason)
        return (*effects, Cancel(self.ref, before.target))

    def on_report(self, report: SequenceReport, worker: Start, now_s: float) -> StreamEffects:
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
        if self._behind is None:
            self._behind = report.generated_tokens, ended, now_s + FETCH_GRACE_S
        return self._fetch_if_due(now_s)

    def on_fetched(
        self, ref: SequenceRef, delta: TokenDelta | None, worker: Start, now_s: float
    ) -> StreamEffects:
        """Process the reply to a fetch; None when the worker does not hold the attempt."""
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        self._forget_fetch()
        if delta is None:
            return self._hand_over("not_held", now_s)
        return self.on_delta(delta, worker, now_s)

    def on_fetch_failed(self, ref: SequenceRef, now_s: float) -> StreamEffects:
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        self._is_fetching = False
        self._fetch_failures += 1
        if self._behind is not None:
            self._behind = (*self._behind[:2], now_s + RETRY_S)
        return self._hand_over("fetch_failed", now_s) if self._fetch_failures >= MAX_FETCH_FAILURES else ()

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
        self, ref: SequenceRef, now_s: float, target: str = "", open_tokens: int = 0, cause: str = "moved"
    ) -> StreamEffects:
        """Hand over to a worker that is prepared, or to another shard. With `open_tokens`, keep reading the
        old worker until the new one sends a new token."""
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        server, effects = self.server, self._hand_over(cause, now_s)
        if not open_tokens or server is None:
            return effects
        self._before = Handover(ref, server, target, open_tokens, now_s + OVERLAP_S)
        return tuple(effect for effect in effects if not isinstance(effect, Cancel))

    def on_tick(self, now_s: float) -> StreamEffects:
        if not self.is_open:
            return ()
        unheard_s, timing = now_s - self._anyone_s, self._timing
        if unheard_s >= timing.give_up_s:
            error = DeadlineExceeded(f"no worker or scheduler answered for {timing.give_up_s:g} s")
            return (Cancel(self.ref, self.server[0] if self.server else None), *self._fail(error))
        if self._before is not None and now_s >= self._before.until_s:
            left, self._before = self._before.leave(), None
            return left
        if self._again_at_s is not None and now_s >= self._again_at_s:
            return self.submit(now_s)
        if self._behind is not None:
            return self._fetch_if_due(now_s)
        if self.server is not None and now_s - self._worker_s >= 2 * timing.frame_timeout_s:
            return self._hand_over("silent", now_s)
        is_settled = not self._is_under_way and self._again_at_s is None
        if is_settled and unheard_s >= self._audit_s:
            self._audit_s = min(2 * self._audit_s, MAX_AUDIT_FACTOR * timing.frame_timeout_s)
            return self.submit(now_s)
        return ()

    def on_silence(self, now_s: float, *, is_inherited: bool = False) -> StreamEffects:
        """Hand over if unserved: this gateway was silent so long that others may have ended the sequence. If
        `is_inherited`, one took this gateway for dead and made workers forget the sequence."""
        is_due = self.is_open and (is_inherited or self.server is None)
        return self._hand_over("inherited" if is_inherited else "absence", now_s) if is_due else ()

    def cancel(self) -> StreamEffects:
        """Cancel the rest: the client left, or a stop string is complete."""
        if not self.is_open:
            return ()
        self.phase, self.is_open = StreamPhase.CANCELLED, False
        left, target = self._leave_former()
        return (*left, Cancel(self.ref, self.server[0] if self.server else target))

    def check_integrity(self) -> None:
        assert self.attempt >= 1
        assert (self.phase is StreamPhase.ENDED) == (self.finish_reason is not None)
        assert self.finish_reason is None or self.finish_reason in ANSWERS
        assert (self.phase is StreamPhase.FAILED) == (self.failure is not None)
        assert self.attempt == 1 + sum(self.handovers.values())
        assert self.is_open == (self.phase is StreamPhase.OPEN)
        assert not self._is_fetching or self._behind is not None
        assert not (self._is_under_way and self._again_at_s is not None)
        assert self._audit_s <= MAX_AUDIT_FACTOR * self._timing.frame_timeout_s

    def _is_proven(self, worker: Start, proof: bytes) -> bool:
        """Whether the worker serves the attempt, or proves that it was given it."""
        return self.server == worker or compare_digest(proof, proof_of(self.capability, *worker))

    def _is_served_by(self, worker: Start, now_s: float) -> bool:
        """Bind the attempt to the first worker that proves it; two workers could differ in a near tie."""
        if self.server is not None and self.server != worker:
            return False
        self.server = worker
        self.accepted = True
        self._anyone_s = self._worker_s = now_s
        self._audit_s = self._timing.frame_timeout_s
        return True

    def _fetch_if_due(self, now_s: float) -> StreamEffects:
        if self.server is None or self._behind is None or self._is_fetching:
            return ()
        tokens, has_end, fetch_at_s = self._behind
        if not has_end and tokens <= len(self.tokens):
            self._behind = None
            return ()
        self._is_fetching = now_s >= fetch_at_s
        return (Fetch(self.server, self.ref, len(self.tokens)),) if self._is_fetching else ()

    def _forget_fetch(self) -> None:
        self._behind, self._is_fetching, self._fetch_failures = None, False, 0

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
        self._next_attempt()
        self.server = None
        self._forget_fetch()
        self._audit_s = self._timing.frame_timeout_s
        return (*left, *self.submit(now_s))

    def _next_attempt(self) -> None:
        self.attempt += 1
        self.ref = SequenceRef(request_id=self.key[0], choice=self.key[1], attempt=self.attempt)
        if self._secret:
            self.capability = blake2b(str(self.ref).encode(), key=self._secret, digest_size=16).digest()

    def _end(self, reason: FinishReason, worker: Start, now_s: float) -> StreamEffects:
        seen = Acknowledge(worker[0], self.ref)
        if reason in ANSWERS:
            self._finish(reason)
            return (seen,)
        failure = self._fault(reason)
        if failure is not None:
            return (seen, *self._fail(failure))
        return (seen, *self._hand_over(f"ended_{reason}", now_s))

    def _fault(self, reason: FinishReason) -> KvasirError | None:
        """Count an end without an answer; return the stream's error if the limit is reached."""
        if reason is FinishReason.KV_LOST:
            has_gone_on = len(self.tokens) > self._tokens_at_loss
            self._kv_losses = 1 if has_gone_on else self._kv_losses + 1
            self._tokens_at_loss = len(self.tokens)
            if self._kv_losses >= MAX_KV_LOSSES:
                return CreditorLost(
                    f"workers that lent KV for this request were lost {self._kv_losses} times in a row"
                    " without a new token: try again later, or ask for less",
                    retry_after_s=5.0,
                )
        elif reason is not FinishReason.GATEWAY_LOST:
            self._internal_errors += 1
            if self._internal_errors >= MAX_INTERNAL_ERRORS:
                return InternalError(f"the engine ended the sequence {self._internal_errors} times")
        return None

    def _finish(self, reason: FinishReason | None) -> None:
        self.phase, self.finish_reason, self.is_open = StreamPhase.ENDED, reason, False
        self._forget_fetch()

    def _fail(self, error: KvasirError) -> StreamEffects:
        self.phase, self.failure, self.is_open = StreamPhase.FAILED, error, False
        return ()
