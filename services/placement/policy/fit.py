"""The worker with the most free memory: spreads load and leaves everyone room to grow.

A baseline of papers/000 §VI. It never migrates.
"""

from collections.abc import Sequence

from services.placement.policy.contract import Room


class BestFit:
    """Least free memory that still takes the sequence; then the lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (room.free_tokens, room.worker_id)).worker_id


class WorstFit:
    """Most free memory; then the fewest sequences, then the lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (-room.free_tokens, room.sequences, room.worker_id)).worker_id
