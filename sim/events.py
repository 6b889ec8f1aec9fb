"""The event queue: a heap keyed (time, priority, sequence number), so that runs are reproducible.

At one instant steps end first, then requests arrive, then plans are made. So a plan sees everything up to its
time.
"""

from enum import IntEnum
from heapq import heappop, heappush
from typing import Generic, TypeVar

E = TypeVar("E")


class EventPriority(IntEnum):
    """Order of events at the same time."""

    STEP = 0
    ARRIVAL = 1
    ANSWER = 2
    """A late prediction."""
    PLAN = 3


class EventQueue(Generic[E]):
    """Events of type `E`, earliest first; time never goes back."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, E]] = []
        self._seq = 0
        self.now_s = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, at_s: float, priority: EventPriority, event: E) -> None:
        """Add an event. Raises ValueError for a time in the past."""
        if at_s < self.now_s:
            raise ValueError(f"event at {at_s} s, but it is {self.now_s} s already")
        self._seq += 1
        heappush(self._heap, (at_s, priority, self._seq, event))

    def pop(self) -> tuple[float, E]:
        """Return the next event and its time, which becomes `now_s`. Raises IndexError if there is none."""
        at_s, _, _, event = heappop(self._heap)
        self.now_s = at_s
        return at_s, event
