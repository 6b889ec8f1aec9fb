"""The segments of a part, each over its own staging, add up to the whole part."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import paged
from services.worker.engine.backends import TorchBackend
from services.worker.engine.partition import Homes, split
from services.worker.engine.remote import merge_into
from services.worker.engine.spans import PackedSpans, Span, pack
from services.worker.peers.attention.shares import cut, pairs
from tests.rounding import assert_within
from tests.services.worker.engine.reference import step_bounds

BLOCK, HEADS, DIM = 4, 2, 3
SHAPE = paged.Shape(DIM**-0.5)


@st.composite
def parts(draw: st.DrawFn) -> PackedSpans:
    """Return creditor 1's part of sequences whose blocks alternate between it and the engine."""
    spans, homes, following = [], Homes(1000), 1000
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 22))
        count = draw(st.integers(1, length))
        blocks: list[int] = []
        for at in range(-(-length // BLOCK)):
            is_there = at == 0 or draw(st.booleans())
            blocks.append(following if is_there else len(blocks))
            if is_there:
                homes.place([following], 1, [following - 1000])
                following += 1
        spans.append(Span(length - count, count, blocks))
    found = split(pack(spans, BLOCK), homes, BLOCK)
    return found[-1].spans


@settings(max_examples=60)
@given(parts(), st.integers(1, 4), st.booleans())
def test_segments_add_up(spans: PackedSpans, most_blocks: int, refetch: bool) -> None:
    blocks = int(spans.blocks.max(initial=0)) + 1
    rows = int(spans.first_row[-1])
    generator = torch.Generator().manual_seed(rows)
    pool = (
        torch.randn(blocks, HEADS, DIM, BLOCK, generator=generator),
        torch.randn(blocks, HEADS, BLOCK, DIM, generator=generator),
    )
    query = torch.randn(rows, HEADS, DIM, generator=generator)
    keys = torch.randn(rows, HEADS, DIM, generator=generator)
    values = torch.randn(rows, HEADS, DIM, generator=generator)
    whole = TorchBackend([pool], BLOCK, torch.float32)
    whole.write(0, keys, values, torch.from_numpy(spans.slots))
    expected, expected_lse = whole.attend_part(0, spans, query, SHAPE)
    output, lse = torch.zeros_like(expected), torch.full_like(expected_lse, float("-inf"))
    for segment in cut(spans, BLOCK, most_blocks, refetch=refetch):
        assert len(segment.spans.blocks) <= most_blocks
        staging = (torch.full_like(pool[0], torch.nan), torch.full_like(pool[1], torch.nan))
        for at, index in enumerate(segment.fetched):
            staging[0][at], staging[1][at] = (each[spans.blocks[index]] for each in pool)
        backend = TorchBackend([staging], BLOCK, torch.float32)
        backend.write(0, keys, values, torch.from_numpy(segment.spans.slots))
        part, part_lse = backend.attend_part(0, _without_nan(staging, segment.spans), query, SHAPE)
        merge_into(output, lse, part, part_lse, torch.arange(rows))
    packed = (query, keys, values)
    bounds = step_bounds(pool, packed, SHAPE, most_keys=blocks * BLOCK, parts=blocks + 1)
    for mine, theirs, bound in zip((output, lse), (expected, expected_lse), bounds, strict=True):
        assert_within(mine, theirs, 2 * bound)  # Both are rounded.


def _without_nan(staging: tuple[torch.Tensor, torch.Tensor], spans: PackedSpans) -> PackedSpans:
    """Fill unseen slots. The reference multiplies them by zero, so they must not be NaN."""
    for pool in staging:
        pool.nan_to_num_(0.0)
    return spans


@settings(max_examples=60)
@given(parts())
def test_pairs_are_counted(spans: PackedSpans) -> None:
    counted = 0
    for span in range(len(spans.first_position)):
        for row in range(spans.first_row[span + 1] - spans.first_row[span]):
            counted += max(0, min(int(spans.first_position[span]) + row + 1, int(spans.key_end[span])))
    assert pairs(spans) == counted


def test_a_block_that_this_step_fills_is_not_fetched() -> None:
    homes = Homes(1)
    homes.place(range(1, 6), 1, range(5))
    (_, part) = split(pack([Span(6, 12, [1, 2, 3, 4, 5])], BLOCK), homes, BLOCK)
    (segment,) = cut(part.spans, BLOCK, 8)
    assert segment.fetched.tolist() == [0, 1]
    (again,) = cut(part.spans, BLOCK, 8, refetch=True)
    assert again.fetched.tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(np.sort(segment.spans.blocks), np.arange(5))
