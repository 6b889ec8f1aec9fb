"""Attention of one layer: our kernel over shuffled blocks against PyTorch's over contiguous keys and values.

SDPA and FlexAttention get gathered keys and values at no cost. All sides take turns.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from bench.kit.stats import alternate
from bench.micro.gpu.steps import BLOCK_TOKENS, DTYPE, TURNS, Shape, graphed

_COLD_BYTES = 1 << 28
"""Total size of the sets of keys and values in a measurement."""
_TOLERANCE = 2e-2


@dataclass(frozen=True)
class AttentionTimes:
    """Attention times of one batch and context."""

    seconds: dict[str, float]
    """Seconds per layer by side: `ours`, `sdpa`, `flex`. A side that cannot be captured is absent."""
    wrong: int
    """Number of sides whose results differ from ours by more than bf16 explains."""
    notes: list[str]


@dataclass(frozen=True)
class Keys:
    """The same keys and values in shuffled blocks and contiguous, with a query per sequence."""

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    key: torch.Tensor
    """`[batch, kv_heads, tokens, head_dim]`."""
    value: torch.Tensor
    query: torch.Tensor
    """`[batch, q_heads, head_dim]`."""


def make_keys(
    shape: Shape, tables: torch.Tensor, dtype: torch.dtype, device: torch.device, seed: int
) -> Keys:
    """Return random keys for int64 block tables `[batch, blocks]` that contain every block once."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (tables.numel(), shape.kv_heads, shape.head_dim, BLOCK_TOKENS)
    k_pool = torch.randn(size, generator=generator, dtype=dtype, device=device)
    v_pool = torch.randn(
        *size[:2], BLOCK_TOKENS, shape.head_dim, generator=generator, dtype=dtype, device=device
    )
    batch = tables.shape[0]
    # [batch, blocks, kv_heads, tokens, dim] → [batch, kv_heads, blocks · tokens, dim]
    key = k_pool[tables].transpose(3, 4).transpose(1, 2).flatten(2, 3).contiguous()
    value = v_pool[tables].transpose(1, 2).flatten(2, 3).contiguous()
    query = torch.randn(batch, shape.q_heads, shape.head_dim, generator=generator, dtype=dtype, device=device)
    return Keys(k_pool, v_pool, key, value, query)


def our_attention(shape: Shape, tables: torch.Tensor, multiprocessors: int) -> Callable[[Keys], torch.Tensor]:
    """Return our attention for decodes at the last position of whole blocks."""
    from services.worker.engine.gpu.attention import attend_paged
    from services.worker.engine.gpu.spans import Heads, pack
    from services.worker.engine.spans import Span
    from services.worker.engine.spans import pack as pack_spans

    tokens = tables.shape[1] * BLOCK_TOKENS
    spans = pack(
        pack_spans([Span(tokens - 1, 1, table) for table in tables.tolist()], BLOCK_TOKENS),
        Heads(shape.q_heads // shape.kv_heads, shape.kv_heads),
        device=tables.device,
        multiprocessors=multiprocessors,
    )
    scaling = shape.head_dim**-0.5
    return lambda keys: attend_paged(keys.k_pool, keys.v_pool, spans, keys.query, scaling)[0]


def sdpa_attention(keys: Keys) -> torch.Tensor:
    """Run PyTorch's SDPA over contiguous keys."""
    query = keys.query[:, :, None]
    return functional.scaled_dot_product_attention(query, keys.key, keys.value, enable_gqa=True)[:, :, 0]


def flex_attention() -> Callable[[Keys], torch.Tensor]:
    """Return FlexAttention over contiguous keys, compiled for these shapes."""
    from torch.nn.attention.flex_attention import flex_attention as uncompiled

    forget: Any = torch.compiler.reset  # torch stops compiling after eight shapes of a function.
    forget()
    compiled: Any = torch.compile(uncompiled, dynamic=False)
    return lambda keys: compiled(keys.query[:, :, None], keys.key, keys.value, enable_gqa=True)[:, :, 0]


@torch.no_grad()
def measure_attention(shape: Shape, batch: int, context_tokens: int, device: torch.device) -> AttentionTimes:
    """Measure all sides in turns."""
    blocks = context_tokens // BLOCK_TOKENS
    tables = torch.randperm(batch * blocks, device=device).view(batch, blocks)
    sets = max(1, min(64, -(-_COLD_BYTES // shape.kv_bytes(batch, context_tokens))))
    keys = [make_keys(shape, tables, DTYPE, device, seed) for seed in range(sets)]
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    sides = {
        "ours": our_attention(shape, tables, multiprocessors),
        "sdpa": sdpa_attention,
        "flex": flex_attention(),
    }
    notes, measured, wrong = [], {}, 0
    reference = sdpa_attention(keys[0]).float()
    for name, side in sides.items():
        try:
            wrong += not torch.allclose(side(keys[0]).float(), reference, rtol=_TOLERANCE, atol=_TOLERANCE)
            measured[name] = graphed([lambda side=side, one=one: side(one) for one in keys])  # type: ignore[misc]
        except RuntimeError as error:
            if name == "ours":
                raise
            notes.append(f"{name} did not run here and is left out: {str(error).splitlines()[0]}")
    seconds = alternate(list(measured.values()), TURNS)
    medians = {name: statistics.median(found) for name, found in zip(measured, seconds, strict=True)}
    return AttentionTimes(medians, wrong, notes)


def measured(read_bytes: int, seconds: dict[str, float], limit_bytes_per_s: float) -> dict[str, float]:
    """Return a cell's figures: microseconds, share of the limit, and speedup over the others."""
    ours = seconds["ours"]
    row = {"us": ours * 1e6, "bandwidth_fraction": read_bytes / ours / limit_bytes_per_s}
    return row | {f"vs_{name}": other / ours for name, other in seconds.items() if name != "ours"}
