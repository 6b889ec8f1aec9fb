"""Stop strings across token borders: text goes out as soon as no stop string can begin in it.

Pure; knows text only, neither tokens nor time.
"""

from collections.abc import Sequence


class StopMatcher:
    """Cuts a growing text before the first occurrence of any of `stops`; holds back only what may become
    one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be shown of the text so far and has not been; `matched` is set once a stop string is
        complete.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        window = self._held + text
        found = [(at, stop) for stop in self._stops if (at := window.find(stop)) >= 0]
        if found:
            at, self.matched = min(found)
            self._held = ""
            return window[:at]
        keep = self._undecided(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def flush(self) -> str:
        """What was held back, when the answer ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, window: str) -> int:
        """Length of the longest end of `window` that is a beginning of a stop string."""
        longest = min(len(window), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            tail = window[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
