"""The kernels against attention's definition: every shape, partial tables, parts, and nothing read beyond."""

import math
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.engine import spans as steps
from tests.rounding import assert_within
from tests.services.worker.engine.reference import Problem, expected, problem

pytest.importorskip("triton", reason="Triton is not installed (make setup-gpu)")

from services.worker.engine.gpu.attention import attend_paged, write_kv
from services.worker.engine.gpu.backend import TritonBackend
from services.worker.engine.gpu.kernels import attend_kernel, merge_kernel
from services.worker.engine.gpu.spans import DeviceSpans, Heads, pack
from services.worker.engine.paged import Shape, merge
from services.worker.engine.spans import Span

ONE, MANY = 1, 1 << 16
"""Multiprocessors: no splitting, and as much as the context allows."""
SOME = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


def packed(made: Problem, multiprocessors: int = ONE, **partial: list[int]) -> DeviceSpans:
    heads = Heads(made.query.shape[1] // made.k_pool.shape[1], made.k_pool.shape[1])
    arrays: dict[str, Any] = {name: np.array(values, dtype=np.int32) for name, values in partial.items()}
    spans = replace(steps.pack(made.spans, made.k_pool.shape[3]), **arrays)
    return pack(spans, heads, device=made.query.device, multiprocessors=multiprocessors)


def check(
    actual: tuple[torch.Tensor, torch.Tensor],
    made: Problem,
    scaling: float,
    softcap: float | None = None,
    window_tokens: int | None = None,
    *,
    seen: list[tuple[int, int]] | None = None,
    parts: int = 1,
) -> None:
    """Compare within rounding; `parts`: parts merged here, besides those that the kernel merges."""
    wanted = expected(made, scaling, softcap, window_tokens, seen=seen)
    bounds = made.bounds(scaling, softcap, parts + 1)
    for mine, theirs, bound in zip(actual, wanted, bounds, strict=True):
        assert_within(mine, theirs, bound)


sequences = st.lists(
    st.one_of(st.tuples(st.integers(0, 70), st.just(1)), st.tuples(st.integers(0, 40), st.integers(2, 40))),
    min_size=1,
    max_size=4,
)
heads = st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3), (24, 1)])
dims = st.sampled_from([(16, 16), (8, 8), (24, 40), (32, 16)])


