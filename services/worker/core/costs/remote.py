"""What a step costs when a part of its context is on other workers.

Attention over remote blocks runs at the creditor, beside its own, and overlaps with the debtor's over local
ones; a round trip per layer does not. Where the creditor does not compute, its blocks are copied first, and
are local then. Source: papers/001 §4.6, §6.4.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.worker.core.costs.fitted import FittedCost

_KV_BYTES = 2 * 2
"""Of a number of the hidden size: K and V, 16 bits each."""


@dataclass(frozen=True, slots=True)
class RemoteCost:
    """Seconds, and bytes per second, around a cost model of steps."""

    cost: FittedCost
    round_trip_s: float = 40e-6
    """Of one layer's queries to a creditor and its answer."""
    link_bytes_per_s: float = 20e9

    def step_s(
        self,
        chunks: Sequence[tuple[int, int]],
        decodes: int,
        local_tokens: int,
        remote_tokens: Collection[int],
    ) -> float:
        """As of `CostModel`, for a debtor: the decodes' contexts are `local_tokens` here, and `remote_tokens`
        at each creditor that has a part in the step. Attention of chunks costs what it would here."""
        slowest_tokens = max((local_tokens, *remote_tokens))
        waited_s = self.cost.layers * self.round_trip_s if remote_tokens else 0.0
        return self.cost.step_s(chunks, decodes, slowest_tokens) + waited_s

    def serving_s(self, remote_tokens: int) -> float:
        """What one step of a debtor takes of its creditor's time."""
        return self.cost.step_s([], 1, remote_tokens) - self.cost.step_s([], 1, 0)

    def copy_s(self, tokens: int) -> float:
        """KV of so many tokens over the link."""
        return tokens * self.cost.layers * self.cost.hidden * _KV_BYTES / self.link_bytes_per_s
