"""Attention over paged KV by its definition, in double and key by key, and random steps for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.engine.paged import Shape
from services.worker.engine.spans import Span
from tests.rounding import attention_bounds

Attended = tuple[torch.Tensor, torch.Tensor]
"""Output `[rows, q_heads, value_dim]` and log-sum-exp `[rows, q_heads]`."""


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

    def keys_values(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one sequence, each `[tokens, kv_heads, dim]`."""
        span = self.spans[index]
        length, blocks = span.first_position + span.count, list(span.blocks)
        key, value = self.k_pool[blocks].permute(0, 3, 1, 2), self.v_pool[blocks].transpose(1, 2)
        return key.flatten(0, 1)[:length], value.flatten(0, 1)[:length]

    def bounds(self, scaling: float, softcap: float | None = None, parts: int = 1) -> tuple[float, float]:
        """What rounding allows an output and a log-sum-exp to be off, whatever the order of the sums."""
        most_keys = max(span.first_position + span.count for span in self.spans)
        tensors = self.query, self.k_pool.transpose(2, 3), self.v_pool
        return attention_bounds(*tensors, scaling, most_keys=most_keys, softcap=softcap, parts=parts)


def step_bounds(
    pool: tuple[torch.Tensor, torch.Tensor], packed: tuple[torch.Tensor, ...], shape: Shape, **counts: int
) -> tuple[float, float]:
    """Return bounds of a step over a pool; `packed`: its queries, keys and values, not in the pool yet."""
    query, keys, values = packed
    all_keys = torch.cat([pool[0].transpose(2, 3).flatten(0, 2), keys.flatten(0, 1)])
    all_values = torch.cat([pool[1].flatten(0, 2), values.flatten(0, 1)])
    return attention_bounds(query, all_keys, all_values, shape.scaling, softcap=shape.softcap, **counts)


def problem(
    sequences: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    block_tokens: int = 4,
    seed: int = 0,
    unread: float = math.nan,
) -> Problem:
    """Sequences as (tokens before, tokens of the step); slots that no row may read hold `unread`."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(context + count) // block_tokens) for context, count in sequences]
    blocks = sum(needed) + 2
    order = torch.randperm(blocks, generator=generator).tolist()
    k_pool = torch.full((blocks, heads[1], dims[0], block_tokens), unread)
    v_pool = torch.full((blocks, heads[1], block_tokens, dims[1]), unread)
    spans = []
    for (context, count), blocks_needed in zip(sequences, needed, strict=True):
        own = [order.pop() for _ in range(blocks_needed)]
        spans.append(Span(context, count, own))
        position = torch.arange(context + count)
        block, slot = torch.tensor(own)[position // block_tokens], position % block_tokens
        k_pool[block, :, :, slot] = torch.randn(len(position), heads[1], dims[0], generator=generator)
        v_pool[block, :, slot] = torch.randn(len(position), heads[1], dims[1], generator=generator)
    rows = sum(count for _, count in sequences)
    return Problem(k_pool, v_pool, spans, torch.randn(rows, heads[0], dims[0], generator=generator))


def expected(
    made: Problem,
    scaling: float,
    softcap: float | None = None,
    window_tokens: int | None = None,
    *,
    seen: Sequence[tuple[int, int]] | None = None,
) -> Attended:
    """On the CPU. `seen`: the positions [low, high) of each span that there are."""
    outputs, lses, row = [], [], 0
    for index, span in enumerate(made.spans):
        query = made.query[row : row + span.count].detach().cpu().double()
        row += span.count
        group = made.query.shape[1] // made.k_pool.shape[1]
        key, value = (
            each.detach().cpu().double().repeat_interleave(group, 1) for each in made.keys_values(index)
        )
        scores = torch.einsum("nhd,mhd->nhm", query, key) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        length = span.first_position + span.count
        position, column = torch.arange(span.first_position, length)[:, None], torch.arange(length)
        low, high = (0, length) if seen is None else seen[index]
        hidden = (column > position) | (column <= position - (window_tokens or length))
        hidden |= (column < low) | (column >= high)
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        weights = scores.softmax(-1).masked_fill(hidden.all(-1)[:, None, None], 0.0)
        outputs.append(torch.einsum("nhm,mhd->nhd", weights, value))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outputs).float(), torch.cat(lses).float()
