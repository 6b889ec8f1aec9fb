"""Submission of a stream's current attempt: under way, known to the scheduler, or to be repeated. Pure."""

from services.gateway.timing import StreamTiming

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
