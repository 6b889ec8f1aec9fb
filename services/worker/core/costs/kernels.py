"""Costs from kernel timings of newer machines: decode fitted, prefill estimated.

Decode: least squares over relative errors of 35 points each (batch 1 to 256, context 128 to 4096), median
error below 3 %, aiconfigurator's bf16 kernel tables (vLLM 0.14 and 0.19, Apache-2.0). Those are kernel
times alone, without what a driver adds. Prefill was not measured whole: a token costs its matrix products
at 60 % of the dense bf16 peak, attention at 40 %; the fixed part is that of a decode, the weights being
read once.
"""

from services.worker.core.costs.fitted import DecodePart, FittedCost

_SOURCE = "aiconfigurator@095f58a5 kernel tables (decode); matrix products at 60 % of peak (prefill)"
_GEMM_SHARE, _ATTENTION_SHARE = 0.6, 0.4
A100_TFLOPS, H100_TFLOPS, H200_TFLOPS = 312.0, 989.0, 989.0


def kernel_cost(
    name: str,
    decode: DecodePart,
    *,
    parameters: float,
    hidden: int,
    layers: int,
    peak_tflops: float,
    overhead_ms: float = 0.0,
) -> FittedCost:
    """A cost of one GPU: `decode` as measured, prefill from the model's size."""
    flops_per_ms = peak_tflops * 1e9
    return FittedCost(
        name=name,
        source=_SOURCE,
        prefill_fixed_ms=decode.fixed_ms,
        prefill_token_ms=2 * parameters / (_GEMM_SHARE * flops_per_ms),
        prefill_square_ms=2 * hidden * layers / (_ATTENTION_SHARE * flops_per_ms),
        small=decode,
        large=decode,
        large_batch=1,
        layers=layers,
        hidden=hidden,
        overhead_ms=overhead_ms,
    )


KERNEL_COSTS = (
    kernel_cost(
        "llama2-7b-a100",
        DecodePart(9.783, 3.210e-4, 2.069e-2),
        parameters=6.7e9,
        hidden=4096,
        layers=32,
        peak_tflops=A100_TFLOPS,
    ),
    kernel_cost(
        "opt-13b-h100",
        DecodePart(9.725, 2.624e-4, 2.106e-2),
        parameters=12.9e9,
        hidden=5120,
        layers=40,
        peak_tflops=H100_TFLOPS,
    ),
    kernel_cost(
        "llama2-13b-h100",
        DecodePart(9.820, 2.623e-4, 2.032e-2),
        parameters=13.0e9,
        hidden=5120,
        layers=40,
        peak_tflops=H100_TFLOPS,
    ),
    # Scaled from 13B: the fixed part with the weights, context with bytes of KV, batch with FLOPs.
    kernel_cost(
        "opt-30b-h100",
        DecodePart(22.6, 4.41e-4, 4.9e-2),
        parameters=30.0e9,
        hidden=7168,
        layers=48,
        peak_tflops=H100_TFLOPS,
    ),
    kernel_cost(
        "llama2-7b-h200",
        DecodePart(4.213, 1.132e-4, 1.800e-2),
        parameters=6.7e9,
        hidden=4096,
        layers=32,
        peak_tflops=H200_TFLOPS,
    ),
)
