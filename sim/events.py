"""What happens next: a heap keyed (time, priority, sequence number), so that equal inputs replay equally.

At one instant steps end first, then requests arrive, then plans are made: a plan sees everything that has
happened by its time. Knows nothing of what the events mean.
"""

from enum import IntEnum
from heapq import heappop, heappush
from typing import Generic, TypeVar

E = TypeVar("E")


class EventPriority(IntEnum):
    """Order of what happens at the same time."""

    STEP = 0
    ARRIVAL = 1
    ANSWER = 2
    """A predictor's late answer."""
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
        """Raises ValueError for a time that is over."""
        if at_s < self.now_s:
            raise ValueError(f"event at {at_s} s, but it is {self.now_s} s already")
        self._seq += 1
        heappush(self._heap, (at_s, priority, self._seq, event))

    def pop(self) -> tuple[float, E]:
        """The next event and its time, which becomes `now_s`. Raises IndexError when there is none."""
        at_s, _, _, event = heappop(self._heap)
        self.now_s = at_s
        return at_s, event
