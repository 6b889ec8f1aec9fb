"""Steps through the backend: what one writes the next one reads, for decodes, chunks and both together."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from tests.services.worker.engine.reference import Problem, expected

pytest.importorskip("triton", reason="Triton is not installed (make setup-gpu)")

from services.worker.engine.gpu.backend import TritonBackend
from services.worker.engine.gpu.kernels import attend_kernel, merge_kernel
from services.worker.engine.paged import Shape, merge
from services.worker.engine.spans import Span, pack

KV_HEADS, GROUP, DIM, BLOCK_TOKENS = 2, 3, 16, 4
TABLES = ([3, 0, 5, 7], [1, 6, 2, 4])


def attend(
    backend: TritonBackend, spans: list[Span], queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    packed = pack(spans, BLOCK_TOKENS)
    backend.begin(spans, 0, packed)
    backend.write(0, keys, values, torch.from_numpy(packed.slots).to(keys.device))
    return backend.attend(0, queries, keys, values, Shape(0.25), None)


def make(device: torch.device) -> TritonBackend:
    k_pool = torch.full((8, KV_HEADS, DIM, BLOCK_TOKENS), float("nan"), device=device)
    v_pool = torch.full((8, KV_HEADS, BLOCK_TOKENS, DIM), float("nan"), device=device)
    return TritonBackend([(k_pool, v_pool)], BLOCK_TOKENS, device)


def test_decodes_and_chunks_see_what_was_written_before(device: torch.device) -> None:
    """Steps of (sequence, first position, count)."""
    backend, generator = make(device), torch.Generator().manual_seed(1)
    for step in ([(0, 0, 5)], [(0, 5, 1), (1, 0, 7)], [(1, 7, 1), (0, 6, 1)], [(1, 8, 3), (0, 7, 4)]):
        spans = [Span(first, count, TABLES[sequence]) for sequence, first, count in step]
        rows = sum(span.count for span in spans)
        joined = torch.randn(rows, KV_HEADS * (GROUP + 2), DIM, generator=generator).to(device)
        queries, keys, values = torch.split(joined, [KV_HEADS * GROUP, KV_HEADS, KV_HEADS], 1)
        actual = attend(backend, spans, queries, keys, values)
        wanted, _ = expected(Problem(*backend.pools[0], spans, queries), 0.25)
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-5, atol=1e-5)


def test_transposed_views_are_taken_too(device: torch.device) -> None:
    heads_first = torch.randn(3, KV_HEADS, 5, DIM, generator=torch.Generator().manual_seed(2)).to(device)
    queries, keys, values = (each.transpose(0, 1) for each in heads_first)
    backend, spans = make(device), [Span(0, 5, TABLES[0])]
    actual = attend(backend, spans, queries, keys, values)
    wanted, _ = expected(Problem(*backend.pools[0], spans, queries), 0.25)
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
    whole = pack([Span(12, 3, TABLES[0])], BLOCK_TOKENS)
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
        backend.begin(spans, 0, pack(spans, 16))
        backend.write(0, keys, keys, backend.step.slots)
        backend.attend(0, queries, keys, keys, Shape(0.125), None)
        caches = [kernel.device_caches[device.index][0] for kernel in (attend_kernel, merge_kernel)]
        forms.append(tuple(map(len, caches)))
    torch.cuda.synchronize()
    assert forms[0] == forms[-1], f"compiled, of attention and merging: {forms}"
