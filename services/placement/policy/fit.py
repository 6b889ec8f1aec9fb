"""Placement policies without migration: prefix-aware, best fit and worst fit.

The prefix-aware cost is an estimate in seconds. It adds the time to compute the uncached prompt after pending
prompts, the time until memory is free, and a share of mutual slowdown. The worker's load slows the new
answer, and the new prompt slows each running sequence. Cached tokens in lower tiers save less. Source:
`algorithms.md` §5; the cost has the form of Dynamo's KV router. Worst fit spreads load and leaves room to
grow; best fit fills workers. Both are baselines of papers/000 §VI.
"""

from collections.abc import Sequence

from services.placement.policy.contract import Room

SAVED = (1.0, 0.9, 0.6)
"""Share of a token's computation saved by a cache hit, by tier: loading takes time as well."""
LOAD_WEIGHT = 0.125
_PREFILL_TOKENS_PER_S = 4000.0
_STEP_S = 0.025
"""Assumed decode step if no worker measured one."""
_ANSWER_STEPS = 200
"""Assumed number of decode steps in which a worker frees as much memory as it holds."""


class PrefixAware:
    """Chooses the lowest cost; implements `contract.CostedPolicy`. Ties: longest cached prefix, largest share
    of free memory, fewest sequences, lowest id."""

    def __init__(self, load_weight: float = LOAD_WEIGHT) -> None:
        self._load_weight = load_weight

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        costs = zip(self.costs_s(size_tokens, rooms), rooms, strict=True)

        def order(one: tuple[float, Room]) -> tuple[float, int, float, int, str]:
            return (round(one[0], 9), -sum(one[1].cached_tokens), *_spread(one[1]))

        return min(costs, key=order)[1].worker_id

    def costs_s(self, size_tokens: int, rooms: Sequence[Room]) -> list[float]:
        """Return the cost per room, in seconds. Workers without measurements count as the fastest one."""
        rate = max(room.prefill_tokens_per_s for room in rooms) or _PREFILL_TOKENS_PER_S
        steps = [room.decode_step_s for room in rooms if room.decode_step_s > 0]
        step_s = min(steps, default=_STEP_S)
        return [self._cost_s(size_tokens, room, rate, step_s) for room in rooms]

    def _cost_s(self, size_tokens: int, room: Room, rate: float, step_s: float) -> float:
        rate, step_s = room.prefill_tokens_per_s or rate, room.decode_step_s or step_s
        found = zip(room.cached_tokens, SAVED, strict=True)
        saved = min(size_tokens, sum(tokens * share for tokens, share in found))
        held_tokens = max(0, room.total_tokens - room.free_tokens)
        # Cached tokens are not computed, but the other tokens still attend to them.
        tokens = size_tokens - saved + room.pending_tokens
        tokens += self._load_weight * (held_tokens + room.sequences * size_tokens)
        tokens += room.preceding_share * (size_tokens**2 - saved**2) / 2
        short_tokens = max(0, size_tokens - room.free_tokens)
        return tokens / rate + short_tokens / max(1, held_tokens) * _ANSWER_STEPS * step_s


def _spread(room: Room) -> tuple[float, int, str]:
    """Return a sort key by free share: by free tokens a slightly larger idle worker would get all."""
    return (-room.free_tokens / max(1, room.total_tokens), room.sequences, room.worker_id)


class BestFit:
    """Chooses the worker with the least free memory, then the lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (room.free_tokens, room.worker_id)).worker_id


class WorstFit:
    """Chooses the worker with the most free memory, then the fewest sequences, then the lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (-room.free_tokens, room.sequences, room.worker_id)).worker_id
