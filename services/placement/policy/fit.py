"""By free memory alone: worst fit spreads load and leaves everyone room to grow, best fit fills workers up.

Baselines of papers/000 §VI. They never migrate.
"""

from collections.abc import Sequence

from services.placement.policy.contract import Room


class BestFit:
    """The worker with the least free memory that still takes the sequence; then the lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (room.free_tokens, room.worker_id)).worker_id


class WorstFit:
    """The worker with the most free memory; then the fewest sequences, then the lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (-room.free_tokens, room.sequences, room.worker_id)).worker_id
