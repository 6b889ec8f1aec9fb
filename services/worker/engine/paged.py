"""Attention over paged KV in plain torch: returns output and log-sum-exp, so that parts can be merged.

It is the reference for the C++ operator and the Triton kernels, and the fallback without them. Shapes:

- pools: K `[num_blocks, kv_heads, head_dim, block_tokens]`, so that a vector holds one dimension of
  consecutive slots; V `[num_blocks, kv_heads, block_tokens, value_dim]`; fp32 or bf16; or int8, which
  only the C++ operator knows and whose dims have `SCALE_BYTES` more (`attention.h`)
- queries: `[rows, q_heads, head_dim]`, `q_heads` a multiple of `kv_heads` (grouped-query attention: query
  head `h` reads KV head `h // (q_heads / kv_heads)`)
- outputs: `[rows, q_heads, value_dim]` in the dtype of V, normalised; log-sum-exp `[rows, q_heads]`, always
  fp32: ln Σ exp(scaling · q·k)
- every query sees at least one key in each operation; `merge` also accepts −inf for a part without keys

Source of the merge: Infinite-LLM §4 (DistAttention), with m + ln l written as one number."""

from dataclasses import dataclass
from typing import Any

import torch

_NEGATIVE_INFINITY = float("-inf")


SCALE_BYTES = 4
"""Bytes of the scale of a slot's int8 keys, or values, of one head."""


def stored_dim(dim: int, dtype: torch.dtype) -> int:
    """Return the numbers that a pool has for each slot and head."""
    return dim + (SCALE_BYTES if dtype is torch.int8 else 0)


