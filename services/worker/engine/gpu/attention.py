"""Functions that launch the Triton kernels: attention over paged KV, KV writes and rotation.

Pools are as in `engine.paged`, contiguous. All tensors of a call are on one CUDA device, or in host memory
if TRITON_INTERPRET=1 is set on import (slow; for tests). A CUDA graph can capture the calls."""

from functools import cache
from typing import Any

import torch
import triton

from services.worker.engine.gpu import kernels
from services.worker.engine.gpu.spans import (
    ALL_SPLITS,
    DECODE_ROWS,
    MOST_TILE_KEYS,
    PREFILL_ROWS,
    DeviceSpans,
    Tiles,
    tile_shape,
    upload,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_LANES = 16
_TILE_BYTES = 16384
"""Shared memory of a tile of keys; values need as much, and each pipeline stage needs both."""
_DEEP_PIPELINE_BYTES = 160 * 1024
"""Shared memory per multiprocessor that is enough for three pipeline stages."""
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


def attend_paged(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    spans: DeviceSpans,
    query: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    window_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention `[rows, q_heads, value_dim]` and log-sum-exp `[rows, q_heads]` fp32 of every row.

    `query` `[rows, q_heads, head_dim]`, heads contiguous; the output has its dtype. A row that sees no key
    gets zeros and −inf. `spans` must be packed for this number of query heads per KV head.

    Raises ValueError for tensors that the kernel does not support."""
    _check(k_pool, v_pool)
    rows, q_heads, head_dim = query.shape
    if head_dim != k_pool.shape[2] or q_heads % k_pool.shape[1] or query.stride()[1:] != (head_dim, 1):
        raise ValueError(f"queries {tuple(query.shape)} of strides {query.stride()} do not fit these pools")
    value_dim = v_pool.shape[3]
    output = query.new_empty(rows, q_heads, value_dim)
    lse = query.new_empty(rows, q_heads, dtype=torch.float32)
    numbers = (spans.first_position, spans.table_start, spans.table_position, spans.key_end, spans.blocks)
    for tiles in spans.tiles:
        parts, parts_lse = output, lse
        if tiles.splits > 1:
            parts = query.new_empty(rows, q_heads, tiles.splits, value_dim, dtype=torch.float32)
            parts_lse = query.new_empty(rows, q_heads, tiles.splits, dtype=torch.float32)
        tensors = (query, k_pool, v_pool, parts, parts_lse, tiles.span, tiles.row, spans.first_row, *numbers)
        launch(
            kernels.attend_kernel,
            (tiles.span.shape[0], k_pool.shape[1], tiles.splits),
            (*tensors, query.stride(0), scaling, softcap or 1.0, tiles.splits),
            HAS_SOFTCAP=bool(softcap),
            WINDOW=window_tokens or 0,
            Q_HEADS=q_heads,
            TILE_ROWS=tiles.rows,
            TILE_TOKENS=tiles.tokens,
            WIDEN=INTERPRETED,
            **pool_shape(k_pool, v_pool),
            num_warps=4,
            num_stages=_stages(query.device),
        )
        if tiles.splits > 1:
            launch(
                kernels.merge_kernel,
                (tiles.row.shape[0] * tiles.tokens, q_heads),
                (parts, parts_lse, output, lse, tiles.span, tiles.row, spans.first_row),
                VALUE_DIM=value_dim,
                VALUE_LANES=_lanes(value_dim),
                TILE_TOKENS=tiles.tokens,
                Q_HEADS=q_heads,
                SPLITS=tiles.splits,
                num_warps=4,
            )
    return output, lse


def compile_ahead(
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    query: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    window_tokens: int | None = None,
) -> None:
    """Compile all variants of `attend_paged` and `write_kv`, so that no step waits seconds for the compiler.

    `query` `[1, q_heads, head_dim]`."""
    if INTERPRETED:
        return
    kv_heads = k_pool.shape[1]
    key, value = (query.new_empty(1, kv_heads, dim) for dim in (k_pool.shape[2], v_pool.shape[3]))
    write_kv(k_pool, v_pool, key, value, torch.full((1,), -1, device=query.device))
    heads = query.shape[1] // kv_heads
    first_row, zero, blocks = upload([[0, 1], [0], []], query.device)
    for tile_rows in (DECODE_ROWS, PREFILL_ROWS):
        rows, tokens = tile_shape(tile_rows, heads)
        for splits in ALL_SPLITS:
            tiles = Tiles(zero, zero, tokens, rows, splits)
            spans = DeviceSpans(first_row, zero, zero, zero, zero, blocks, (tiles,))
            attend_paged(k_pool, v_pool, spans, query, scaling, softcap, window_tokens)


def write_kv(
    k_pool: torch.Tensor, v_pool: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write K and V `[rows, kv_heads, …]`, heads contiguous, to `slots` (block · block_tokens + offset).

    `slots` is int64 `[rows]`; a row with a slot below 0 is skipped."""
    _check(k_pool, v_pool)
    rows, kv_heads, head_dim = key.shape
    if key.stride()[1:] != (head_dim, 1) or value.stride()[1:] != (value.shape[2], 1):
        raise ValueError("the heads of keys and values must be contiguous")
    launch(
        kernels.write_kernel,
        (rows, kv_heads),
        (key, value, k_pool, v_pool, slots, key.stride(0), value.stride(0)),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value.shape[2],
        HEAD_LANES=_lanes(head_dim),
        VALUE_LANES=_lanes(value.shape[2]),
        BLOCK_TOKENS=k_pool.shape[3],
        num_warps=1,
    )


def rotate_and_write(
    joined: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None = None,
) -> None:
    """Apply rotary embedding, to queries in place, and write keys and values to `slots`.

    `joined` `[rows, q_heads + 2 · kv_heads, head_dim]`, contiguous: queries, keys, values. `angles`: cosines
    and sines, fp32 `[positions, head_dim / 2]`; `positions`, `slots` int64 `[rows]`. `norms`: weights
    `[head_dim]` and epsilon of RMS norms of queries and keys before the rotation."""
    _check(k_pool, v_pool)
    rows, heads, head_dim = joined.shape
    kv_heads = k_pool.shape[1]
    if not joined.is_contiguous() or head_dim != k_pool.shape[2] or head_dim != v_pool.shape[3]:
        raise ValueError(f"joined heads {tuple(joined.shape)} do not fit these pools")
    query_norm, key_norm, eps = norms or (joined, joined, 0.0)
    launch(
        kernels.rotate_write_kernel,
        (rows, heads),
        (joined, *angles, positions, slots, k_pool, v_pool, query_norm, key_norm, eps),
        HAS_NORMS=norms is not None,
        Q_HEADS=heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        HALF_LANES=_lanes(head_dim // 2),
        BLOCK_TOKENS=k_pool.shape[3],
        num_warps=1,
    )


def pool_shape(k_pool: torch.Tensor, v_pool: torch.Tensor) -> dict[str, int]:
    """Return the compile-time constants of the kernels for these pools."""
    _, kv_heads, head_dim, block_tokens = k_pool.shape
    head_lanes, value_lanes = _lanes(head_dim), _lanes(v_pool.shape[3])
    widest = max(head_lanes, value_lanes) * k_pool.dtype.itemsize
    return {
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": v_pool.shape[3],
        "HEAD_LANES": head_lanes,
        "VALUE_LANES": value_lanes,
        "BLOCK_TOKENS": block_tokens,
        "TILE_KEYS": min(MOST_TILE_KEYS, max(16, _TILE_BYTES // widest)),
    }


def _lanes(dim: int) -> int:
    return max(_MIN_LANES, 1 << (dim - 1).bit_length())


@cache
def _stages(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    properties: Any = torch.cuda.get_device_properties(device)
    return 3 if properties.shared_memory_per_multiprocessor >= _DEEP_PIPELINE_BYTES else 2


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """Launch a kernel on the current stream, unless the grid is empty."""
    if all(grid):
        kernel[grid](*arguments, **constants)


def _check(k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    blocks, kv_heads, _, block_tokens = k_pool.shape
    if v_pool.shape[:3] != (blocks, kv_heads, block_tokens) or k_pool.dtype != v_pool.dtype:
        raise ValueError(f"K {tuple(k_pool.shape)} and V {tuple(v_pool.shape)} are not pools of one layer")
    if k_pool.dtype not in _DTYPES or not (k_pool.is_contiguous() and v_pool.is_contiguous()):
        raise ValueError("the pools must be contiguous, fp32, bf16 or fp16")
