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

from services.gateway.effects import Acknowledge, Cancel, Effects, Fetch, Submit, WorkerStart, disown
from services.gateway.faults import Faults
from services.gateway.missing import Missing
from services.gateway.overlap import OVERLAP_S, Overlap, agrees
from services.gateway.signs import Signs
from services.gateway.submission import Submission
from services.gateway.timing import StreamTiming
from shared.errors import CallerError, InternalError, KvasirError, Overloaded
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import FinishReason, SequenceKey, SequenceRef, proof_of
from shared.messages.tokens import TokenDelta, TokenLogprobs

ANSWERS = (FinishReason.STOP, FinishReason.LENGTH)


class Phase(StrEnum):
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
        self.phase = Phase.OPEN
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
        return self.phase is Phase.OPEN

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

    def submit(self, now_s: float) -> Effects:
        """Submit (again) under the current attempt: at the start, and to a new scheduler."""
        if not self.is_open:
            return ()
        return (Submit(self.attempt, self._submission.begin()),)

    def on_submitted(self, serial: int, now_s: float) -> Effects:
        """The scheduler knows the attempt."""
        if not self.is_open or not self._submission.is_latest(serial):
            return ()
        self._submission.on_known()
        self.accepted = True
        self._signs.on_scheduler(now_s)
        return ()

    def on_submit_failed(self, serial: int, error: KvasirError, now_s: float) -> Effects:
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

    def on_delta(self, delta: TokenDelta, worker: WorkerStart, now_s: float) -> Effects:
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
        left: Effects = () if self._before is None else self._before.on_target(end, held, now_s)
        if not agrees(delta, self.tokens):
            return self._hand_over("diverged", now_s)
        if end > held:
            self._before = None
        return (*left, *self._join(delta, worker, now_s))

    def _join(self, delta: TokenDelta, worker: WorkerStart, now_s: float) -> Effects:
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

    def _on_late(self, before: Overlap, delta: TokenDelta, worker: WorkerStart, now_s: float) -> Effects:
        """The former attempt goes on while the new one gets ready."""
        effects, reason = before.on_source(delta, worker, self.tokens, self.ref, now_s)
        if reason is not None:
            self._before = None
        if reason not in ANSWERS:
            return effects
        self._finish(reason)
        return (*effects, Cancel(self.ref, before.target))

    def on_report(self, report: SequenceReport, worker: WorkerStart, now_s: float) -> Effects:
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
    ) -> Effects:
        """The worker's answer to a fetch; None when it does not hold the attempt."""
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        self._missing.forget()
        if delta is None:
            return self._hand_over("not_held", now_s)
        return self.on_delta(delta, worker, now_s)

    def on_fetch_failed(self, ref: SequenceRef, now_s: float) -> Effects:
        """No answer to a fetch. Repeated: the worker counts as lost for this sequence."""
        if not self.is_open or ref.attempt != self.attempt:
            return ()
        return self._hand_over("fetch_failed", now_s) if self._missing.on_failed(now_s) else ()

    def on_worker_lost(self, worker: WorkerStart, lost_attempt: int | None, now_s: float) -> Effects:
        """That run of a worker is over; `lost_attempt` is what its scheduler had sent it, if it says so."""
        if not self.is_open:
            return ()
        if self._before is not None and self._before.server == worker:
            self._before = None
        if self.server == worker or (self.server is None and lost_attempt == self.attempt):
            return self._hand_over("worker_lost", now_s)
        return ()

    def on_prepared(self, ref: SequenceRef, now_s: float, target: str = "", open_tokens: int = 0) -> Effects:
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

    def on_tick(self, now_s: float) -> Effects:
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

    def _fetch_if_due(self, now_s: float) -> Effects:
        if self.server is None or not self._missing.begin_fetch(len(self.tokens), now_s):
            return ()
        return (Fetch(self.server, self.ref, len(self.tokens)),)

    def _leave_former(self) -> tuple[Effects, str | None]:
        """Reads the former attempt no more; also which worker was to take over from it."""
        before, self._before = self._before, None
        return ((), None) if before is None else (before.leave(), before.target)

    def _hand_over(self, cause: str, now_s: float) -> Effects:
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

    def _end(self, reason: FinishReason, worker: WorkerStart, now_s: float) -> Effects:
        seen = Acknowledge(worker[0], self.ref)
        if reason in ANSWERS:
            self._finish(reason)
            return (seen,)
        failure = self._faults.on_end(reason, len(self.tokens))
        if failure is not None:
            return (seen, *self._fail(failure))
        return (seen, *self._hand_over(f"ended_{reason}", now_s))

    def _finish(self, reason: FinishReason) -> None:
        self.phase, self.finish_reason = Phase.ENDED, reason
        self._missing.forget()

    def _fail(self, error: KvasirError) -> Effects:
        self.phase, self.failure = Phase.FAILED, error
        return ()
