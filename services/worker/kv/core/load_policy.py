"""Where a block that leaves the device goes, and whether to load or recompute a stored prefix. Pure.

Both are decided by measured speeds, in seconds per block. A block goes to the `Place` with the least expected
time (docs/decisions/0066). Of `n` stored blocks, the first `k` are loaded such that load(k) + recompute(n -
k) is least. A tier of unknown speed is probed with a few blocks, and a tier that lost is probed again now and
then. The savings and costs of each tier are counted. Source: `algorithms.md` §5."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.kv.core.radix_tree import Tier
from shared.average import averaged

PROBE_BLOCKS = 4
"""Number of blocks loaded from a tier of unknown speed."""
RETRY_LOOKUPS = 256
"""Number of refusals before a tier is probed again."""
_WEIGHT = 0.2
"""Weight of the newest measurement."""
_PATIENCE = 2.0
"""A load is abandoned after this many times the estimated time to recompute."""
_LEAST_PATIENCE_S = 0.05
"""Minimum time before a load is abandoned: the copying thread may have to wait for a core."""


@dataclass(frozen=True, slots=True)
class KvPlace:
    """Where a block that leaves the device may go."""

    tier: Tier | None
    """The tier from which the block is loaded again; None: nowhere, it is computed again."""
    is_waited_for: bool = False
    """The engine waits for copies to it. A copy is assumed to take as long as a load."""


HOST, PEERS, DROPPED = KvPlace(Tier.HOST, is_waited_for=True), KvPlace(Tier.PEER), KvPlace(None)


class CostGate:
    """Smoothed speeds of tiers and prefill, and the decisions made from them."""

    def __init__(self) -> None:
        self._block_s: dict[Tier, float] = {}
        self.recompute_block_s: float | None = None
        """Time to compute a block; None: unknown."""
        self._refusals: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self.refused_blocks: dict[Tier, int] = dict.fromkeys(Tier, 0)
        """Number of stored blocks that were computed instead, as that was estimated to be faster."""
        self.saved_s: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        """Estimated time to compute the blocks found there."""
        self.spent_s: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        """Time of loads from there, and of the engine's waits for copies to there."""

    @property
    def losing(self) -> tuple[Tier, ...]:
        """Tiers that are slower than computing, and used only for probes."""
        recompute_s = self.recompute_block_s
        if recompute_s is None:
            return ()
        return tuple(tier for tier, block_s in sorted(self._block_s.items()) if block_s > recompute_s)

    def block_s(self, tier: Tier) -> float:
        """Measured time to load a block from a tier; 0: unknown."""
        return self._block_s.get(tier, 0.0)

    def profile(self, tier: Tier, block_s: float) -> None:
        """Set the time measured at the start; 0: unknown."""
        if block_s > 0:
            self._block_s[tier] = block_s

    def on_loaded(self, tier: Tier, blocks: int, elapsed_s: float) -> None:
        """Count blocks loaded from a tier; blocks on the device take no time."""
        if blocks == 0:
            return
        self.spent_s[tier] += elapsed_s
        self.saved_s[tier] += blocks * (self.recompute_block_s or 0.0)
        if tier is not Tier.DEVICE:
            before = None if self._is_due(tier) else self._block_s.get(tier)
            self._block_s[tier] = averaged(before, elapsed_s / blocks, _WEIGHT)
            self._refusals[tier] = 0

    def on_wasted(self, tier: Tier, elapsed_s: float, *, abandoned: bool) -> None:
        """Count a load without result. An abandoned load is a lower bound of the time per block."""
        self.spent_s[tier] += elapsed_s
        if abandoned:
            self._block_s[tier] = max(elapsed_s, self._block_s.get(tier, 0.0))
            self._refusals[tier] = 0

    def on_prefilled(self, blocks: float, elapsed_s: float) -> None:
        """Count computed prompt blocks."""
        if blocks > 0:
            self.recompute_block_s = averaged(self.recompute_block_s, elapsed_s / blocks, _WEIGHT)

    def worth_loading(self, tiers: Sequence[Tier]) -> int:
        """Return the number of leading blocks to load, given each block's tier; the rest is computed."""
        recompute_s = self.recompute_block_s
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

    def cheapest(self, places: Sequence[KvPlace], returning: float | None = 1.0) -> KvPlace:
        """Return the place with the least expected time per block, the first of equals. The first place is
        used while any cost, or the share `returning` of blocks that come back, is unknown."""
        best, least_s = places[0], float("inf")
        for place in places:
            cost_s = None if returning is None else self._place_s(place, returning)
            if cost_s is None:
                return places[0]
            if cost_s < least_s:
                best, least_s = place, cost_s
        return best

    def _place_s(self, place: KvPlace, returning: float) -> float | None:
        """Return the expected seconds per block if the share `returning` comes back; None: not measured."""
        block_s = self.recompute_block_s if place.tier is None else self.block_s(place.tier) or None
        return None if block_s is None else (place.is_waited_for + returning) * block_s

    def most_s(self, blocks: int) -> float:
        """Return the time after which to abandon a load."""
        recompute_s = self.recompute_block_s
        return 1.0 if recompute_s is None else max(_LEAST_PATIENCE_S, _PATIENCE * blocks * recompute_s)

    def _is_due(self, tier: Tier) -> bool:
        return self._refusals[tier] >= RETRY_LOOKUPS

    def _cost_s(self, tier: Tier, seen: int) -> float:
        """Return the time of one more block from `tier` after so many."""
        known = self._block_s.get(tier)
        if known is None or self._is_due(tier):
            return 0.0 if seen < PROBE_BLOCKS else float("inf")
        return known
