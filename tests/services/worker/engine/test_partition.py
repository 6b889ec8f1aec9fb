"""Whatever worker a block lies at, each row sees each of its keys exactly once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import paged
from services.worker.engine.backends import NativeBackend, PartialBackend, TorchBackend
from services.worker.engine.layout import Span, pack
from services.worker.engine.native import library as native
from services.worker.engine.partition import ELSEWHERE, OWN, Homes, merge_into, split
from tests.rounding import assert_within
from tests.services.worker.engine.reference import step_bounds

BLOCK, Q_HEADS, KV_HEADS, DIM = 4, 4, 2, 8
SHAPE = paged.Shape(DIM**-0.5)
HOLDERS, EACH = 4, 40


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Span], list[int]]:
    """Sequences with blocks of one big pool, and the holder of each block."""
    free = list(range(EACH))
    spans = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 30))
        count = draw(st.integers(1, length))
        spans.append(Span(length - count, count, [free.pop() for _ in range(-(-length // BLOCK))]))
    return spans, draw(st.lists(st.integers(0, HOLDERS - 1), min_size=EACH, max_size=EACH))


def backend(pool: tuple[torch.Tensor, torch.Tensor], kind: str) -> PartialBackend:
    if kind == "native":
        return NativeBackend(native.load(), [pool], 1)
    return TorchBackend([pool], BLOCK, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["native", "torch"])
@settings(max_examples=50)
@given(steps())
def test_parts_are_the_whole(kind: str, step: tuple[list[Span], list[int]]) -> None:
    spans, holders = step
    rows = sum(span.count for span in spans)
    generator = torch.Generator().manual_seed(rows)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    pool = randn(EACH, KV_HEADS, DIM, BLOCK), randn(EACH, KV_HEADS, BLOCK, DIM)
    query, keys, values = randn(rows, Q_HEADS, DIM), randn(rows, KV_HEADS, DIM), randn(rows, KV_HEADS, DIM)
    pools = [(pool[0].clone(), pool[1].clone()) for _ in range(HOLDERS)]
    homes = Homes(EACH)
    ids = [block if holder == OWN else EACH + block for block, holder in enumerate(holders)]
    for block, holder in enumerate(holders):
        if holder != OWN:
            homes.place([EACH + block], holder, [block])
    whole = backend(pool, kind)
    packed = pack(spans, BLOCK)
    whole.write(0, keys, values, torch.from_numpy(packed.slots))
    expected, expected_lse = whole.attend_part(0, packed, query, SHAPE)
    parts = split([Span(s.first_position, s.count, [ids[b] for b in s.blocks]) for s in spans], homes, BLOCK)
    assert parts[0].holder == OWN and parts[0].rows.tolist() == list(range(rows))
    output, lse = torch.zeros_like(expected), torch.full_like(expected_lse, float("-inf"))
    kept = torch.zeros(rows, dtype=torch.int64)
    for part in parts:
        index = torch.from_numpy(part.rows)
        here = backend(pools[part.holder], kind)
        here.write(0, keys[index], values[index], torch.from_numpy(part.spans.slots))
        kept[index[torch.from_numpy(part.kept)]] += 1
        result, result_lse = here.attend_part(0, part.spans, query[index], SHAPE)
        merge_into(output, lse, result, result_lse, index)
    assert kept.tolist() == [1] * rows, "each row's K and V are kept once"
    most_keys = max(span.first_position + span.count for span in spans)
    bounds = step_bounds(pool, (query, keys, values), SHAPE, most_keys=most_keys, parts=HOLDERS + 1)
    for mine, theirs, bound in zip((output, lse), (expected, expected_lse), bounds, strict=True):
        assert_within(mine, theirs, 2 * bound)  # Both are rounded.


def test_a_row_that_a_creditor_cannot_help_is_not_sent() -> None:
    homes = Homes(4)
    homes.place([4, 5], 1, [0, 1])
    own, there = split([Span(2, 8, [0, 4, 5]), Span(3, 1, [1])], homes, BLOCK)
    assert own.rows.tolist() == list(range(9))
    assert there.rows.tolist() == [2, 3, 4, 5, 6, 7], "positions 4 to 9; the first two see nothing there"
    assert there.spans.slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert own.spans.slots.tolist() == [2, 3] + [ELSEWHERE] * 6 + [4 + 3]


def test_blocks_that_nobody_holds_or_that_are_missing_are_refused() -> None:
    homes = Homes(2)
    homes.place([2], 1, [7])
    with pytest.raises(ValueError, match="nobody holds"):
        split([Span(4, 1, [0, 3])], homes, BLOCK)
    with pytest.raises(ValueError, match="1 blocks for positions"):
        split([Span(4, 1, [0])], homes, BLOCK)
    homes.forget([2])
    with pytest.raises(ValueError, match="nobody holds"):
        homes.locate([0, 2])


def test_own_ids_are_never_elsewhere() -> None:
    homes = Homes(2)
    for ids, holder, blocks in (([1], 1, [0]), ([2], OWN, [0]), ([2, 3], 1, [0])):
        with pytest.raises(ValueError, match="cannot be"):
            homes.place(ids, holder, blocks)
    assert homes.are_own(np.array([0, 1], np.int32)) and not homes.are_own(np.array([0, 2], np.int32))