def dims_of(pools: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    """Return `head_dim` and `value_dim` of the pools of a layer."""
    k_pool, v_pool = pools
    scale = stored_dim(0, k_pool.dtype)
    return k_pool.shape[2] - scale, v_pool.shape[3] - scale


@dataclass(frozen=True, slots=True)
class Shape:
    """Scaling and soft cap of one layer's attention scores."""

    scaling: float
    softcap: float | None = None


def to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `numbers` on `device`; copies to a GPU are asynchronous."""
    if device.type != "cuda" or numbers.device.type != "cpu":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def fill(target: torch.Tensor, numbers: torch.Tensor) -> None:
    """Copy `numbers` to the beginning of `target`; asynchronous on a GPU."""
    source = numbers.pin_memory() if target.device.type == "cuda" else numbers
    target[: len(numbers)].copy_(source, non_blocking=True)


class GatherScratch:
    """Buffers for gathered blocks, kept between layers and steps because new pages are slow."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def _gather(self, name: str, pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        elements = blocks.numel() * pool[0].numel()
        buffer = self._buffers.get((name, pool.dtype))
        if buffer is None or buffer.numel() < elements:
            buffer = torch.empty(max(elements, 1 << 16) * 3 // 2, dtype=pool.dtype, device=self._device)
            self._buffers[(name, pool.dtype)] = buffer
        gathered = buffer[:elements].view(blocks.numel(), *pool.shape[1:])
        return torch.index_select(pool, 0, blocks.reshape(-1), out=gathered).view(
            *blocks.shape, *pool.shape[1:]
        )

    def keys_values(
        self, k_pool: torch.Tensor, v_pool: torch.Tensor, tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of `tables`, int64 `[rows, blocks]`, as `[rows, kv_heads, slots, …]`.

        They are valid until the next call."""
        key, value = self._gather("k", k_pool, tables), self._gather("v", v_pool, tables)
        key = key.permute(0, 2, 1, 4, 3).contiguous()
        return key.flatten(2, 3), value.transpose(1, 2).flatten(2, 3)


def write(
    k_pool: torch.Tensor, v_pool: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write K and V `[rows, kv_heads, …]` to `slots`, int64 `[rows]`: block * block_tokens + offset."""
    block_tokens = k_pool.shape[3]
    block, offset = slots // block_tokens, slots % block_tokens
    k_pool[block, :, :, offset] = keys.to(k_pool.dtype)
    v_pool[block, :, offset] = values.to(v_pool.dtype)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shape: Shape,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention `[batch, q_heads, n, value_dim]` and log-sum-exp `[batch, q_heads, n]` fp32.

    `query` `[batch, q_heads, n, head_dim]`, `key`, `value` `[batch, kv_heads, m, …]`. `causal` needs n == m.
    `mask` is additive, broadcastable to `[batch, q_heads, n, m]`."""
    fused = query.device.type == "cpu" and shape.softcap is None and key.shape[-1] == value.shape[-1]
    # The fused kernel ignores the stride of the last dimension.
    if not fused or any(each.stride(-1) != 1 for each in (query, key, value)):
        return _attend_plainly(query, key, value, shape, causal, mask)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=shape.scaling
    )
    return output, lse


def _attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: Shape, causal: bool, mask: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_heads, rows, head_dim = query.shape
    kv_heads, width = key.shape[1], key.shape[2]
    grouped = query.reshape(batch, kv_heads, -1, head_dim)
    scores = (grouped.float() @ key.float().transpose(-1, -2)) * shape.scaling
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    scores = scores.view(batch, q_heads, rows, width)
    if mask is not None:
        scores = scores + mask
    if causal:
        future = torch.ones(rows, width, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, _NEGATIVE_INFINITY)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).view(batch, kv_heads, -1, width)
    output = weights @ value.float()
    return output.view(batch, q_heads, rows, -1).to(value.dtype), lse


def attend_blocks(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    tables: torch.Tensor,
    mask: torch.Tensor | None,
    shape: Shape,
    scratch: GatherScratch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and log-sum-exp of a decode: one query per sequence, each over its own blocks.

    `query` `[rows, q_heads, head_dim]`; `tables` int64 `[rows, blocks]`, padded with any valid id; `mask`
    additive `[rows, 1, 1, blocks * block_tokens]`, −inf on padding; None: every slot counts."""
    rows, q_heads, head_dim = query.shape
    key, value = scratch.keys_values(k_pool, v_pool, tables)
    # Query heads that share a KV head become query positions, so that each KV head is read once.
    grouped = query.reshape(rows, k_pool.shape[1], -1, head_dim)
    output, lse = attend(grouped, key, value, shape, mask=mask)
    return output.reshape(rows, q_heads, -1), lse.reshape(rows, q_heads)


def attend_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention and log-sum-exp of a prefill chunk `[n, heads, …]` with itself."""
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    output, lse = attend(q, k, v, shape, causal=True)
    return output[0].transpose(0, 1), lse[0].transpose(0, 1)


def attend_context(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    context_tokens: int,
    shape: Shape,
    scratch: GatherScratch,
    *,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention and log-sum-exp of a chunk over the first tokens of `table` `[blocks]`.

    `query` `[n, q_heads, head_dim]`; `mask` additive `[n, context_tokens]`, None: no mask."""
    key, value = scratch.keys_values(k_pool, v_pool, table[None])
    key, value = key[:, :, :context_tokens], value[:, :, :context_tokens]
    rows, q_heads, head_dim = query.shape
    kv_heads = key.shape[1]
    if mask is None:
        grouped = query.view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        output, lse = attend(grouped.reshape(1, kv_heads, -1, head_dim), key, value, shape)
    else:
        output, lse = attend(query.transpose(0, 1).unsqueeze(0), key, value, shape, mask=mask[None, None])
    return output.reshape(q_heads, rows, -1).transpose(0, 1), lse.reshape(q_heads, rows).transpose(0, 1)


def attend_part(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    table: torch.Tensor,
    tokens: int,
    first_position: int,
    shape: Shape,
    window_tokens: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return causal attention over the first `tokens` keys of `table` `[blocks]`, and its log-sum-exp.

    `query` `[n, q_heads, head_dim]` → `[n, q_heads, value_dim]` and `[n, q_heads]`, fp32; zeros and −inf for
    a row that sees no key. `window_tokens` 0: no window."""
    rows, q_heads, head_dim = query.shape
    kv_heads = k_pool.shape[1]
    key = k_pool[table].transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :tokens].float()
    value = v_pool[table].transpose(0, 1).flatten(1, 2)[:, :tokens].float()
    grouped = query.float().view(rows, kv_heads, -1, head_dim)
    scores = torch.einsum("nhgd,htd->hgnt", grouped, key) * shape.scaling
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    position = torch.arange(rows, device=query.device).unsqueeze(1) + first_position
    key_position = torch.arange(tokens, device=query.device)
    hidden = key_position > position
    if window_tokens:
        hidden |= key_position <= position - window_tokens
    scores = scores.masked_fill(hidden, _NEGATIVE_INFINITY)
    lse = scores.logsumexp(-1)
    reference = torch.where(lse == _NEGATIVE_INFINITY, torch.zeros_like(lse), lse)
    output = torch.einsum("hgnt,htd->nhgd", torch.exp(scores - reference.unsqueeze(-1)), value)
    return output.reshape(rows, q_heads, -1), lse.permute(2, 0, 1).reshape(rows, q_heads)


def merge(outputs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the results over a partition of the keys; exact for any partition and order.

    `outputs` `[parts, …, value_dim]` normalised, `lses` `[parts, …]` fp32 → `[…, value_dim]` and `[…]`, fp32.
    """
    highest = lses.amax(0)
    reference = torch.where(highest == _NEGATIVE_INFINITY, torch.zeros_like(highest), highest)
    weights = torch.exp(lses - reference)
    total = weights.sum(0)
    divisor = total.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return (outputs.float() * weights.unsqueeze(-1)).sum(0) / divisor, reference + total.log()