@pytest.mark.timeout(600)  # On a device every shape is compiled.
@SOME
@given(
    sequences, heads, dims, st.sampled_from([1, 3, 4, 16]), st.sampled_from([None, 5.0]),
    st.sampled_from([None, 1, 7, 32]), st.sampled_from([ONE, MANY]), st.integers(0, 99),
)  # fmt: skip
def test_every_row_attends_to_the_keys_it_sees(
    device: torch.device,
    sequences: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    block_tokens: int,
    softcap: float | None,
    window_tokens: int | None,
    multiprocessors: int,
    seed: int,
) -> None:
    made = problem(sequences, heads=heads, dims=dims, block_tokens=block_tokens, seed=seed)
    on_device = made.to(device, torch.float32)
    actual = attend_paged(
        on_device.k_pool,
        on_device.v_pool,
        packed(on_device, multiprocessors),
        on_device.query,
        0.3,
        softcap,
        window_tokens,
    )
    check(actual, made, 0.3, softcap, window_tokens)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_head_sizes_and_dtypes(device: torch.device, dim: int, dtype: torch.dtype) -> None:
    made = problem([(300, 1), (20, 30)], heads=(8, 2), dims=(dim, dim), block_tokens=16).to(device, dtype)
    output, lse = attend_paged(made.k_pool, made.v_pool, packed(made, MANY), made.query, dim**-0.5)
    assert output.dtype is dtype and lse.dtype is torch.float32
    if dtype is torch.float32:
        check((output, lse), made, dim**-0.5)
        return
    for mine, theirs in zip((output, lse), expected(made, dim**-0.5), strict=True):
        torch.testing.assert_close(mine.float().cpu(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("multiprocessors", [ONE, MANY])
def test_partial_tables_merge_to_the_whole(device: torch.device, multiprocessors: int) -> None:
    made = problem([(700, 1), (90, 12), (3, 1)], block_tokens=4, seed=5)
    on_device = made.to(device, torch.float32)
    parts = []
    for first_block, end_block in ((0, 40), (40, 101), (101, 400)):
        low, high = first_block * 4, end_block * 4
        arrays = packed(
            on_device,
            multiprocessors,
            table_position=[low] * 3,
            table_start=[0 + first_block, 176 + first_block, 202 + first_block],
            key_end=[min(high, 701), min(high, 102), min(high, 4)],
        )
        parts.append(attend_paged(on_device.k_pool, on_device.v_pool, arrays, on_device.query, 0.4))
        check(parts[-1], made, 0.4, seen=[(low, high)] * 3)
    outputs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
    check(merge(outputs, lses), made, 0.4, parts=len(parts))


@pytest.mark.parametrize("multiprocessors", [ONE, MANY])
def test_a_row_without_keys_gets_zeros_and_minus_infinity(device: torch.device, multiprocessors: int) -> None:
    made = problem([(300, 1), (4, 3)], seed=6).to(device, torch.float32)
    arrays = packed(made, multiprocessors, key_end=[0, 0])
    output, lse = attend_paged(made.k_pool, made.v_pool, arrays, made.query, 0.5)
    assert torch.equal(output.cpu(), torch.zeros(4, 4, 16))
    assert torch.equal(lse.cpu(), torch.full((4, 4), -math.inf))


def test_large_scores_neither_overflow_nor_vanish(device: torch.device) -> None:
    made = problem([(40, 1), (9, 5)], seed=7).to(device, torch.float32)
    for softcap in (None, 30.0):
        actual = attend_paged(made.k_pool, made.v_pool, packed(made), made.query, 300.0, softcap)
        check(actual, made, 300.0, softcap)


def test_the_same_call_gives_the_same_bits_also_of_a_slice_of_wider_rows(device: torch.device) -> None:
    made = problem([(500, 1), (40, 20)], seed=9).to(device, torch.float32)
    wide = torch.randn(21, 9, 16, device=device)
    wide[:, :4] = made.query
    arrays = packed(made, MANY)
    first, *others = (
        attend_paged(made.k_pool, made.v_pool, arrays, query, 0.3)
        for query in (made.query, made.query, wide[:, :4])
    )
    for output, lse in others:
        assert torch.equal(first[0], output) and torch.equal(first[1], lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_land_in_their_slots_and_nowhere_else(
    device: torch.device, dtype: torch.dtype
) -> None:
    made = problem([(6, 5), (2, 1)], dims=(24, 8), seed=10).to(device, dtype)
    k_pool, v_pool = torch.zeros_like(made.k_pool), torch.zeros_like(made.v_pool)
    joined = 1 + torch.rand(6, 2, 40, device=device, dtype=dtype)  # Nowhere zero.
    key, value = joined[..., :24].contiguous(), joined[..., 24:32].contiguous()
    places = steps.pack(made.spans, 4).slots.tolist()
    places[3] = -1
    write_kv(k_pool, v_pool, key, value, torch.tensor(places, device=device))
    for row, place in enumerate(places):
        if place >= 0:
            assert torch.equal(k_pool[place // 4, :, :, place % 4], key[row])
            assert torch.equal(v_pool[place // 4, :, place % 4], value[row])
    assert int((k_pool != 0).sum()) == 5 * 2 * 24 and int((v_pool != 0).sum()) == 5 * 2 * 8


def test_what_the_kernel_does_not_know_is_refused(device: torch.device) -> None:
    made = problem([(3, 1)]).to(device, torch.float32)
    arrays = packed(made)
    with pytest.raises(ValueError, match="contiguous"):
        attend_paged(made.k_pool.double(), made.v_pool.double(), arrays, made.query, 1.0)
    with pytest.raises(ValueError, match="not pools of one layer"):
        attend_paged(made.k_pool, made.v_pool[:, :1], arrays, made.query, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        attend_paged(made.k_pool, made.v_pool, arrays, made.query[..., :8], 1.0)


KV_HEADS, GROUP, DIM, BLOCK_TOKENS = 2, 3, 16, 4
TABLES = ([3, 0, 5, 7], [1, 6, 2, 4])


def attend_with(
    backend: TritonBackend, spans: list[Span], queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    packed = steps.pack(spans, BLOCK_TOKENS)
    backend.begin(spans, 0, packed)
    backend.write(0, keys, values, torch.from_numpy(packed.slots).to(keys.device))
    return backend.attend(0, queries, keys, values, Shape(0.25), None)


def make_backend(device: torch.device) -> TritonBackend:
    k_pool = torch.full((8, KV_HEADS, DIM, BLOCK_TOKENS), float("nan"), device=device)
    v_pool = torch.full((8, KV_HEADS, BLOCK_TOKENS, DIM), float("nan"), device=device)
    return TritonBackend([(k_pool, v_pool)], BLOCK_TOKENS, device)


def test_decodes_and_chunks_see_what_was_written_before(device: torch.device) -> None:
    """Steps of (sequence, first position, count)."""
    backend, generator = make_backend(device), torch.Generator().manual_seed(1)
    for step in ([(0, 0, 5)], [(0, 5, 1), (1, 0, 7)], [(1, 7, 1), (0, 6, 1)], [(1, 8, 3), (0, 7, 4)]):
        spans = [Span(first, count, TABLES[sequence]) for sequence, first, count in step]
        rows = sum(span.count for span in spans)
        joined = torch.randn(rows, KV_HEADS * (GROUP + 2), DIM, generator=generator).to(device)
        queries, keys, values = torch.split(joined, [KV_HEADS * GROUP, KV_HEADS, KV_HEADS], 1)
        actual = attend_with(backend, spans, queries, keys, values)
        (k_pool, v_pool), *_ = backend.pools
        wanted, _ = expected(Problem(k_pool, v_pool, spans, queries), 0.25)
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_transposed_views_are_taken_too(device: torch.device) -> None:
    heads_first = torch.randn(3, KV_HEADS, 5, DIM, generator=torch.Generator().manual_seed(2)).to(device)
    queries, keys, values = (each.transpose(0, 1) for each in heads_first)
    backend, spans = make_backend(device), [Span(0, 5, TABLES[0])]
    actual = attend_with(backend, spans, queries, keys, values)
    (k_pool, v_pool), *_ = backend.pools
    wanted, _ = expected(Problem(k_pool, v_pool, spans, queries), 0.25)
    torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_a_part_is_what_is_seen_of_it_and_how_much_that_weighs(device: torch.device) -> None:
    """Two halves of a sequence's keys, joined, are attention over all of them."""
    generator = torch.Generator().manual_seed(4)
    pools = (
        torch.randn(8, KV_HEADS, DIM, BLOCK_TOKENS, generator=generator).to(device),
        torch.randn(8, KV_HEADS, BLOCK_TOKENS, DIM, generator=generator).to(device),
    )
    backend = TritonBackend([pools], BLOCK_TOKENS, device)
    queries = torch.randn(3, KV_HEADS * GROUP, DIM, generator=generator).to(device)
    whole = steps.pack([Span(12, 3, TABLES[0])], BLOCK_TOKENS)
    backend.begin((), 0, whole)
    output, lse = backend.attend_part(0, whole, queries, Shape(0.25))
    halves = [replace(whole, key_end=np.full_like(whole.key_end, 8))]
    halves.append(
        replace(whole, table_position=np.full_like(whole.table_position, 8), blocks=whole.blocks[2:])
    )
    parts = [backend.attend_part(0, half, queries, Shape(0.25)) for half in halves]
    joined, joined_lse = merge(*(torch.stack(each) for each in zip(*parts, strict=True)))
    torch.testing.assert_close(joined, output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(joined_lse, lse, rtol=1e-5, atol=1e-5)
    expect = expected(Problem(*pools, [Span(12, 3, TABLES[0])], queries), 0.25)
    torch.testing.assert_close(output.cpu(), expect[0], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_no_step_waits_for_the_compiler() -> None:
    """After the first. How rows are divided, and where their arrays begin, differs from step to step."""
    device = torch.device("cuda", torch.cuda.current_device())
    pools = (
        torch.zeros(600, 8, 64, 16, dtype=torch.bfloat16, device=device),
        torch.zeros(600, 8, 16, 64, dtype=torch.bfloat16, device=device),
    )
    backend = TritonBackend([pools], 16, device)
    dice, forms = Random(3), []
    for _ in range(40):
        spans = []
        for _ in range(dice.choice((1, 2, 3, 8))):
            first = dice.choice((0, 5, 100, 500, 3000, 8000))
            count = dice.choice((1, 1, 2, 70, 300))
            spans.append(Span(first, count, [dice.randrange(600) for _ in range((first + count) // 16 + 1)]))
        rows = sum(span.count for span in spans)
        queries, keys = (
            torch.zeros(rows, heads, 64, dtype=torch.bfloat16, device=device) for heads in (32, 8)
        )
        backend.begin(spans, 0, steps.pack(spans, 16))
        backend.write(0, keys, keys, backend.step.slots)
        backend.attend(0, queries, keys, keys, Shape(0.125), None)
        caches = [kernel.device_caches[device.index][0] for kernel in (attend_kernel, merge_kernel)]
        forms.append(tuple(map(len, caches)))
    torch.cuda.synchronize()
    assert forms[0] == forms[-1], f"compiled, of attention and merging: {forms}"
