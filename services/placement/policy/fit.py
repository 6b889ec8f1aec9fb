"""Placement policies without migration: prefix-aware, best fit and worst fit.

The prefix-aware cost is in seconds: the time to compute the uncached prompt after pending prompts, the time
until memory is free, and a share of mutual slowdown. It has the form of Dynamo's KV router
(`algorithms.md` §5). Best fit and worst fit are baselines of papers/000 §VI.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from services.placement.policy.contract import Column, Room, RoomColumns

_HOST_SAVES, _DISK_SAVES = 0.9, 0.6
"""Share of a token's computation saved by a cache hit in a lower tier: loading takes time as well."""
LOAD_WEIGHT = 0.125
_PREFILL_TOKENS_PER_S = 4000.0
_STEP_S = 0.025
"""Assumed decode step if no worker measured one."""
_ANSWER_STEPS = 200
"""Assumed number of decode steps in which a worker frees as much memory as it holds."""


class PrefixAware:
    """Chooses the lowest cost; implements `contract.CostedPolicy`. Ties: longest cached prefix, largest share
    of free memory, fewest sequences, lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        order = [
            # By free share: by free tokens a slightly larger idle worker would get all.
            (
                round(cost_s, 9),
                -sum(room.cached_tokens),
                -room.free_tokens / max(1, room.total_tokens),
                room.sequences,
                room.worker_id,
            )
            for cost_s, room in zip(self.costs_s(size_tokens, rooms), rooms, strict=True)
        ]
        return min(order)[-1]

    def costs_s(self, size_tokens: int, rooms: Sequence[Room]) -> list[float]:
        """Return the cost per room, in seconds. Workers without measurements count as the fastest one."""
        fastest, step_s = 0.0, inf
        for room in rooms:
            fastest = max(fastest, room.prefill_tokens_per_s)
            step_s = min(step_s, room.decode_step_s or inf)
        fastest, step_s = fastest or _PREFILL_TOKENS_PER_S, step_s if step_s < inf else _STEP_S
        costs_s = []
        for room in rooms:
            device, host, disk = room.cached_tokens
            saved = min(size_tokens, device + _HOST_SAVES * host + _DISK_SAVES * disk)
            held_tokens = max(0, room.total_tokens - room.free_tokens)
            # Cached tokens are not computed, but the other tokens still attend to them.
            tokens = size_tokens - saved + round(room.pending_tokens)
            tokens += LOAD_WEIGHT * (held_tokens + room.sequences * size_tokens)
            tokens += room.preceding_share * (size_tokens**2 - saved**2) / 2
            short_tokens = max(0, size_tokens - room.free_tokens)
            wait_s = short_tokens / max(1, held_tokens) * _ANSWER_STEPS * (room.decode_step_s or step_s)
            costs_s.append(tokens / (room.prefill_tokens_per_s or fastest) + wait_s)
        return costs_s

    def ranks(self, size_tokens: int, rooms: RoomColumns) -> Column:
        speeds, steps_s = rooms.prefill_tokens_per_s, rooms.decode_step_s
        fastest = speeds.max(initial=0.0) or _PREFILL_TOKENS_PER_S
        step_s = steps_s.min(where=steps_s > 0, initial=inf)
        held_tokens = np.maximum(0, rooms.total_tokens - rooms.free_tokens)
        tokens = size_tokens + rooms.pending_tokens
        tokens += LOAD_WEIGHT * (held_tokens + rooms.sequences * size_tokens)
        tokens += rooms.preceding_share * size_tokens**2 / 2
        short_tokens = np.maximum(0, size_tokens - rooms.free_tokens)
        step = np.where(steps_s > 0, steps_s, step_s if step_s < inf else _STEP_S)
        wait_s = short_tokens / np.maximum(1, held_tokens) * _ANSWER_STEPS * step
        costs_s: Column = tokens / np.where(speeds > 0, speeds, fastest) + wait_s
        return costs_s


class BestFit:
    """Chooses the worker with the least free memory, then the lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (room.free_tokens, room.worker_id)).worker_id

    def ranks(self, size_tokens: int, rooms: RoomColumns) -> Column:
        return rooms.free_tokens


class WorstFit:
    """Chooses the worker with the most free memory, then the fewest sequences, then the lowest id."""

    def choose(self, size_tokens: int, rooms: Sequence[Room]) -> str:
        return min(rooms, key=lambda room: (-room.free_tokens, room.sequences, room.worker_id)).worker_id

    def ranks(self, size_tokens: int, rooms: RoomColumns) -> Column:
        return rooms.sequences / (1 << 20) - rooms.free_tokens
