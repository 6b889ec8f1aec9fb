"""`python -m services.worker.engine.native.timings` prints CPU ms of decode attention in C++ and torch.

It also prints the time to read the pools in order. Each figure is the minimum of twelve rounds.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch

from services.worker.engine.attention import LayerShape, PagedAttention
from services.worker.engine.native.library import AttentionMode
from services.worker.engine.paged import Shape
from services.worker.engine.spans import Span

_BLOCK_TOKENS = 16
_ROUNDS = 12
_MODES: tuple[AttentionMode, AttentionMode] = ("native", "torch")
_SHAPES = {"tiny_chat, 8 layers": (8, 2, 4, 64), "Llama-3-8B, 1 layer": (1, 8, 32, 128)}
"""Number of layers, KV heads and query heads, and head size."""


def _cpu_ms(run: Callable[[], object]) -> float:
    start_s = time.thread_time()
    run()
    return (time.thread_time() - start_s) * 1e3


def _step(attention: PagedAttention, spans: Sequence[Span], query: torch.Tensor, new: torch.Tensor) -> None:
    attention.begin(spans, len(spans))
    for layer in range(len(attention.pools)):
        attention.attend(layer, query, new, new, Shape(query.shape[2] ** -0.5))


def _measure(shape: tuple[int, int, int, int], batch: int, context: int, mode: AttentionMode) -> list[float]:
    """Return the minimum CPU ms of a step and of reading its pools, without the first (warm-up) round."""
    layers, kv_heads, q_heads, dim = shape
    width = -(-context // _BLOCK_TOKENS)
    blocks = torch.randperm(batch * width).view(batch, width).tolist()
    attention = PagedAttention(
        [LayerShape(kv_heads, dim, dim)] * layers,
        kv_blocks=batch * width,
        block_tokens=_BLOCK_TOKENS,
        dtype=torch.float32,
        device=torch.device("cpu"),
        mode=mode,
    )
    tensors = [pool.normal_() for pools in attention.pools for pool in pools]
    step = partial(
        _step,
        attention,
        [Span(context - 1, 1, row) for row in blocks],
        torch.randn(batch, q_heads, dim),
        torch.randn(batch, kv_heads, dim),
    )
    rounds = [[_cpu_ms(step), _cpu_ms(lambda: [each.sum() for each in tensors])] for _ in range(_ROUNDS + 1)]
    return [min(times) for times in zip(*rounds[1:], strict=True)]


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    for (name, shape), batch, context in product(_SHAPES.items(), (1, 8, 32, 64), (100, 500)):
        (native, read), (plain, _) = (_measure(shape, batch, context, mode) for mode in _MODES)
        print(
            f"{name}, batch {batch:2}, context {context}: C++ {native:.2f} ms, torch {plain:.2f} ms, "
            f"reading it all in order {read:.2f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()
