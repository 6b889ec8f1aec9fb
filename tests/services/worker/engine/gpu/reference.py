"""Attention over paged KV by its definition, row by row in double, and random problems for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.engine.layout import Span


@dataclass(frozen=True)
class Problem:
    """Pools of one layer, sequences in shuffled blocks of them, and packed queries."""

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    spans: list[Span]
    query: torch.Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> "Problem":
        moved = [one.to(device, dtype) for one in (self.k_pool, self.v_pool, self.query)]
        return Problem(moved[0], moved[1], self.spans, moved[2])


def problem(
    sequences: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    block_tokens: int = 4,
    seed: int = 0,
) -> Problem:
    """Sequences as (tokens before, tokens of the step); slots that no row may read hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(context + count) // block_tokens) for context, count in sequences]
    blocks = sum(needed) + 2
    order = torch.randperm(blocks, generator=generator).tolist()
    k_pool = torch.full((blocks, heads[1], dims[0], block_tokens), math.nan)
    v_pool = torch.full((blocks, heads[1], block_tokens, dims[1]), math.nan)
    spans = []
    for (context, count), blocks_needed in zip(sequences, needed, strict=True):
        own = [order.pop() for _ in range(blocks_needed)]
        spans.append(Span(context, count, own))
        for position in range(context + count):
            block, slot = own[position // block_tokens], position % block_tokens
            k_pool[block, :, :, slot] = torch.randn(heads[1], dims[0], generator=generator)
            v_pool[block, :, slot] = torch.randn(heads[1], dims[1], generator=generator)
    rows = sum(count for _, count in sequences)
    return Problem(k_pool, v_pool, spans, torch.randn(rows, heads[0], dims[0], generator=generator))


def expected(
    made: Problem,
    scaling: float,
    softcap: float | None = None,
    window_tokens: int | None = None,
    *,
    seen: Sequence[tuple[int, int]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`[rows, q_heads, value_dim]`, LSE `[rows, q_heads]`) on the CPU. `seen`: [low, high) of each span."""
    outputs, lses = [], []
    queries = iter(made.query.detach().cpu().double())
    k_pool, v_pool = made.k_pool.cpu().double(), made.v_pool.cpu().double()
    for index, span in enumerate(made.spans):
        low_limit, high_limit = (0, 1 << 30) if seen is None else seen[index]
        for position in range(span.first_position, span.first_position + span.count):
            low = max(low_limit, 0 if window_tokens is None else position - window_tokens + 1)
            places = range(low, min(position + 1, high_limit))
            output, lse = _row(next(queries), k_pool, v_pool, span, places, scaling, softcap)
            outputs.append(output)
            lses.append(lse)
    return torch.stack(outputs).float(), torch.stack(lses).float()


def _row(
    query: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    span: Span,
    positions: range,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    q_heads, kv_heads, block_tokens = query.shape[0], k_pool.shape[1], k_pool.shape[3]
    if not positions:
        return query.new_zeros(q_heads, v_pool.shape[3]), query.new_full((q_heads,), -math.inf)
    places = [(span.blocks[at // block_tokens], at % block_tokens) for at in positions]
    key = torch.stack([k_pool[block, :, :, slot] for block, slot in places], 1)
    value = torch.stack([v_pool[block, :, slot] for block, slot in places], 1)
    group = q_heads // kv_heads
    scores = torch.einsum("hd,hnd->hn", query, key.repeat_interleave(group, 0)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    lse = scores.logsumexp(-1)
    return torch.einsum(
        "hn,hnd->hd", torch.exp(scores - lse[:, None]), value.repeat_interleave(group, 0)
    ), lse
