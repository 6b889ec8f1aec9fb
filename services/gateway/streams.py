"""One sequence as the gateway that owns it sees it: which tokens count, and what to do when none come.

Pure. A `Stream` is told what happened (`on_x(event, now_s)`) and answers with effects for its shell to carry
out. It accepts a delta only of the current attempt, from the one worker that serves that attempt, and only
where it joins what is held; whatever else happens it asks again, fetches, or hands the sequence over under a
higher attempt. It never waits without a reason to wake: every open stream reacts to `on_tick`. Knows neither
text nor HTTP.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.gateway.effects import Acknowledge, Cancel, Effects, Fetch, Submit, WorkerStart, disown
from services.gateway.faults import Faults
from services.gateway.overlap import OVERLAP_S, Overlap
from services.gateway.timing import StreamTiming
from shared.errors import CallerError, DeadlineExceeded, InternalError, KvasirError, Overloaded
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import FinishReason, SequenceKey, SequenceRef
from shared.messages.tokens import TokenDelta, TokenLogprobs

ANSWERS = (FinishReason.STOP, FinishReason.LENGTH)
MAX_FETCH_FAILURES = 5
MAX_AUDIT_FACTOR = 4
MAX_RETRY_S = 1.0
"""Tries of a submission come ever more rarely up to this: thousands of streams may wait for a scheduler."""


class Phase(StrEnum):
    OPEN = "open"
    ENDED = "ended"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class _Behind:
    """The worker is known to hold `tokens` (and an end?) that we lack."""

    tokens: int
    ended: bool
    fetch_at_s: float


class Stream:
    """The gateway's record of one sequence. `tokens` is the answer so far and only ever grows."""

    def __init__(self, key: SequenceKey, timing: StreamTiming, now_s: float) -> None:
        self.key = key
        self.tokens: list[int] = []
        self.logprobs: dict[int, TokenLogprobs] = {}
        """By index in the answer, until its reader takes them."""
        self.attempt = 1
        self.phase = Phase.OPEN
        self.finish_reason: FinishReason | None = None
        self.failure: KvasirError | None = None
        self.accepted = False
        self.cached_tokens = 0
        self.server: WorkerStart | None = None
        self.handovers: dict[str, int] = {}
        self.stale_deltas = 0
        self._timing = timing
        self._sign_s = self._worker_sign_s = now_s
        self._audit_s = timing.frame_timeout_s
        self._serial = 0
        self._submitting = False
        self._submit_at_s: float | None = None
        self._submit_failures = 0
        self._fetching = False
        self._fetch_failures = 0
        self._behind: _Behind | None = None
        self._faults = Faults(timing)
        self._before: Overlap | None = None
        """Of a hand-over that was prepared, until the new attempt has said something new."""

    @property
    def is_open(self) -> bool:
        return self.phase is Phase.OPEN

    @property
    def ref(self) -> SequenceRef:
        return SequenceRef(request_id=self.key[0], choice=self.key[1], attempt=self.attempt)

    def open_tokens(self, max_tokens: int) -> int:
        """That may follow a submission made now, from the former worker."""
        return 0 if self._before is None else self._before.open_for(max_tokens - len(self.tokens))

    def reads(self, attempt: int) -> bool:
        """Whether tokens of that attempt may count."""
        return attempt == self.attempt or (self._before is not None and attempt == self._before.ref.attempt)

    # --- the scheduler

    def submit(self, now_s: float) -> Effects:
        """Submit (again) under the current attempt: at the start, and when a new scheduler announces
        itself.
        """
        if not self.is_open:
            return ()
        self._serial += 1
        self._submitting, self._submit_at_s = True, None
        return (Submit(self.attempt, self._serial),)

    def on_submitted(self, serial: int, now_s: float) -> Effects:
        """The scheduler knows the attempt."""
        if not self.is_open or serial != self._serial:
            return ()
        self._submitting, self._submit_failures = False, 0
        self.accepted = True
        self._sign_s = now_s
        return ()

    def on_submit_failed(self, serial: int, error: KvasirError, now_s: float) -> Effects:
        """Refusals end a stream (overload only one that is not accepted yet), and so do repeated errors of
        the scheduler; anything else is tried again.
        """
        if not self.is_open or serial != self._serial:
            return ()
        self._submitting = False
        if isinstance(error, CallerError) or (isinstance(error, Overloaded) and not self.accepted):
            return self._fail(error)
        if isinstance(error, InternalError) and self._faults.on_internal_error():
            return self._fail(error)
        self._submit_at_s = now_s + min(self._timing.retry_s * 2**self._submit_failures, MAX_RETRY_S)
        self._submit_failures = min(self._submit_failures + 1, 10)
        return ()

    # --- workers

    def on_delta(self, delta: TokenDelta, worker: WorkerStart, now_s: float) -> Effects:
        """Tokens from a frame or a fetch."""
        if self._before is not None and self.is_open and delta.attempt == self._before.ref.attempt:
            return self._on_late(self._before, delta, worker, now_s)
        if not self.is_open or delta.attempt != self.attempt:
            self.stale_deltas += 1
            return ()
        if not self._is_served_by(worker, now_s):
            return self._hand_over("second_server", now_s)
        end = delta.first_index + len(delta.tokens)
        held = len(self.tokens)
        left: Effects = () if self._before is None else self._before.on_target(end, held, now_s)
        both = min(end, held)
        if delta.tokens[: max(0, both - delta.first_index)] != tuple(self.tokens[delta.first_index : both]):
            return self._hand_over("diverged", now_s)
        if end > held:
            self._before = None
        return (*left, *self._join(delta, worker, now_s))

    def _join(self, delta: TokenDelta, worker: WorkerStart, now_s: float) -> Effects:
        """A delta of the current attempt that agrees with what is held."""
        end = delta.first_index + len(delta.tokens)
        held = len(self.tokens)
        if delta.first_index > held:
            self._behind = _Behind(end, delta.finish_reason is not None, now_s)
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

    def _on_late(self, before: Overlap, delta: TokenDelta, worker: WorkerStart, now_s: float) -> Effects:
        """The former attempt goes on while the new one gets ready."""
        if worker != before.server or delta.first_index > len(self.tokens):
            return ()
        held, tokens = len(self.tokens), before.news(delta, len(self.tokens))
        self.tokens.extend(tokens)
        before.heard_s = now_s
        if delta.finish_reason in ANSWERS:
            self._before, self.phase, self.finish_reason = None, Phase.ENDED, delta.finish_reason
            self._fetching, self._behind = False, None
            return (Acknowledge(worker[0], before.ref), Cancel(self.ref, before.target))
        if delta.finish_reason is not None:
            self._before = None
            return (Acknowledge(worker[0], before.ref),)
        return before.passed_on(self.ref, held, tokens)

    def on_report(self, report: SequenceReport, worker: WorkerStart, now_s: float) -> Effects:
        """A worker's heartbeat lists this sequence."""
        if self.is_open and self._before is not None and report.ref == self._before.ref:
            return ()
        if not self.is_open or report.ref.attempt < self.attempt:
            return (disown(report, worker, goes_on=self.is_open),)
        if report.ref.attempt > self.attempt:
            return ()
        if not self._is_served_by(worker, now_s):
            return self._hand_over("second_server", now_s)
        ended = report.state is SequenceState.ENDED
        if not ended and report.generated_tokens <= len(self.tokens):
            return ()
        if self._behind is None:
            due_s = now_s + self._timing.fetch_grace_s
            self._behind = _Behind(report.generated_tokens, ended, due_s)
        return self._fetch_if_due(now_s)

    def on_fetched(
        self, ref: SequenceRef, delta: TokenDelta | None, worker: WorkerStart, now_s: float
    ) -> Effects:
        """The worker's answer to a fetch; None when it does not hold the attempt."""
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        self._fetching, self._fetch_failures, self._behind = False, 0, None
        if delta is None:
            return self._hand_over("not_held", now_s)
        return self.on_delta(delta, worker, now_s)

    def on_fetch_failed(self, ref: SequenceRef, now_s: float) -> Effects:
        """No answer to a fetch. Repeated: the worker counts as lost for this sequence."""
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        self._fetching = False
        self._fetch_failures += 1
        if self._fetch_failures >= MAX_FETCH_FAILURES:
            return self._hand_over("fetch_failed", now_s)
        if self._behind is not None:
            self._behind.fetch_at_s = now_s + self._timing.retry_s
        return ()

    def on_worker_lost(self, worker: WorkerStart, lost_attempt: int | None, now_s: float) -> Effects:
        """That run of a worker is over.

        `lost_attempt` is the attempt its scheduler had sent it, if it says so.
        """
        if not self.is_open:
            return ()
        if self._before is not None and self._before.server == worker:
            self._before = None
        if self.server == worker or (self.server is None and lost_attempt == self.attempt):
            return self._hand_over("worker_lost", now_s)
        return ()

    def on_prepared(self, ref: SequenceRef, now_s: float, target: str = "", open_tokens: int = 0) -> Effects:
        """Another worker has all that is needed to go on: hand over what is held by now.

        With `open_tokens` the old one is read until the new one has something new to say.
        """
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        server = self.server
        effects = self._hand_over("moved", now_s)
        if not open_tokens or server is None:
            return effects
        self._before = Overlap(ref, server, target, open_tokens, now_s + OVERLAP_S)
        return tuple(effect for effect in effects if not isinstance(effect, Cancel))

    # --- time and the client

    def on_tick(self, now_s: float) -> Effects:
        """To be called about ten times a second."""
        if not self.is_open:
            return ()
        if now_s - self._sign_s >= self._timing.give_up_s:
            cancel = Cancel(self.ref, self.server[0] if self.server else None)
            waited_s = self._timing.give_up_s
            return (
                cancel,
                *self._fail(DeadlineExceeded(f"no worker or scheduler answered for {waited_s:g} s")),
            )
        if self._before is not None and now_s >= self._before.until_s:
            left, self._before = self._before.leave(), None
            return left
        if self._submit_at_s is not None and now_s >= self._submit_at_s:
            return self.submit(now_s)
        if self._behind is not None:
            return self._fetch_if_due(now_s)
        if self.server is not None and now_s - self._worker_sign_s >= 2 * self._timing.frame_timeout_s:
            return self._hand_over("silent", now_s)
        if not self._submitting and self._submit_at_s is None and now_s - self._sign_s >= self._audit_s:
            self._audit_s = min(2 * self._audit_s, MAX_AUDIT_FACTOR * self._timing.frame_timeout_s)
            return self.submit(now_s)
        return ()

    def on_absence(self, now_s: float) -> Effects:
        """Nobody heard of this gateway for so long that they may have ended what it has waiting."""
        return self._hand_over("absence", now_s) if self.is_open and self.server is None else ()

    def cancel(self) -> Effects:
        """Nobody wants the rest: the client left, or a stop string was completed."""
        if not self.is_open:
            return ()
        self.phase = Phase.CANCELLED
        left, target = self._leave_former()
        return (*left, Cancel(self.ref, self.server[0] if self.server else target))

    def check_integrity(self) -> None:
        """Raises AssertionError when the record contradicts itself."""
        assert self.attempt >= 1
        assert (self.phase is Phase.ENDED) == (self.finish_reason is not None)
        assert self.finish_reason is None or self.finish_reason in ANSWERS
        assert (self.phase is Phase.FAILED) == (self.failure is not None)
        assert self.attempt == 1 + sum(self.handovers.values())
        assert not self._fetching or self._behind is not None
        assert not (self._submitting and self._submit_at_s is not None)
        assert self._audit_s <= MAX_AUDIT_FACTOR * self._timing.frame_timeout_s

    # --- inside

    def _is_served_by(self, worker: WorkerStart, now_s: float) -> bool:
        """Binds the attempt to the first worker that shows it; two workers on one attempt could differ in
        a near tie.
        """
        if self.server is not None and self.server != worker:
            return False
        self.server = worker
        self.accepted = True
        self._sign_s = self._worker_sign_s = now_s
        self._audit_s = self._timing.frame_timeout_s
        return True

    def _fetch_if_due(self, now_s: float) -> Effects:
        behind = self._behind
        if behind is None or self.server is None or self._fetching:
            return ()
        if not behind.ended and behind.tokens <= len(self.tokens):
            self._behind = None
            return ()
        if now_s < behind.fetch_at_s:
            return ()
        self._fetching = True
        return (Fetch(self.server, self.ref, len(self.tokens)),)

    def _leave_former(self) -> tuple[Effects, str | None]:
        """Reads the former attempt no more; also which worker was to take over from it."""
        before, self._before = self._before, None
        return ((), None) if before is None else (before.leave(), before.target)

    def _hand_over(self, cause: str, now_s: float) -> Effects:
        """Raise the attempt: whatever lower ones still say is stale from here on."""
        old = (
            Cancel(self.ref, self.server[0], is_final=False)
            if self.server and cause != "worker_lost"
            else None
        )
        left, _ = self._leave_former()
        self.handovers[cause] = self.handovers.get(cause, 0) + 1
        self.attempt += 1
        self.server = None
        self._fetching, self._fetch_failures, self._behind = False, 0, None
        self._audit_s = self._timing.frame_timeout_s
        again = self.submit(now_s)
        return (*left, old, *again) if old else (*left, *again)

    def _end(self, reason: FinishReason, worker: WorkerStart, now_s: float) -> Effects:
        seen = Acknowledge(worker[0], self.ref)
        if reason in ANSWERS:
            self.phase, self.finish_reason = Phase.ENDED, reason
            self._fetching, self._behind = False, None
            return (seen,)
        failure = self._faults.on_end(reason, len(self.tokens))
        if failure is not None:
            return (seen, *self._fail(failure))
        return (seen, *self._hand_over(f"ended_{reason}", now_s))

    def _fail(self, error: KvasirError) -> Effects:
        self.phase, self.failure = Phase.FAILED, error
        return ()
