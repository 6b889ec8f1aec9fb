"""A clock that does not count time in which this process was stopped or starved.

Deadlines measured on it do not expire because nobody was there to see the heartbeats arrive.
"""

from shared.clock import Clock


class AttentiveClock:
    """Seconds during which somebody asked at least every `longest_gap_s`; longer gaps count as nothing."""

    def __init__(self, clock: Clock, longest_gap_s: float = 1.0) -> None:
        self._clock = clock
        self._longest_gap_s = longest_gap_s
        self._last_s = clock()
        self._missed_s = 0.0

    def __call__(self) -> float:
        now_s = self._clock()
        if now_s - self._last_s > self._longest_gap_s:
            self._missed_s += now_s - self._last_s
        self._last_s = now_s
        return now_s - self._missed_s
