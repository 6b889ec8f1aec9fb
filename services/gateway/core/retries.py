"""What a stream waits for, and when it asks again: its submission, missing tokens, signs of life. Pure.

A `Stream` owns one of each and decides what follows; these count, and know when something is due.
"""

from dataclasses import dataclass

from shared.errors import CreditorLost, DeadlineExceeded, InternalError, KvasirError
from shared.messages.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """How long a stream waits for what, in seconds of the shell's clock."""

    frame_timeout_s: float = 3.0
    """No sign of life for this long: audit by submitting again under the same attempt."""
    fetch_grace_s: float = 0.25
    """A heartbeat may overtake the frames it counts by this much."""
    retry_s: float = 0.2
    """Between tries of a submission or fetch that failed."""
    give_up_s: float = 60.0
    """No sign of life from anyone for this long: the stream fails."""
    max_internal_errors: int = 3
    """Of the scheduler, or of the engines that tried it."""
    max_kv_losses: int = 5
    """Of KV that other workers lent, in a row without a new token."""


MAX_RETRY_S = 1.0
"""Tries of a submission come ever more rarely up to this: thousands of streams may wait for a scheduler."""
_MOST_DOUBLINGS = 10


class Submission:
    """A stream's latest submission to the scheduler; answers to earlier ones mean nothing."""

    def __init__(self, timing: StreamTiming) -> None:
        self._timing = timing
        self.serial = 0
        self._is_under_way = False
        self._again_at_s: float | None = None
        self._failures = 0

    @property
    def is_settled(self) -> bool:
        """Neither under way nor to be tried again."""
        return not self._is_under_way and self._again_at_s is None

    def begin(self) -> int:
        """A new one goes out; its serial."""
        self.serial += 1
        self._is_under_way, self._again_at_s = True, None
        return self.serial

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
    """How often a stream's attempts failed. Losses of lent KV count as long as no token comes in between."""

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


MAX_AUDIT_FACTOR = 4
"""Audits come ever more rarely, up to so many times `frame_timeout_s` apart."""


class SignsOfLife:
    """When a stream was last heard of: by anyone, and by the worker that serves it; what silence asks for."""

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
        """The next audit comes as early as the first."""
        self._audit_s = self._timing.frame_timeout_s

    def error(self, now_s: float) -> DeadlineExceeded | None:
        """What the stream fails with, when nobody has answered for so long."""
        waited_s = self._timing.give_up_s
        if now_s - self._anyone_s < waited_s:
            return None
        return DeadlineExceeded(f"no worker or scheduler answered for {waited_s:g} s")

    def is_worker_silent(self, now_s: float) -> bool:
        """For so long that the sequence is handed over."""
        return now_s - self._worker_s >= 2 * self._timing.frame_timeout_s

    def is_audit_due(self, now_s: float) -> bool:
        """Whether to submit again, to see that anybody knows the sequence; asked for rarely as it goes on."""
        if now_s - self._anyone_s < self._audit_s:
            return False
        self._audit_s = min(2 * self._audit_s, MAX_AUDIT_FACTOR * self._timing.frame_timeout_s)
        return True

    def check_integrity(self) -> None:
        """AssertionError where audits are further apart than allowed."""
        assert self._audit_s <= MAX_AUDIT_FACTOR * self._timing.frame_timeout_s


MAX_FETCH_FAILURES = 5
"""In a row; then the worker counts as lost for this sequence."""


@dataclass(slots=True)
class _Behind:
    """The worker is known to hold `tokens` (and an end?) that we lack."""

    tokens: int
    ended: bool
    fetch_at_s: float


class GapFetch:
    """Tokens that the worker of the current attempt is known to have and the stream has not, and their fetch.

    Learned from a gap between frames, or from a heartbeat that lists more than came. One fetch is under way
    at a time.
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
        """Nothing is missing, and nothing is under way: an answer came, or another worker takes over."""
        self._behind, self._fetching, self._failures = None, False, 0

    def on_gap(self, tokens: int, *, ended: bool, now_s: float) -> None:
        """A frame ends at so many tokens and does not join what is held: to be fetched at once."""
        self._behind = _Behind(tokens, ended, now_s)

    def on_listed(self, tokens: int, *, ended: bool, now_s: float) -> None:
        """A heartbeat has so many; its frames may still be on their way."""
        if self._behind is None:
            self._behind = _Behind(tokens, ended, now_s + self._timing.fetch_grace_s)

    def begin_fetch(self, held_tokens: int, now_s: float) -> bool:
        """Whether to fetch now what follows the tokens held; it is under way then."""
        behind = self._behind
        if behind is None or self._fetching:
            return False
        if not behind.ended and behind.tokens <= held_tokens:
            self._behind = None
            return False
        self._fetching = now_s >= behind.fetch_at_s
        return self._fetching

    def on_failed(self, now_s: float) -> bool:
        """A fetch had no answer; true when that was one too many."""
        self._fetching = False
        self._failures += 1
        if self._behind is not None:
            self._behind.fetch_at_s = now_s + self._timing.retry_s
        return self._failures >= MAX_FETCH_FAILURES

    def check_integrity(self) -> None:
        """AssertionError where something is fetched that nobody lacks."""
        assert not self._fetching or self._behind is not None
