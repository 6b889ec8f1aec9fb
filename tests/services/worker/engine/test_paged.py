"""Paged attention against the definition, and the exactness of merging parts."""

import math
import random
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import paged
from services.worker.engine.layout import Layout, build
from tests.rounding import assert_within
from tests.services.worker.engine.reference import Attended, Problem, expected, problem

BLOCK_TOKENS = 4
CPU = torch.device("cpu")


def assert_close(actual: Attended, wanted: Attended, bounds: tuple[float, float]) -> None:
    for mine, theirs, bound in zip(actual, wanted, bounds, strict=True):
        assert_within(mine, theirs, bound)


def laid_out(
    made: Problem, decodes: int, window_tokens: int | None, dtype: torch.dtype = torch.float32
) -> Layout:
    return build(
        made.spans,
        decodes,
        block_tokens=BLOCK_TOKENS,
        window_tokens=window_tokens,
        dtype=dtype,
        device=CPU,
    )


shapes = st.builds(paged.Shape, st.sampled_from([0.125, 0.3, 1.0]), st.sampled_from([None, 5.0]))
heads = st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)])
dims = st.sampled_from([(8, 8), (16, 16), (16, 8)])


@settings(max_examples=60)
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
    decodes = [(length - 1, 1) for length in sorted(lengths)]
    made = problem(decodes, heads=head, dims=dim, seed=seed, unread=0.0)
    outputs, lses = expected(made, shape.scaling, shape.softcap, window_tokens)
    scratch = paged.GatherScratch(CPU)
    rows: list[int] = []
    for group in laid_out(made, len(lengths), window_tokens).groups:
        at = slice(group.start, group.end)
        rows += range(group.start, group.end)
        attended = paged.attend_blocks(
            made.query[at], made.k_pool, made.v_pool, group.tables, group.mask, shape, scratch
        )
        assert_close(attended, (outputs[at], lses[at]), made.bounds(shape.scaling, shape.softcap))
    assert rows == list(range(len(lengths)))


@settings(max_examples=60)
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
    made = problem([(context, chunk)], heads=head, dims=dim, seed=seed, unread=0.0)
    key, value = made.keys_values(0)
    (span,) = laid_out(made, 0, window_tokens).spans
    parts = []
    if span.mask is None:
        parts.append(paged.attend_chunk(made.query, key[context:], value[context:], shape))
    if span.context_tokens:
        place = made.k_pool, made.v_pool, span.table, span.context_tokens
        scratch = paged.GatherScratch(CPU)
        parts.append(paged.attend_context(made.query, *place, shape, scratch, mask=span.mask))
    wanted = expected(made, shape.scaling, shape.softcap, window_tokens)
    assert_close(merged(parts), wanted, made.bounds(shape.scaling, shape.softcap, 2))


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
    assert_close(merged(parts), expected(made, 0.5), made.bounds(0.5, parts=len(sizes)))


def test_rows_are_written_to_their_slots_and_nowhere_else() -> None:
    k_pool, v_pool = torch.randn(4, 2, 8, BLOCK_TOKENS), torch.randn(4, 2, BLOCK_TOKENS, 16)
    k, v = k_pool.clone(), v_pool.clone()
    keys, values = torch.randn(2, 2, 8), torch.randn(2, 2, 16)
    paged.write(k, v, keys, values, torch.tensor([2 * BLOCK_TOKENS + 3, 1]))
    assert torch.equal(k[2, :, :, 3], keys[0]) and torch.equal(v[2, :, 3], values[0])
    assert torch.equal(k[0, :, :, 1], keys[1]) and torch.equal(v[0, :, 1], values[1])
    assert int((k != k_pool).sum() + (v != v_pool).sum()) == keys.numel() + values.numel()


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
    made = problem([(36, 1)], seed=3, unread=0.0)
    (group,) = laid_out(made, 1, None, torch.bfloat16).groups
    half, shape = made.to(CPU, torch.bfloat16), paged.Shape(0.25, softcap)
    output, lse = paged.attend_blocks(
        half.query, half.k_pool, half.v_pool, group.tables, group.mask, shape, paged.GatherScratch(CPU)
    )
    outputs, lses = expected(made, 0.25, softcap)
    assert output.dtype is torch.bfloat16 and lse.dtype is torch.float32
    torch.testing.assert_close(output.float(), outputs, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, lses, rtol=2e-2, atol=2e-2)
