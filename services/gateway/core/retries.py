"""Timers and retries of a stream: its submission, missing tokens and signs of life. Pure.

A `Stream` owns one of each and decides; these count, and report what is due.
"""

from dataclasses import dataclass

from shared.errors import CreditorLost, DeadlineExceeded, InternalError, KvasirError
from shared.messages.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """Timeouts (seconds) and retry limits of a stream."""

    frame_timeout_s: float = 3.0
    """Silence after which the stream audits: it resubmits the same attempt."""
    fetch_grace_s: float = 0.25
    """Time by which a heartbeat may overtake the frames it counts."""
    retry_s: float = 0.2
    """Delay before a retry of a fetch, and before the first retry of a submission."""
    give_up_s: float = 60.0
    """Silence of all parties after which the stream fails."""
    max_internal_errors: int = 3
    """Limit of errors by the scheduler or engines."""
    max_kv_losses: int = 5
    """Limit of lost loans of KV in a row, without a new token."""


MAX_RETRY_S = 1.0
"""Longest delay between submissions: thousands of streams may wait for a scheduler."""
_MOST_DOUBLINGS = 10


class Submission:
    """A stream's latest submission; replies to earlier ones are ignored."""

    def __init__(self, timing: StreamTiming) -> None:
        self._timing = timing
        self.serial = 0
        self._is_under_way = False
        self._again_at_s: float | None = None
        self._failures = 0

    @property
    def is_settled(self) -> bool:
        """Whether it is neither in flight nor due for a retry."""
        return not self._is_under_way and self._again_at_s is None

    def begin(self) -> int:
        """Start a submission; return its serial."""
        self.serial += 1
        self._is_under_way, self._again_at_s = True, None
        return self.serial

    def on_known(self) -> None:
        """Note that the scheduler has accepted it."""
        self._is_under_way, self._failures = False, 0

    def on_refused(self) -> None:
        """Note a failure; the stream decides about a retry (`again_later`)."""
        self._is_under_way = False

    def again_later(self, now_s: float) -> None:
        self._again_at_s = now_s + min(self._timing.retry_s * 2**self._failures, MAX_RETRY_S)
        self._failures = min(self._failures + 1, _MOST_DOUBLINGS)

    def is_due(self, now_s: float) -> bool:
        """Whether a retry is due."""
        return self._again_at_s is not None and now_s >= self._again_at_s

    def check_integrity(self) -> None:
        """Raise AssertionError if a submission is both in flight and due for a retry."""
        assert not (self._is_under_way and self._again_at_s is not None)


class Faults:
    """Failure counts of a stream's attempts. A new token resets the count of KV losses."""

    def __init__(self, timing: StreamTiming) -> None:
        self._timing = timing
        self._internal_errors = 0
        self._kv_losses = 0
        self._tokens_at_loss = -1

    def on_internal_error(self) -> bool:
        """Count an error of the scheduler or an engine; return whether the limit is reached."""
        self._internal_errors += 1
        return self._internal_errors >= self._timing.max_internal_errors

    def on_end(self, reason: FinishReason, tokens: int) -> KvasirError | None:
        """Count an end without an answer; return the stream's error if the limit is reached."""
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


MAX_AUDIT_FACTOR = 4
"""The audit interval doubles up to this multiple of `frame_timeout_s`."""


class SignsOfLife:
    """Last signs of life, by anyone and by the serving worker."""

    def __init__(self, timing: StreamTiming, now_s: float) -> None:
        self._timing = timing
        self._anyone_s = self._worker_s = now_s
        self._audit_s = timing.frame_timeout_s

    def on_scheduler(self, now_s: float) -> None:
        self._anyone_s = now_s

    def on_worker(self, now_s: float) -> None:
        self._anyone_s = self._worker_s = now_s
        self.begin_anew()

    def begin_anew(self) -> None:
        """Reset the audit interval."""
        self._audit_s = self._timing.frame_timeout_s

    def error(self, now_s: float) -> DeadlineExceeded | None:
        """Return the stream's error if no one has answered within `give_up_s`."""
        waited_s = self._timing.give_up_s
        if now_s - self._anyone_s < waited_s:
            return None
        return DeadlineExceeded(f"no worker or scheduler answered for {waited_s:g} s")

    def is_worker_silent(self, now_s: float) -> bool:
        """Whether the worker is silent so long that the sequence must be handed over."""
        return now_s - self._worker_s >= 2 * self._timing.frame_timeout_s

    def is_audit_due(self, now_s: float) -> bool:
        """Whether to audit by resubmitting; True lengthens the interval."""
        if now_s - self._anyone_s < self._audit_s:
            return False
        self._audit_s = min(2 * self._audit_s, MAX_AUDIT_FACTOR * self._timing.frame_timeout_s)
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError if the audit interval is above its limit."""
        assert self._audit_s <= MAX_AUDIT_FACTOR * self._timing.frame_timeout_s


MAX_FETCH_FAILURES = 5
"""Number of failures in a row after which the worker counts as lost for this sequence."""


@dataclass(slots=True)
class _Behind:
    """Number of tokens, and an end, that the worker is known to have."""

    tokens: int
    ended: bool
    fetch_at_s: float


class GapFetch:
    """Tokens that the worker has and the stream lacks, and their fetch.

    Learned from a gap between frames or from a heartbeat. At most one fetch is in flight.
    """

    def __init__(self, timing: StreamTiming) -> None:
        self._timing = timing
        self._behind: _Behind | None = None
        self._fetching = False
        self._failures = 0

    @property
    def is_anything(self) -> bool:
        return self._behind is not None

    def forget(self) -> None:
        """Reset: the fetch succeeded, or another worker takes over."""
        self._behind, self._fetching, self._failures = None, False, 0

    def on_gap(self, tokens: int, *, ended: bool, now_s: float) -> None:
        """Note a gap before a frame that ends at `tokens`; fetch at once."""
        self._behind = _Behind(tokens, ended, now_s)

    def on_listed(self, tokens: int, *, ended: bool, now_s: float) -> None:
        """Note a heartbeat that lists `tokens`; fetch after a delay, as frames may be in flight."""
        if self._behind is None:
            self._behind = _Behind(tokens, ended, now_s + self._timing.fetch_grace_s)

    def begin_fetch(self, held_tokens: int, now_s: float) -> bool:
        """Return whether to fetch the tokens after `held_tokens` now, and mark the fetch as in flight."""
        behind = self._behind
        if behind is None or self._fetching:
            return False
        if not behind.ended and behind.tokens <= held_tokens:
            self._behind = None
            return False
        self._fetching = now_s >= behind.fetch_at_s
        return self._fetching

    def on_failed(self, now_s: float) -> bool:
        """Count a failed fetch; return whether the limit is reached."""
        self._fetching = False
        self._failures += 1
        if self._behind is not None:
            self._behind.fetch_at_s = now_s + self._timing.retry_s
        return self._failures >= MAX_FETCH_FAILURES

    def check_integrity(self) -> None:
        """Raise AssertionError if a fetch is in flight while nothing is missing."""
        assert not self._fetching or self._behind is not None
