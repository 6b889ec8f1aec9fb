"""A clock that does not count time in which this process could not listen: stopped, starved, or off the bus.

Deadlines measured on it do not expire because nobody was there to see the heartbeats arrive. Pure.
"""

from collections.abc import Callable

from shared.clock import Clock


class AttentiveClock:
    """Has to be read more often than every `longest_gap_s`; a longer gap means that the process was stopped.

    Time off the bus is left out too, but at most `longest_pause_s` at a stretch: whoever waits has to learn
    some day.
    """

    def __init__(
        self,
        clock: Clock,
        is_listening: Callable[[], bool],
        longest_gap_s: float = 1.0,
        longest_pause_s: float = 20.0,
    ) -> None:
        self._clock = clock
        self._is_listening = is_listening
        self._longest_gap_s = longest_gap_s
        self._longest_pause_s = longest_pause_s
        self._last_s = clock()
        self._missed_s = 0.0
        self._paused_s = 0.0

    def __call__(self) -> float:
        """Seconds."""
        now_s = self._clock()
        gap_s, self._last_s = now_s - self._last_s, now_s
        if self._is_listening():
            self._paused_s = 0.0
            is_counted = gap_s <= self._longest_gap_s
        else:
            is_counted = self._paused_s >= self._longest_pause_s
            self._paused_s += gap_s
        if not is_counted:
            self._missed_s += gap_s
        return now_s - self._missed_s
