"""Placement policies of the simulator: `least_work`, `round_robin`, and every live policy by name. Which
workers are eligible is decided by the live rule (`services/placement/core/fleet.py:seat`)."""

from collections.abc import Sequence

from services.placement.policy import create
from services.placement.policy.contract import Column, PlacementPolicy, Room, RoomColumns


class RoundRobin:
    """Choose each worker in turn."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        names = [room.worker_id for room in rooms]
        self._last = next((name for name in names if name > self._last), names[0])
        return self._last


class LeastWork:
    """Choose the worker with the fewest sequences, then the most free memory, then the lowest name."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (room.sequences, -room.free_tokens)).worker_id

    def ranks(self, size_tokens: int, rooms: RoomColumns) -> Column:
        return rooms.sequences - rooms.free_tokens / (2 * rooms.total_tokens)


def find_router(name: str) -> PlacementPolicy:
    """Return the router called `name`. Raises ConfigError for an unknown name."""
    if name == "round_robin":
        return RoundRobin()
    return LeastWork() if name == "least_work" else create(name)
