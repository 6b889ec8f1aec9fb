"""What a sequence's worker has said that its stream has not heard, and when to fetch it. Pure.

Learned from a gap between frames, or from a heartbeat that lists more than came. Knows no worker: a fetch is
the stream's to send, and one at a time is under way.
"""

from dataclasses import dataclass

from services.gateway.core.effects import StreamTiming

MAX_FETCH_FAILURES = 5
"""In a row; then the worker counts as lost for this sequence."""


@dataclass(slots=True)
class _Behind:
    """The worker is known to hold `tokens` (and an end?) that we lack."""

    tokens: int
    ended: bool
    fetch_at_s: float


class Missing:
    """Of one stream, from the worker of its current attempt."""

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
