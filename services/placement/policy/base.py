"""What a placement policy sees and answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Room:
    """What one worker offers at the moment of a decision."""

    worker_id: str
    free_tokens: int
    """Unallocated and not spoken for."""
    total_tokens: int
    sequences: int
    """Live or on their way there."""
    cached_tokens: tuple[int, int, int] = (0, 0, 0)
    """Of the prompt's beginning, in its prefix cache: on the device, on the host, on disk."""


class PlacementPolicy(Protocol):
    """Deterministic: the same rooms give the same choice."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        """The worker for a sequence of `size_tokens`, one of `rooms`: not empty, all fit."""
        ...
