"""Closed forms with fitted numbers: a fixed part, a part per token, a part per token of context.

In mixed batches (our rule) the fixed part is the larger of the two, and the other parts add up. A chunk [a,
b) pays the quadratic part of b less that of a. Source: DistServe, profile_data (Apache-2.0)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

_KV_BYTES = 2 * 2
"""Bytes of KV for each number of the hidden size: K and V, 16 bits each."""


@dataclass(frozen=True, slots=True)
class DecodePart:
    """`fixed_ms + context_ms·Σcontext + sequence_ms·B`."""

    fixed_ms: float
    context_ms: float
    sequence_ms: float


_LARGE_BATCH = 95


@dataclass(frozen=True, slots=True)
class FittedCost:
    """A `CostModel`. From `_LARGE_BATCH` sequences on, `large` holds."""

    name: str
    prefill_ms: tuple[float, float, float]
    """Fixed part, per token, and per square of the context."""
    small: DecodePart
    large: DecodePart
    layers: int
    hidden: int
    """Numbers in a layer's keys of one token, over all heads; as many in its values."""

    def step_s(self, chunks: Sequence[tuple[int, int]], decodes: int, context_tokens: int) -> float:
        if not chunks and not decodes:
            return 0.0
        fixed_ms = total_ms = 0.0
        if chunks:
            fixed_ms, token_ms, square_ms = self.prefill_ms
            for first, end in chunks:
                total_ms += token_ms * (end - first) + square_ms * (end * end - first * first)
        if decodes:
            part = self.small if decodes < _LARGE_BATCH else self.large
            fixed_ms = max(fixed_ms, part.fixed_ms)
            total_ms += part.context_ms * context_tokens + part.sequence_ms * decodes
        return (fixed_ms + total_ms) / 1000.0


@dataclass(frozen=True, slots=True)
class RemoteCost:
    """Cost of a step with a part of its context on other workers. Attention over remote blocks runs at
    the creditor and overlaps with the debtor's over local ones; a round trip per layer does not. Source:
    papers/001 §4.6, §6.4."""

    cost: FittedCost
    round_trip_s: float = 40e-6
    """Time of one layer's queries to a creditor and its answer."""
    link_bytes_per_s: float = 20e9

    def step_s(
        self,
        chunks: Sequence[tuple[int, int]],
        decodes: int,
        local_tokens: int,
        remote_tokens: Collection[int],
    ) -> float:
        """As of `CostModel`, for a debtor: the decodes' contexts are `local_tokens` here, and `remote_tokens`
        at each creditor that has a part in the step."""
        slowest_tokens = max((local_tokens, *remote_tokens))
        waited_s = self.cost.layers * self.round_trip_s if remote_tokens else 0.0
        return self.cost.step_s(chunks, decodes, slowest_tokens) + waited_s

    def serving_s(self, remote_tokens: int) -> float:
        """Return the creditor's seconds that one step of a debtor takes."""
        return self.cost.step_s([], 1, remote_tokens) - self.cost.step_s([], 1, 0)

    def copy_s(self, tokens: int) -> float:
        """KV of so many tokens over the link."""
        return tokens * self.cost.layers * self.cost.hidden * _KV_BYTES / self.link_bytes_per_s


# DistServe@82831f1 simdistserve profile_data, vLLM kernels, A100-80G.
OPT_13B_A100 = FittedCost(
    "opt-13b-a100",
    (22.052204789310185, 0.14050923870128956, 8.076584822611088e-06),
    small=DecodePart(23.475041008414784, 0.000592934466077393, 0.060726861260369455),
    large=DecodePart(20.206356173691958, 0.0004907727036234946, 0.1200031385587413),
    layers=40,
    hidden=5120,
)
_OPT_13B_A100_TP2 = FittedCost(
    "opt-13b-a100-tp2",
    (27.440806247810684, 0.0905453268062731, 8.452054313246025e-06),
    small=DecodePart(24.54058424191086, 0.00022440145424035404, 0.08715787269447899),
    large=DecodePart(17.947769467112806, 0.0004570851465217072, 0.11179075830699213),
    layers=40,
    hidden=5120,
)
_OPT_66B_A100_TP4 = FittedCost(
    "opt-66b-a100-tp4",
    (42.965489361973944, 0.2128658422785494, 4.601017396226869e-05),
    small=DecodePart(39.58178936012414, 0.0006945721692406896, 0.13580868185596764),
    large=DecodePart(40.859718006896806, 0.0004264871259058686, 0.19508372547790553),
    layers=64,
    hidden=9216,
)
# DistServe's fit of OPT-13B on one A100-80G, halved for two.
_HALVED = DecodePart(11.74, 2.965e-4, 3.035e-2)
LLAMA2_13B_2_A100 = FittedCost(
    "llama2-13b-2-a100", (11.025, 7.025e-2, 4.04e-6), _HALVED, _HALVED, layers=40, hidden=5120
)

_GEMM_SHARE, _ATTENTION_SHARE = 0.6, 0.4
_A100_TFLOPS, _H100_TFLOPS, _H200_TFLOPS = 312.0, 989.0, 989.0
_KERNELS = (
    ("llama2-7b-a100", DecodePart(9.783, 3.210e-4, 2.069e-2), 6.7e9, 4096, 32, _A100_TFLOPS),
    ("opt-13b-h100", DecodePart(9.725, 2.624e-4, 2.106e-2), 12.9e9, 5120, 40, _H100_TFLOPS),
    ("llama2-13b-h100", DecodePart(9.820, 2.623e-4, 2.032e-2), 13.0e9, 5120, 40, _H100_TFLOPS),
    # Scaled from 13B: the fixed part with the weights, context with bytes of KV, batch with FLOPs.
    ("opt-30b-h100", DecodePart(22.6, 4.41e-4, 4.9e-2), 30.0e9, 7168, 48, _H100_TFLOPS),
    ("llama2-7b-h200", DecodePart(4.213, 1.132e-4, 1.800e-2), 6.7e9, 4096, 32, _H200_TFLOPS),
)
"""Name, decode, parameters, hidden size, layers and dense bf16 peak of one GPU. Decode: least squares over
relative errors of 35 points each (batch 1 to 256, context 128 to 4096), median error below 3 %,
aiconfigurator@095f58a5 kernel tables (vLLM 0.14 and 0.19, Apache-2.0). Prefill was not measured: matrix
products at 60 % of the peak, attention at 40 %, the fixed part of a decode."""


def _kernel_cost(
    name: str, decode: DecodePart, parameters: float, hidden: int, layers: int, peak_tflops: float
) -> FittedCost:
    flops_per_ms = peak_tflops * 1e9
    token_ms = 2 * parameters / (_GEMM_SHARE * flops_per_ms)
    square_ms = 2 * hidden * layers / (_ATTENTION_SHARE * flops_per_ms)
    return FittedCost(name, (decode.fixed_ms, token_ms, square_ms), decode, decode, layers, hidden)


FITTED = (
    *(OPT_13B_A100, _OPT_13B_A100_TP2, _OPT_66B_A100_TP4, LLAMA2_13B_2_A100),
    *(_kernel_cost(*row) for row in _KERNELS),
)
