"""Where the rows of a packed step lie: which blocks each sees, which slots are masked. Built once a step.

Knows positions and block ids; no model, no sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.core.block_table import joined

_NEGATIVE_INFINITY = float("-inf")
_SPARE_BLOCKS = 4
"""Rows share a padded table while the longest has at most twice the shortest's blocks, and these more."""


class Span(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence that a step computes: positions [first, first + count)."""

    first_position: int
    count: int
    blocks: Sequence[int]
    """Of the sequence from its beginning; they have room for every position of the span."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Packed rows [start, end), one token of one sequence each."""

    start: int
    end: int
    tables: torch.Tensor
    """int64 `[rows, blocks]`."""
    mask: torch.Tensor | None
    """Additive `[rows, 1, 1, blocks * block_tokens]`."""


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Packed rows [start, end), a chunk of one sequence."""

    start: int
    end: int
    table: torch.Tensor
    """int64 `[blocks]`: the context's; under a window (`mask`) also the chunk's own."""
    context_tokens: int
    mask: torch.Tensor | None
    """Additive `[rows, context_tokens]` when a window cuts something off; it covers the chunk too."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A step as one kind of layer (one window) sees it."""

    groups: tuple[DecodeGroup, ...]
    spans: tuple[PrefillSpan, ...]


@dataclass(frozen=True, slots=True)
class PackedSpans:
    """A step's spans as arrays: `Spans` of `native/attention.h`, for whole sequences."""

    first_row: npt.NDArray[np.int32]
    """`[spans + 1]`."""
    first_position: npt.NDArray[np.int32]
    table_start: npt.NDArray[np.int32]
    table_position: npt.NDArray[np.int32]
    key_end: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    """For every packed row the slot (block * block_tokens + offset) that its K and V are written to."""
    window_tokens: int = 0
    """A row sees itself and so many positions less one before it; 0: everything."""


Locate = Callable[[npt.NDArray[np.int32], npt.NDArray[np.int32]], npt.NDArray[np.int32]]
"""Ids in tables, and those that rows stand in → where they are in this step."""


def pack(spans: Sequence[Span], block_tokens: int, locate: Locate | None = None) -> PackedSpans:
    """The arrays of packed spans whose tables begin with their sequences. `locate`: ids are no places.

    Raises ValueError for a table without room for all of its span.
    """
    bounds = np.array(
        [(span.first_position, span.count, len(span.blocks)) for span in spans], dtype=np.int32
    ).reshape(-1, 3)
    first_position, counts, lengths = np.ascontiguousarray(bounds.T)
    first_row, table_start = starts(counts), starts(lengths)
    key_end = first_position + counts
    if bool((key_end > lengths * block_tokens).any()):
        short = int(np.argmax(key_end > lengths * block_tokens))
        raise ValueError(f"{lengths[short]} blocks for positions up to {key_end[short]}")
    blocks = joined([span.blocks for span in spans])
    if first_row[-1] == len(spans):  # one token each
        positions, tables = first_position, table_start[:-1]
    else:
        shift = first_position - first_row[:-1]
        positions = np.arange(first_row[-1], dtype=np.int32) + np.repeat(shift, counts)
        tables = np.repeat(table_start[:-1], counts)
    block, offset = np.divmod(positions, block_tokens)
    if locate is not None:
        blocks = locate(blocks, blocks[tables + block])
    return PackedSpans(
        first_row=first_row,
        first_position=first_position,
        table_start=table_start,
        table_position=np.zeros_like(first_position),
        key_end=key_end,
        blocks=blocks,
        slots=blocks[tables + block].astype(np.int64) * block_tokens + offset,
    )


def starts(lengths: npt.NDArray[np.int32] | npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """`[parts + 1]`: where each of consecutive parts begins, and where the last one ends."""
    found = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=found[1:])
    return found


def build(
    spans: Sequence[Span],
    decodes: int,
    *,
    block_tokens: int,
    window_tokens: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Layout:
    """The layout of packed spans; the first `decodes` have one token each and are sorted by position.

    `window_tokens`: a token sees itself and the `window_tokens - 1` before it; None is everything.
    """
    groups = [
        _group(spans, start, end, block_tokens, window_tokens, dtype, device)
        for start, end in _ranges(spans[:decodes], block_tokens, window_tokens)
    ]
    prefills: list[PrefillSpan] = []
    row = decodes
    for span in spans[decodes:]:
        prefills.append(_prefill(span, row, block_tokens, window_tokens, dtype, device))
        row += span.count
    return Layout(tuple(groups), tuple(prefills))


def _visible_blocks(span: Span, block_tokens: int, window_tokens: int | None) -> tuple[int, int]:
    """First block and one past the last that the span's only token sees."""
    first = 0 if window_tokens is None else max(0, span.first_position + 1 - window_tokens)
    return first // block_tokens, span.first_position // block_tokens + 1


def _ranges(decodes: Sequence[Span], block_tokens: int, window_tokens: int | None) -> list[tuple[int, int]]:
    """Runs of rows whose tables are of similar length."""
    ranges: list[tuple[int, int]] = []
    start, shortest = 0, 0
    for row, span in enumerate(decodes):
        first, end = _visible_blocks(span, block_tokens, window_tokens)
        if row == 0:
            shortest = end - first
        elif end - first > 2 * shortest + _SPARE_BLOCKS:
            ranges.append((start, row))
            start, shortest = row, end - first
    return [*ranges, (start, len(decodes))] if decodes else []


def _group(
    spans: Sequence[Span],
    start: int,
    end: int,
    block_tokens: int,
    window_tokens: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeGroup:
    visible = [_visible_blocks(span, block_tokens, window_tokens) for span in spans[start:end]]
    width = max(last - first for first, last in visible)
    rows: list[Sequence[int]] = []
    bounds: list[tuple[int, int]] = []
    for span, (first, last) in zip(spans[start:end], visible, strict=True):
        row = list(span.blocks[first:last])
        rows.append(row + row[-1:] * (width - len(row)))
        lowest = 0 if window_tokens is None else max(0, span.first_position + 1 - window_tokens)
        bounds.append((lowest - first * block_tokens, span.first_position + 1 - first * block_tokens))
    mask = None
    if any(bound != (0, width * block_tokens) for bound in bounds):
        low, high = torch.tensor(bounds, device=device).unsqueeze(1).unbind(-1)
        slot = torch.arange(width * block_tokens, device=device)
        hidden = (slot < low) | (slot >= high)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, _NEGATIVE_INFINITY)
        mask = mask[:, None, None, :]
    return DecodeGroup(start, end, torch.tensor(rows, device=device), mask)


def _prefill(
    span: Span,
    start: int,
    block_tokens: int,
    window_tokens: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> PrefillSpan:
    end_position = span.first_position + span.count
    cut = window_tokens is not None and end_position > window_tokens
    context_tokens = end_position if cut else span.first_position
    blocks = -(-context_tokens // block_tokens)
    mask = None
    if cut and window_tokens is not None:
        query = torch.arange(span.first_position, end_position, device=device).unsqueeze(1)
        key = torch.arange(end_position, device=device)
        hidden = (key > query) | (key <= query - window_tokens)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, _NEGATIVE_INFINITY)
    table = torch.tensor(list(span.blocks[:blocks]), dtype=torch.int64, device=device)
    return PrefillSpan(start, start + span.count, table, context_tokens, mask)
