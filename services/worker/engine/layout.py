"""Layout of a packed step for `TorchBackend`: padded block tables and attention masks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.engine.spans import Span

_NEGATIVE_INFINITY = float("-inf")
_SPARE_BLOCKS = 4
"""Rows share a padded table if the longest has at most twice the blocks of the shortest plus these."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Packed decode rows [start, end), one token of one sequence each."""

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
    """int64 `[blocks]`: the context's; with a `mask` also the chunk's own."""
    context_tokens: int
    mask: torch.Tensor | None
    """Additive `[rows, context_tokens]` if a window hides keys; it covers the chunk too."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a step for layers of one window size."""

    groups: tuple[DecodeGroup, ...]
    spans: tuple[PrefillSpan, ...]


def build(
    spans: Sequence[Span],
    decodes: int,
    *,
    block_tokens: int,
    window_tokens: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Layout:
    """Return the layout of packed spans; the first `decodes` have one token each, sorted by position.

    `window_tokens`: see `LayerShape`; None: no window.
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
    """Return the block range [first, end) that the span's only token sees."""
    first = 0 if window_tokens is None else max(0, span.first_position + 1 - window_tokens)
    return first // block_tokens, span.first_position // block_tokens + 1


def _ranges(decodes: Sequence[Span], block_tokens: int, window_tokens: int | None) -> list[tuple[int, int]]:
    """Return runs of rows with tables of similar length."""
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
