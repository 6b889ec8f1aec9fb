"""A clock that jumps from event to event."""

import heapq
from collections.abc import Callable


class VirtualTime:
    """Events at equal times happen in the order they were announced."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def at(self, when_s: float, action: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when_s, self._count, action))

    def after(self, delay_s: float, action: Callable[[], object]) -> None:
        self.at(self.now_s + delay_s, action)

    def every(self, interval_s: float, action: Callable[[], object]) -> None:
        def again() -> None:
            action()
            self.after(interval_s, again)

        self.after(interval_s, again)

    def run_until(self, done: Callable[[], bool], *, limit_s: float) -> bool:
        """Whether `done` came true within `limit_s`."""
        end_s = self.now_s + limit_s
        while not done():
            if self._events[0][0] > end_s:
                return False
            self._next()
        return True

    def run_for(self, duration_s: float) -> None:
        end_s = self.now_s + duration_s
        while self._events[0][0] <= end_s:
            self._next()
        self.now_s = end_s

    def _next(self) -> None:
        when_s, _, action = heapq.heappop(self._events)
        self.now_s = max(self.now_s, when_s)
        action()
