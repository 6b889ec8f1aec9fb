"""Paged attention against the definition, and the exactness of merging parts."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import paged
from services.worker.engine.layout import Span, build
from tests.rounding import assert_within, attention_bounds

BLOCK_TOKENS = 4
CPU = torch.device("cpu")


def naive(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, shape: paged.Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Head by head, in double. `query` `[n, heads, dim]`, `key` `[m, kv_heads, dim]`, `visible` `[n, m]`."""
    groups = query.shape[1] // key.shape[1]
    outputs, lses = [], []
    for head in range(query.shape[1]):
        scores = (query[:, head].double() @ key[:, head // groups].double().T) * shape.scaling
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        scores = scores.masked_fill(~visible, -math.inf)
        lses.append(scores.logsumexp(-1))
        outputs.append(scores.softmax(-1) @ value[:, head // groups].double())
    return torch.stack(outputs, 1).float(), torch.stack(lses, 1).float()


Attended = tuple[torch.Tensor, torch.Tensor]


def assert_close(actual: Attended, expected: Attended, bounds: tuple[float, float]) -> None:
    for mine, theirs, bound in zip(actual, expected, bounds, strict=True):
        assert_within(mine, theirs, bound)


def bounds_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: paged.Shape, parts: int = 1
) -> tuple[float, float]:
    softcap = shape.softcap
    return attention_bounds(
        query, key, value, shape.scaling, most_keys=len(key), softcap=softcap, parts=parts
    )


shapes = st.builds(paged.Shape, st.sampled_from([0.125, 0.3, 1.0]), st.sampled_from([None, 5.0]))
heads = st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)])
dims = st.sampled_from([(8, 8), (16, 16), (16, 8)])


class Pools:
    """Random pools in which sequences own shuffled blocks."""

    def __init__(self, lengths: list[int], kv_heads: int, dim: tuple[int, int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        per_sequence = [-(-length // BLOCK_TOKENS) for length in lengths]
        blocks = sum(per_sequence) + 1
        self.k = torch.randn(blocks, kv_heads, dim[0], BLOCK_TOKENS, generator=generator)
        self.v = torch.randn(blocks, kv_heads, BLOCK_TOKENS, dim[1], generator=generator)
        order = torch.randperm(blocks, generator=generator).tolist()
        self.blocks = [[order.pop() for _ in range(blocks)] for blocks in per_sequence]

    def keys_values(self, index: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = self.blocks[index]
        key, value = self.k[blocks].permute(0, 3, 1, 2), self.v[blocks].transpose(1, 2)
        return key.flatten(0, 1)[:length], value.flatten(0, 1)[:length]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    heads,
    dims,
    shapes,
    st.sampled_from([None, 1, 3, 8, 17]),
    st.integers(0, 99),
)
def test_decodes_are_attention_over_their_own_blocks(
    lengths: list[int],
    head: tuple[int, int],
    dim: tuple[int, int],
    shape: paged.Shape,
    window_tokens: int | None,
    seed: int,
) -> None:
    lengths.sort()
    pools = Pools(lengths, head[1], dim, seed)
    query = torch.randn(len(lengths), head[0], dim[0], generator=torch.Generator().manual_seed(seed + 1))
    spans = [Span(length - 1, 1, pools.blocks[row]) for row, length in enumerate(lengths)]
    layout = build(
        spans,
        len(spans),
        block_tokens=BLOCK_TOKENS,
        window_tokens=window_tokens,
        dtype=torch.float32,
        device=CPU,
    )
    scratch = paged.GatherScratch(CPU)
    for group in layout.groups:
        rows = slice(group.start, group.end)
        output, lse = paged.attend_blocks(
            query[rows], pools.k, pools.v, group.tables, group.mask, shape, scratch
        )
        for row in range(group.start, group.end):
            key, value = pools.keys_values(row, lengths[row])
            position = torch.arange(lengths[row])
            visible = (position > lengths[row] - 1 - (window_tokens or lengths[row]))[None]
            expected = naive(query[row : row + 1], key, value, visible, shape)
            assert_close(
                (output[row - group.start][None], lse[row - group.start][None]),
                expected,
                bounds_of(query[row], key, value, shape),
            )
    assert [row for group in layout.groups for row in range(group.start, group.end)] == list(
        range(len(spans))
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 21),
    st.integers(1, 13),
    heads,
    dims,
    shapes,
    st.sampled_from([None, 1, 3, 8, 40]),
    st.integers(0, 99),
)
def test_a_chunk_is_attention_over_context_and_itself(
    context: int,
    chunk: int,
    head: tuple[int, int],
    dim: tuple[int, int],
    shape: paged.Shape,
    window_tokens: int | None,
    seed: int,
) -> None:
    pools = Pools([context + chunk], head[1], dim, seed)
    key, value = pools.keys_values(0, context + chunk)
    query = torch.randn(chunk, head[0], dim[0], generator=torch.Generator().manual_seed(seed + 1))
    layout = build(
        [Span(context, chunk, pools.blocks[0])],
        0,
        block_tokens=BLOCK_TOKENS,
        window_tokens=window_tokens,
        dtype=torch.float32,
        device=CPU,
    )
    scratch = paged.GatherScratch(CPU)
    (span,) = layout.spans
    parts = []
    if span.mask is None:
        parts.append(paged.attend_chunk(query, key[context:], value[context:], shape))
    if span.context_tokens:
        parts.append(
            paged.attend_context(
                query, pools.k, pools.v, span.table, span.context_tokens, shape, scratch, mask=span.mask
            )
        )
    merged = paged.merge(torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts]))
    rows, columns = torch.arange(context, context + chunk)[:, None], torch.arange(context + chunk)
    visible = (columns <= rows) & (columns > rows - (window_tokens or context + chunk))
    assert_close(merged, naive(query, key, value, visible, shape), bounds_of(query, key, value, shape, 2))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(0, 99)
)
def test_any_partition_in_any_order_merges_to_the_whole(
    sizes: list[int], dice: random.Random, seed: int
) -> None:
    sizes[dice.randrange(len(sizes))] += 1
    total = sum(sizes)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(3, 4, 8, generator=generator)
    key, value = torch.randn(2, total, 2, 8, generator=generator).unbind(0)
    shape = paged.Shape(0.5)
    order = list(range(total))
    dice.shuffle(order)
    outputs, lses = [], []
    for size in sizes:
        chosen, order = order[:size], order[size:]
        if not chosen:
            outputs.append(torch.zeros(3, 4, 8))
            lses.append(torch.full((3, 4), -math.inf))
            continue
        part = naive(query, key[chosen], value[chosen], torch.ones(3, size, dtype=torch.bool), shape)
        outputs.append(part[0])
        lses.append(part[1])
    whole = naive(query, key, value, torch.ones(3, total, dtype=torch.bool), shape)
    merged = paged.merge(torch.stack(outputs), torch.stack(lses))
    assert_close(merged, whole, bounds_of(query, key, value, shape, len(sizes)))


