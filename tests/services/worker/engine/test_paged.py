"""Paged attention, in C++ and in torch, against the definition; merged parts are exact."""

import math
import random
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import paged
from services.worker.engine.attention import LayerShape, PagedAttention
from services.worker.engine.layout import build
from services.worker.engine.native.library import AttentionMode
from services.worker.engine.spans import Span, pack
from tests.rounding import assert_within
from tests.services.worker.engine.reference import Attended, expected, problem

CPU = torch.device("cpu")
BFLOAT16 = 2e-2
"""About five units of its roundoff, for numbers around 1: a certain bound would allow anything."""


@pytest.mark.parametrize("mode", ["native", "torch"])
@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 90), max_size=5),
    chunks=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=3),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (7, 1), (8, 2)]),
    dims=st.sampled_from([(8, 8), (64, 64), (128, 128), (32, 16)]),
    block_tokens=st.sampled_from([4, 16, 24, 32]),
    window_tokens=st.sampled_from([None, 1, 3, 7, 17, 50]),
    shape=st.builds(paged.Shape, st.sampled_from([0.125, 0.3]), st.sampled_from([None, 5.0])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_a_step_is_attention_by_the_definition(
    mode: AttentionMode,
    lengths: list[int],
    chunks: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_tokens: int,
    window_tokens: int | None,
    shape: paged.Shape,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Decodes and chunks in one step write their K and V, and see the context and themselves."""
    sequences = [(length - 1, 1) for length in sorted(lengths)] + chunks
    if not sequences:
        return
    made = problem(sequences, heads=heads, dims=dims, block_tokens=block_tokens, seed=seed, unread=0.0)
    made = made.to(CPU, dtype)
    attention = PagedAttention(
        [LayerShape(heads[1], *dims)],
        kv_blocks=len(made.k_pool),
        block_tokens=block_tokens,
        dtype=dtype,
        device=CPU,
        mode=mode,
    )
    own = [made.keys_values(index) for index in range(len(sequences))]
    keys, values = (
        torch.cat([pair[part][first:] for pair, (first, _) in zip(own, sequences, strict=True)])
        for part in (0, 1)
    )
    slots = torch.from_numpy(pack(made.spans, block_tokens).slots)
    pools = attention.pools[0]
    for pool, full in zip(pools, (made.k_pool, made.v_pool), strict=True):
        pool.copy_(full)
    pools[0][slots // block_tokens, :, :, slots % block_tokens] = math.nan
    pools[1][slots // block_tokens, :, slots % block_tokens] = math.nan
    attention.begin(made.spans, len(lengths))
    output = attention.attend(0, made.query, keys, values, shape, window_tokens)
    assert torch.equal(pools[0], made.k_pool) and torch.equal(pools[1], made.v_pool), "written to its slots"
    wanted, _ = expected(made, shape.scaling, shape.softcap, window_tokens)
    assert output.dtype is dtype
    if dtype is torch.float32:
        assert_within(output, wanted, made.bounds(shape.scaling, shape.softcap, parts=2)[0])
    else:
        torch.testing.assert_close(output.float(), wanted, rtol=BFLOAT16, atol=BFLOAT16)


def merged(parts: list[Attended]) -> Attended:
    outputs, lses = zip(*parts, strict=True)
    return paged.merge(torch.stack(outputs), torch.stack(lses))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6), st.randoms(use_true_random=False), st.integers(0, 99)
)
def test_any_partition_in_any_order_merges_to_the_whole(
    sizes: list[int], dice: random.Random, seed: int
) -> None:
    sizes[dice.randrange(len(sizes))] += 1
    made = problem([(sum(sizes) - 1, 1)], dims=(8, 8), seed=seed)
    ends = list(accumulate(sizes))
    parts = [expected(made, 0.5, seen=[(end - size, end)]) for size, end in zip(sizes, ends, strict=True)]
    dice.shuffle(parts)
    wholes = merged(parts), expected(made, 0.5), made.bounds(0.5, parts=len(sizes))
    for mine, theirs, bound in zip(*wholes, strict=True):
        assert_within(mine, theirs, bound)


def test_merging_survives_parts_without_keys_and_scores_of_any_size() -> None:
    output, lse = paged.merge(torch.zeros(2, 3, 4), torch.full((2, 3), -math.inf))
    assert torch.equal(output, torch.zeros(3, 4)) and torch.equal(lse, torch.full((3,), -math.inf))
    output, lse = paged.merge(torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([[500.0], [500.0]]))
    torch.testing.assert_close(output, torch.tensor([[2.0]]))
    torch.testing.assert_close(lse, torch.tensor([500.0 + math.log(2)]))


def test_rows_of_similar_length_share_a_table_and_full_blocks_need_no_mask() -> None:
    """Else a decode of many rows in torch is slower, and no less right."""
    spans = [Span(length - 1, 1, list(range(100))) for length in (1, 9, 30, 200, 300)]
    layout = build(spans, 5, block_tokens=4, window_tokens=None, dtype=torch.float32, device=CPU)
    sizes = [(group.start, group.end, group.tables.shape[1]) for group in layout.groups]
    assert sizes == [(0, 2, 3), (2, 3, 8), (3, 5, 75)]
    full = [Span(7, 1, [4, 5]), Span(7, 1, [1, 2])]
    (group,) = build(full, 2, block_tokens=4, window_tokens=None, dtype=torch.float32, device=CPU).groups
    assert group.mask is None and group.tables.tolist() == [[4, 5], [1, 2]]
    (group,) = build(full, 2, block_tokens=4, window_tokens=4, dtype=torch.float32, device=CPU).groups
    assert group.tables.tolist() == [[5], [2]], "blocks before the window are dropped"
