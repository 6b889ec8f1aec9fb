"""Closed forms with fitted numbers: a fixed part, a part per token, a part per token of context.

Mixed batches (a rule of ours, as DistServe measured prefill and decode apart): weights are read once and
kernels are launched once, so the fixed part is the larger of the two; the marginal parts of prefill and
decode add up. A chunk [a, b) pays the quadratic part of b less that of a.
Source: DistServe, simdistserve/estimators/profile_data (Apache-2.0), fits on A100-80G with vLLM's kernels.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

_KV_BYTES = 2 * 2
"""Of a number of the hidden size: K and V, 16 bits each."""


@dataclass(frozen=True, slots=True)
class DecodePart:
    """`fixed_ms + context_ms·Σcontext + sequence_ms·B`."""

    fixed_ms: float
    context_ms: float
    sequence_ms: float


@dataclass(frozen=True, slots=True)
class FittedCost:
    """Implements `base.CostModel`. From `large_batch` sequences on, `large` holds."""

    name: str
    source: str
    prefill_fixed_ms: float
    prefill_token_ms: float
    prefill_square_ms: float
    small: DecodePart
    large: DecodePart
    large_batch: int
    layers: int
    hidden: int
    """Numbers in a layer's keys of one token, over all heads; as many in its values."""
    overhead_ms: float = 0.0
    """Of every step: what the driver adds around the kernels."""

    def step_s(self, chunks: Sequence[tuple[int, int]], decodes: int, context_tokens: int) -> float:
        if not chunks and not decodes:
            return 0.0
        fixed_ms = total_ms = 0.0
        if chunks:
            fixed_ms = self.prefill_fixed_ms
            for first, end in chunks:
                total_ms += self.prefill_token_ms * (end - first)
                total_ms += self.prefill_square_ms * (end * end - first * first)
        if decodes:
            part = self.small if decodes < self.large_batch else self.large
            fixed_ms = max(fixed_ms, part.fixed_ms)
            total_ms += part.context_ms * context_tokens + part.sequence_ms * decodes
        return (self.overhead_ms + fixed_ms + total_ms) / 1000.0


@dataclass(frozen=True, slots=True)
class RemoteCost:
    """What a step costs when a part of its context is on other workers.

    Attention over remote blocks runs at the creditor, beside its own, and overlaps with the debtor's over
    local ones; a round trip per layer does not. Where the creditor does not compute, its blocks are copied
    first, and are local then. Source: papers/001 §4.6, §6.4.
    """

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


_DISTSERVE = "DistServe@82831f1 simdistserve profile_data, vLLM kernels, A100-80G"
OPT_13B_A100 = FittedCost(
    name="opt-13b-a100",
    source=_DISTSERVE,
    prefill_fixed_ms=22.052204789310185,
    prefill_token_ms=0.14050923870128956,
    prefill_square_ms=8.076584822611088e-06,
    small=DecodePart(23.475041008414784, 0.000592934466077393, 0.060726861260369455),
    large=DecodePart(20.206356173691958, 0.0004907727036234946, 0.1200031385587413),
    large_batch=95,
    layers=40,
    hidden=5120,
)
OPT_13B_A100_TP2 = FittedCost(
    name="opt-13b-a100-tp2",
    source=_DISTSERVE,
    prefill_fixed_ms=27.440806247810684,
    prefill_token_ms=0.0905453268062731,
    prefill_square_ms=8.452054313246025e-06,
    small=DecodePart(24.54058424191086, 0.00022440145424035404, 0.08715787269447899),
    large=DecodePart(17.947769467112806, 0.0004570851465217072, 0.11179075830699213),
    large_batch=95,
    layers=40,
    hidden=5120,
)
OPT_66B_A100_TP4 = FittedCost(
    name="opt-66b-a100-tp4",
    source=_DISTSERVE,
    prefill_fixed_ms=42.965489361973944,
    prefill_token_ms=0.2128658422785494,
    prefill_square_ms=4.601017396226869e-05,
    small=DecodePart(39.58178936012414, 0.0006945721692406896, 0.13580868185596764),
    large=DecodePart(40.859718006896806, 0.0004264871259058686, 0.19508372547790553),
    large_batch=95,
    layers=64,
    hidden=9216,
)
_HALVED = DecodePart(11.74, 2.965e-4, 3.035e-2)
LLAMA2_13B_2_A100 = FittedCost(
    name="llama2-13b-2-a100",
    source="DistServe's fit of OPT-13B on one A100-80G, halved for two",
    prefill_fixed_ms=11.025,
    prefill_token_ms=7.025e-2,
    prefill_square_ms=4.04e-6,
    small=_HALVED,
    large=_HALVED,
    large_batch=1,
    layers=40,
    hidden=5120,
)
