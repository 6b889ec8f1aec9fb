"""One worker for one sequence: by what its prompt costs there, or by free memory alone. They never migrate.

Prefix aware: the seconds until the prompt is computed there (what is not cached of it, after the prompts that
wait there already), those until there is memory for it, and a share of what each would slow down the other,
as if it had to be computed: what the worker holds slows this one's answer, and its prompt those that are
there, each of them. Tokens in a lower tier save less than those on the device. Source: `algorithms.md` §5;
the form of the cost is that of Dynamo's KV router. Worst fit spreads load and leaves everyone room to grow,
best fit fills workers up: baselines of papers/000 §VI.
"""

from collections.abc import Sequence

from services.placement.policy.contract import Room

SAVED = (1.0, 0.9, 0.6)
"""Of a token's computation, when it is found in that tier: loading takes time as well."""
LOAD_WEIGHT = 0.125
_PREFILL_TOKENS_PER_S = 4000.0
_STEP_S = 0.025
"""Of a worker that has measured nothing, where no other has."""
_ANSWER_STEPS = 200
"""In which as much memory becomes free as is held."""


class PrefixAware:
    """The worker with the least cost; then the most of the prompt, the largest share of free memory, the
    fewest sequences, the lowest id. Implements `contract.CostedPolicy`."""

    def __init__(self, load_weight: float = LOAD_WEIGHT) -> None:
        self._load_weight = load_weight

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        costs = zip(self.costs_s(size_tokens, rooms), rooms, strict=True)

        def order(one: tuple[float, Room]) -> tuple[float, int, float, int, str]:
            return (round(one[0], 9), -sum(one[1].cached_tokens), *_spread(one[1]))

        return min(costs, key=order)[1].worker_id

    def costs_s(self, size_tokens: int, rooms: Sequence[Room]) -> list[float]:
        """A worker that has measured nothing counts as the fastest that has."""
        rate = max(room.prefill_tokens_per_s for room in rooms) or _PREFILL_TOKENS_PER_S
        steps = [room.decode_step_s for room in rooms if room.decode_step_s > 0]
        step_s = min(steps, default=_STEP_S)
        return [self._cost_s(size_tokens, room, rate, step_s) for room in rooms]

    def _cost_s(self, size_tokens: int, room: Room, rate: float, step_s: float) -> float:
        rate, step_s = room.prefill_tokens_per_s or rate, room.decode_step_s or step_s
        found = zip(room.cached_tokens, SAVED, strict=True)
        saved = min(size_tokens, sum(tokens * share for tokens, share in found))
        held_tokens = max(0, room.total_tokens - room.free_tokens)
        # Where something of it is cached, that is not computed, and the rest attends to it all the same.
        tokens = size_tokens - saved + room.pending_tokens
        tokens += self._load_weight * (held_tokens + room.sequences * size_tokens)
        tokens += room.preceding_share * (size_tokens**2 - saved**2) / 2
        short_tokens = max(0, size_tokens - room.free_tokens)
        return tokens / rate + short_tokens / max(1, held_tokens) * _ANSWER_STEPS * step_s


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
