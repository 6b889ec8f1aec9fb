"""One direction of an interconnect that is slower than memory: a CPU's stand-in for PCIe or NVLink.

Copies are paced to `limit_bytes_s`, less what others send (`background_bytes_s`, which may change at any
time). Knows no tensor. Time is spent asleep, as it is while a copy engine works.
"""

from collections.abc import Callable

_LEAST_SHARE = 0.02
"""Of the limit, whatever the others send."""


class PacedLink:
    """`limit_bytes_s` 0: as fast as memory."""

    def __init__(
        self, limit_bytes_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self.limit_bytes_s = limit_bytes_s
        self.background_bytes_s = 0.0
        self._clock, self._sleep = clock, sleep
        self._due_s = 0.0

    @property
    def rate_bytes_s(self) -> float:
        """What is left for copies; 0: no limit."""
        return max(self.limit_bytes_s - self.background_bytes_s, _LEAST_SHARE * self.limit_bytes_s)

    def open(self) -> None:
        """A transfer begins: time in which nothing was sent is lost."""
        self._due_s = max(self._due_s, self._clock())

    def pace(self, sent_bytes: int) -> None:
        """So many bytes were copied; returns when the link would have carried them."""
        rate = self.rate_bytes_s
        if not rate:
            return
        self._due_s += sent_bytes / rate
        wait_s = self._due_s - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)
