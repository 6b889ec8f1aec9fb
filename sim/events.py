"""Virtual time: an event queue ordered by (time, priority, order of pushing), so that runs are reproducible.

The simulator, its lending part, the live loop of `tests/sim` and the world of `tests/simulation` run on it.
"""

from enum import IntEnum
from heapq import heappop, heappush
from math import inf
from typing import Generic, TypeVar

E = TypeVar("E")


class EventPriority(IntEnum):
    """Order of the simulator's events at the same time: a plan sees everything up to its time."""

    STEP = 0
    ARRIVAL = 1
    ANSWER = 2
    """A late prediction."""
    PLAN = 3


class EventQueue(Generic[E]):
    """Events of type `E`, earliest first; time never goes back."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._heap: list[tuple[float, float, int, E]] = []
        self._seq = 0
        self.now_s = now_s

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def due_s(self) -> float:
        """Time of the next event; infinity if there is none."""
        return self._heap[0][0] if self._heap else inf

    def push(self, at_s: float, priority: float, event: E) -> None:
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

    def clear(self) -> None:
        """Drop all events."""
        self._heap.clear()
