"""The worker with the least free memory: packs tightly, keeps whole workers free.

A baseline of papers/000 §VI. It never migrates.
"""

from collections.abc import Sequence

from services.placement.policy.base import Room


class BestFit:
    """Least free memory that still takes the sequence; then the lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (room.free_tokens, room.worker_id)).worker_id