def test_rows_are_written_to_their_slots_and_nowhere_else() -> None:
    pools = Pools([9], 2, (8, 16), seed=5)
    k, v = pools.k.clone(), pools.v.clone()
    keys, values = torch.randn(2, 2, 8), torch.randn(2, 2, 16)
    paged.write(k, v, keys, values, torch.tensor([2 * BLOCK_TOKENS + 3, 1]))
    assert torch.equal(k[2, :, :, 3], keys[0]) and torch.equal(v[2, :, 3], values[0])
    assert torch.equal(k[0, :, :, 1], keys[1]) and torch.equal(v[0, :, 1], values[1])
    assert int((k != pools.k).sum() + (v != pools.v).sum()) == keys.numel() + values.numel()


def test_merging_nothing_gives_nothing() -> None:
    output, lse = paged.merge(torch.zeros(2, 3, 4), torch.full((2, 3), -math.inf))
    assert torch.equal(output, torch.zeros(3, 4)) and torch.equal(lse, torch.full((3,), -math.inf))


def test_merging_survives_scores_of_any_size() -> None:
    outputs = torch.tensor([[[1.0]], [[3.0]]])
    output, lse = paged.merge(outputs, torch.tensor([[500.0], [500.0]]))
    torch.testing.assert_close(output, torch.tensor([[2.0]]))
    torch.testing.assert_close(lse, torch.tensor([500.0 + math.log(2)]))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_bfloat16_stays_within_its_precision(softcap: float | None) -> None:
    pools = Pools([37], 2, (16, 16), seed=3)
    query = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(4))
    key, value = pools.keys_values(0, 37)
    shape = paged.Shape(0.25, softcap)
    layout = build(
        [Span(36, 1, pools.blocks[0])],
        1,
        block_tokens=BLOCK_TOKENS,
        window_tokens=None,
        dtype=torch.bfloat16,
        device=CPU,
    )
    (group,) = layout.groups
    output, lse = paged.attend_blocks(
        query.bfloat16(),
        pools.k.bfloat16(),
        pools.v.bfloat16(),
        group.tables,
        group.mask,
        shape,
        paged.GatherScratch(CPU),
    )
    expected = naive(query, key, value, torch.ones(1, 37, dtype=torch.bool), shape)
    assert output.dtype is torch.bfloat16 and lse.dtype is torch.float32
    torch.testing.assert_close(output.float(), expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected[1], rtol=2e-2, atol=2e-2)
