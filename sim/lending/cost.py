"""What an iteration costs when a part of the context is on other workers. Pure.

LLaMA2-13B on two A100-80G: DistServe's fit of OPT-13B on one, halved for two (decode, B < 95; prefill).
Attention over remote blocks runs at the creditor, beside its own, and overlaps with the debtor's over local
ones; a round trip per layer does not. Source: papers/001 §4.6, §6.4; the fit is in
`services/worker/core/costs/fitted.py`.
"""

from collections.abc import Collection
from dataclasses import dataclass

LAYERS = 40
KV_BYTES_PER_TOKEN = LAYERS * 2 * 5120 * 2


@dataclass(frozen=True, slots=True)
class LendingCost:
    """Seconds, and bytes per second."""

    step_base_s: float = 0.01174
    sequence_s: float = 0.00003035
    context_token_s: float = 2.965e-7
    prefill_base_s: float = 0.011025
    prefill_token_s: float = 7.025e-5
    prefill_token_squared_s: float = 4.04e-9
    round_trip_s: float = 40e-6
    """Of one layer's queries to a creditor and its answer."""
    link_bytes_per_s: float = 20e9

    def prefill_s(self, tokens: int) -> float:
        """Of one prompt."""
        linear = self.prefill_base_s + tokens * self.prefill_token_s
        return linear + tokens * tokens * self.prefill_token_squared_s

    def step_s(self, sequences: int, local_tokens: int, remote_tokens: Collection[int]) -> float:
        """One decode iteration of a debtor; `remote_tokens` by creditor, those with none left out."""
        local_s = local_tokens * self.context_token_s
        attention_s = local_s
        if remote_tokens:
            slowest_s = max(remote_tokens) * self.context_token_s
            attention_s = max(local_s, slowest_s) + LAYERS * self.round_trip_s
        return self.step_base_s + sequences * self.sequence_s + attention_s

    def serving_s(self, remote_tokens: int) -> float:
        """What one iteration of a debtor takes of its creditor's time."""
        return remote_tokens * self.context_token_s

    def copy_s(self, tokens: int) -> float:
        """KV of so many tokens over the link."""
        return tokens * KV_BYTES_PER_TOKEN / self.link_bytes_per_s
