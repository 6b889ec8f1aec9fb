"""Every row is in one tile, every array says what its span says, and the number of parts is sensible."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine import spans as steps
from services.worker.engine.gpu.spans import MOST_TILE_KEYS, Heads, choose_splits, pack
from services.worker.engine.spans import Span

CPU = torch.device("cpu")
spans = st.lists(
    st.builds(
        lambda first, count: Span(first, count, list(range(-(-(first + count) // 4)))),
        st.integers(0, 300),
        st.one_of(st.just(1), st.integers(1, 150)),
    ),
    max_size=8,
)


@given(spans, st.sampled_from([1, 3, 4, 8, 71]), st.sampled_from([1, 8, 32]), st.sampled_from([1, 108, 132]))
def test_every_row_is_in_exactly_one_tile(
    spans: list[Span], group: int, kv_heads: int, multiprocessors: int
) -> None:
    packed = pack(steps.pack(spans, 4), Heads(group, kv_heads), device=CPU, multiprocessors=multiprocessors)
    first_row = packed.first_row.tolist()
    covered: list[int] = []
    for tiles in packed.tiles:
        assert tiles.tokens * group <= tiles.rows and tiles.rows & (tiles.rows - 1) == 0
        assert tiles.splits & (tiles.splits - 1) == 0
        for span, row in zip(tiles.span.tolist(), tiles.row.tolist(), strict=True):
            assert first_row[span] <= row < first_row[span + 1]
            covered += range(row, min(row + tiles.tokens, first_row[span + 1]))
    assert sorted(covered) == list(range(sum(span.count for span in spans)))


@given(spans)
def test_arrays_say_what_the_spans_say_and_ids_of_blocks_that_exist_follow(spans: list[Span]) -> None:
    """A tile is read whole, beyond the end of its sequence's table."""
    packed = pack(steps.pack(spans, 4), Heads(2, 2), device=CPU, multiprocessors=1)
    assert packed.first_position.tolist() == [span.first_position for span in spans]
    assert packed.key_end.tolist() == [span.first_position + span.count for span in spans]
    assert packed.table_position.tolist() == [0] * len(spans) and packed.first_row.dtype is torch.int32
    for start, span in zip(packed.table_start.tolist(), spans, strict=True):
        assert packed.blocks[start : start + len(span.blocks)].tolist() == list(span.blocks)
    rest = packed.blocks.storage_offset() + len(packed.blocks)
    assert packed.blocks.as_strided((MOST_TILE_KEYS,), (1,), rest).tolist() == [0] * MOST_TILE_KEYS


@pytest.mark.parametrize(
    ("tiles", "kv_heads", "longest_tokens", "splits"),
    [
        (1, 8, 1 << 20, 64),
        (1, 32, 8192, 16),
        (1, 8, 2048, 16),
        (64, 32, 8192, 1),
        (1, 8, 100, 1),
        (0, 8, 0, 1),
    ],
)
def test_few_tiles_are_split_as_far_as_it_fills_the_device(
    tiles: int, kv_heads: int, longest_tokens: int, splits: int
) -> None:
    assert choose_splits(tiles, kv_heads, longest_tokens, multiprocessors=132) == splits
