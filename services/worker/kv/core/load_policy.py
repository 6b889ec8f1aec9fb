"""Whether a stored prefix is worth loading: measured bandwidths against measured prefill speed.

Of `n` stored blocks the first `k` are loaded such that load(k) + recompute(n - k) is least; k may be 0. A
tier whose speed nobody knows yet is tried with a few blocks, and one that lost is tried again now and then,
so that the gate notices when it recovers. What each tier saved and cost is counted. Pure. Source:
`algorithms.md` §5.
"""

from collections.abc import Sequence

from services.worker.kv.core.radix_tree import Tier
from shared.average import averaged

PROBE_BLOCKS = 4
"""Loaded from a tier that has not been measured."""
RETRY_LOOKUPS = 256
"""So many refusals of a tier, then it is probed again."""
_WEIGHT = 0.2
"""Of the newest measurement."""
_PATIENCE = 2.0
"""A load is abandoned when it takes this many times what recomputing would have taken."""
_LEAST_PATIENCE_S = 0.05
"""However few blocks: the thread that copies may have to wait for a core."""


class CostGate:
    """Speeds of tiers and of prefill, exponentially weighted, and the decision made from them."""

    def __init__(self) -> None:
        self._block_s: dict[Tier, float] = {}
        self._recompute_block_s: float | None = None
        self._refusals: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self.refused_blocks: dict[Tier, int] = dict.fromkeys(Tier, 0)
        """Stored there, and computed instead because that was thought to be faster."""
        self.saved_s: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        """What computing the blocks found there would have taken."""
        self.spent_s: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        """What loading from there took, and what the engine waited for blocks to be copied to there."""

    @property
    def losing(self) -> tuple[Tier, ...]:
        """Tiers that are slower than computing and therefore not used, but for a probe now and then."""
        recompute_s = self._recompute_block_s
        if recompute_s is None:
            return ()
        return tuple(tier for tier, block_s in sorted(self._block_s.items()) if block_s > recompute_s)

    def block_s(self, tier: Tier) -> float:
        """Measured for a block from there; 0 before the first."""
        return self._block_s.get(tier, 0.0)

    def profile(self, tier: Tier, block_s: float) -> None:
        """What was timed before anybody wanted a block from there; 0: nothing was."""
        if block_s > 0:
            self._block_s[tier] = block_s

    def on_loaded(self, tier: Tier, blocks: int, elapsed_s: float) -> None:
        """`blocks` came from `tier` in that time; from the device they come at once."""
        if blocks == 0:
            return
        self.spent_s[tier] += elapsed_s
        self.saved_s[tier] += blocks * (self._recompute_block_s or 0.0)
        if tier is not Tier.DEVICE:
            before = None if self._is_due(tier) else self._block_s.get(tier)
            self._block_s[tier] = averaged(before, elapsed_s / blocks, _WEIGHT)
            self._refusals[tier] = 0

    def on_wasted(self, tier: Tier, elapsed_s: float, *, abandoned: bool) -> None:
        """A load from `tier` brought nothing. One that was given up is at best as slow as that a block."""
        self.spent_s[tier] += elapsed_s
        if abandoned:
            self._block_s[tier] = max(elapsed_s, self._block_s.get(tier, 0.0))
            self._refusals[tier] = 0

    def on_filled(self, tier: Tier, elapsed_s: float) -> None:
        """The engine waited so long for blocks to be copied to `tier`."""
        self.spent_s[tier] += elapsed_s

    def on_prefilled(self, blocks: float, elapsed_s: float) -> None:
        """So many blocks of prompts were computed in that time."""
        if blocks > 0:
            self._recompute_block_s = averaged(self._recompute_block_s, elapsed_s / blocks, _WEIGHT)

    def worth_loading(self, tiers: Sequence[Tier]) -> int:
        """How many of these consecutive blocks, in the tiers they lie in, to load; the rest is computed."""
        recompute_s = self._recompute_block_s
        if recompute_s is None:
            return len(tiers)
        best, best_s, cost_s = 0, 0.0, 0.0
        seen = dict.fromkeys(Tier, 0)
        for index, tier in enumerate(tiers):
            cost_s += self._cost_s(tier, seen[tier]) - recompute_s
            seen[tier] += 1
            if cost_s <= best_s:
                best, best_s = index + 1, cost_s
        for tier in set(tiers[best:]):
            self._refusals[tier] += 1
        for tier in tiers[best:]:
            self.refused_blocks[tier] += 1
        return best

    def worth_storing(self, tier: Tier, returning: float | None) -> bool:
        """Whether copies to `tier` save more than they take where that share of the blocks is wanted again.
        A copy back takes as long as one there; where anything is unknown they are worth it."""
        recompute_s, block_s = self._recompute_block_s, self._block_s.get(tier)
        if returning is None or recompute_s is None or block_s is None:
            return True
        return returning * (recompute_s - block_s) > block_s

    def most_s(self, blocks: int) -> float:
        """When to abandon a load of so many blocks."""
        recompute_s = self._recompute_block_s
        return 1.0 if recompute_s is None else max(_LEAST_PATIENCE_S, _PATIENCE * blocks * recompute_s)

    def _is_due(self, tier: Tier) -> bool:
        return self._refusals[tier] >= RETRY_LOOKUPS

    def _cost_s(self, tier: Tier, seen: int) -> float:
        """Of one more block from `tier` after so many."""
        known = self._block_s.get(tier)
        if known is None or self._is_due(tier):
            return 0.0 if seen < PROBE_BLOCKS else float("inf")
        return known
