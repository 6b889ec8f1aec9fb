"""Which simulated worker a request goes to, once, at its arrival.

`least_work`, `round_robin`, and the live placement policies by name. A placement policy sees the workers that
have room; where none has, the one with the most free (or least overcommitted) memory takes the request, as a
queue before the workers would hide requests from the batching policies that are to be compared.
"""

from collections.abc import Sequence
from typing import Protocol

from services.placement.policy import create
from services.placement.policy.contract import PlacementPolicy, Room
from sim.requests import SimRequest


class Router(Protocol):
    """Deterministic."""

    def choose(self, request: SimRequest, rooms: Sequence[Room]) -> int:
        """Index of the worker, one per room."""
        ...


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: SimRequest, rooms: Sequence[Room]) -> int:
        self._next = (self._next + 1) % len(rooms)
        return self._next


class LeastWork:
    """Fewest sequences, then the most free memory, then the lowest index."""

    def choose(self, request: SimRequest, rooms: Sequence[Room]) -> int:
        return min(range(len(rooms)), key=lambda i: (rooms[i].sequences, -rooms[i].free_tokens, i))


class Placed:
    """A live placement policy decides among those with room."""

    def __init__(self, policy: PlacementPolicy) -> None:
        self._policy = policy

    def choose(self, request: SimRequest, rooms: Sequence[Room]) -> int:
        fitting = [room for room in rooms if room.free_tokens >= request.prompt_tokens]
        if not fitting:
            return max(range(len(rooms)), key=lambda i: (rooms[i].free_tokens, -i))
        return int(self._policy.choose(request.prompt_tokens, fitting))


def find_router(name: str) -> Router:
    """The router called `name`. Raises ConfigError for a name that placement does not know either."""
    if name == "round_robin":
        return RoundRobin()
    return LeastWork() if name == "least_work" else Placed(create(name))
