"""Where packed rows lie."""

import torch

from services.worker.engine.layout import Layout, build
from services.worker.engine.spans import Span, pack

CPU = torch.device("cpu")


def layout(spans: list[Span], decodes: int, window_tokens: int | None = None) -> Layout:
    return build(spans, decodes, block_tokens=4, window_tokens=window_tokens, dtype=torch.float32, device=CPU)


def test_slots_follow_the_blocks() -> None:
    spans = [Span(5, 1, [9, 2]), Span(2, 4, [7, 3])]
    assert pack(spans, 4).slots.tolist() == [2 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, 3 * 4, 3 * 4 + 1]


def test_spans_are_packed_one_after_the_other() -> None:
    packed = pack([Span(5, 1, [9, 2]), Span(2, 4, [7, 3, 8])], 4)
    assert packed.first_row.tolist() == [0, 1, 5]
    assert packed.first_position.tolist() == [5, 2]
    assert packed.table_start.tolist() == [0, 2, 5]
    assert packed.table_position.tolist() == [0, 0]
    assert packed.key_end.tolist() == [6, 6]
    assert packed.blocks.tolist() == [9, 2, 7, 3, 8]
    assert packed.first_position.flags.c_contiguous


def test_no_spans_are_no_rows() -> None:
    packed = pack([], 4)
    assert packed.first_row.tolist() == [0] and len(packed.slots) == 0


def test_rows_of_very_different_length_do_not_share_a_table() -> None:
    lengths = [1, 9, 30, 200, 300]
    spans = [Span(length - 1, 1, list(range(100))) for length in lengths]
    groups = layout(spans, len(spans)).groups
    assert [(group.start, group.end, group.tables.shape[1]) for group in groups] == [
        (0, 2, 3),
        (2, 3, 8),
        (3, 5, 75),
    ]


def test_rows_that_fill_their_blocks_need_no_mask() -> None:
    (group,) = layout([Span(7, 1, [4, 5]), Span(7, 1, [1, 2])], 2).groups
    assert group.mask is None and group.tables.tolist() == [[4, 5], [1, 2]]


def test_padding_and_what_a_window_hides_are_masked() -> None:
    (group,) = layout([Span(2, 1, [4]), Span(6, 1, [1, 2])], 2, window_tokens=5).groups
    assert group.tables.tolist() == [[4, 4], [1, 2]]
    assert group.mask is not None
    assert (group.mask == 0).flatten(1).int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 0]]


def test_a_window_drops_blocks_before_it() -> None:
    (group,) = layout([Span(14, 1, [9, 8, 7, 6])], 1, window_tokens=4).groups
    assert group.tables.tolist() == [[7, 6]]


def test_chunks_follow_the_decodes() -> None:
    spans = [Span(3, 1, [0]), Span(0, 6, [1, 2]), Span(4, 3, [3, 4])]
    first, second = layout(spans, 1).spans
    assert (first.start, first.end, first.context_tokens, first.table.tolist()) == (1, 7, 0, [])
    assert (second.start, second.end, second.context_tokens, second.table.tolist()) == (7, 10, 4, [3])
    assert first.mask is None and second.mask is None
