"""One worker for one sequence: by what its prompt costs there, or by free memory alone. They never migrate.

Prefix aware: cost = tokens to compute + `LOAD_WEIGHT` · tokens that worker already holds for others. Tokens
in a lower tier save less than those on the device; where no worker has anything of the prompt, it goes where
the largest share of memory is free. Source: `algorithms.md` §5; the form of the cost is that of Dynamo's KV
router. Worst fit spreads load and leaves everyone room to grow, best fit fills workers up: baselines of
papers/000 §VI.
"""

from collections.abc import Sequence

from services.placement.policy.contract import Room

SAVED = (1.0, 0.9, 0.6)
"""Of a token's computation, when it is found in that tier: loading takes time as well."""
LOAD_WEIGHT = 0.25


class PrefixAware:
    """The worker with the least cost; then the largest share of free memory, the fewest sequences, the lowest
    id."""

    def __init__(self, load_weight: float = LOAD_WEIGHT) -> None:
        self._load_weight = load_weight

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        if not any(sum(room.cached_tokens) for room in rooms):
            return min(rooms, key=_spread).worker_id
        return min(rooms, key=lambda room: (self._cost(size_tokens, room), *_spread(room))).worker_id

    def _cost(self, size_tokens: int, room: Room) -> float:
        saved = sum(tokens * share for tokens, share in zip(room.cached_tokens, SAVED, strict=True))
        held_tokens = room.total_tokens - room.free_tokens
        return max(0.0, size_tokens - saved) + self._load_weight * held_tokens


def _spread(room: Room) -> tuple[float, int, str]:
    """By share: of two idle workers the one that is a little larger would get all until it is as full."""
    return (-room.free_tokens / max(1, room.total_tokens), room.sequences, room.worker_id)


class BestFit:
    """The worker with the least free memory that still takes the sequence; then the lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (room.free_tokens, room.worker_id)).worker_id


class WorstFit:
    """The worker with the most free memory; then the fewest sequences, then the lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (-room.free_tokens, room.sequences, room.worker_id)).worker_id
