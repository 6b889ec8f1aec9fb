"""Layout of a packed step for `TorchBackend`: padded block tables and attention masks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.engine.spans import Span

_HIDDEN = float("-inf")
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


Layout = tuple[list[DecodeGroup], list[PrefillSpan]]
"""Layout of a step for layers of one window size."""


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

    `window_tokens`: see `LayerShape`; None: no window."""
    zero = torch.zeros((), dtype=dtype, device=device)
    groups: list[DecodeGroup] = []
    start, seen = 0, [_seen(span, window_tokens) for span in spans[:decodes]]
    blocks = [range(low // block_tokens, (end - 1) // block_tokens + 1) for low, end in seen]
    for row in range(1, decodes + 1):
        if row == decodes or len(blocks[row]) > 2 * len(blocks[start]) + _SPARE_BLOCKS:
            width = max(map(len, blocks[start:row]))
            tables, bounds = [], []
            for span, (low, end), visible in zip(
                spans[start:row], seen[start:row], blocks[start:row], strict=True
            ):
                table = list(span.blocks[visible.start : visible.stop])
                tables.append(table + table[-1:] * (width - len(table)))
                first = visible.start * block_tokens
                bounds.append((low - first, end - first))
            mask = None
            if any(bound != (0, width * block_tokens) for bound in bounds):
                lows, ends = torch.tensor(bounds, device=device).unsqueeze(1).unbind(-1)
                slot = torch.arange(width * block_tokens, device=device)
                mask = zero.where((slot >= lows) & (slot < ends), _HIDDEN)[:, None, None, :]
            groups.append(DecodeGroup(start, row, torch.tensor(tables, device=device), mask))
            start = row
    prefills: list[PrefillSpan] = []
    for span in spans[decodes:]:
        end, mask = span.first_position + span.count, None
        is_cut = window_tokens is not None and end > window_tokens
        context_tokens = end if is_cut else span.first_position
        if is_cut and window_tokens is not None:
            query = torch.arange(span.first_position, end, device=device).unsqueeze(1)
            key = torch.arange(end, device=device)
            mask = zero.where((key <= query) & (key > query - window_tokens), _HIDDEN)
        table = list(span.blocks[: -(-context_tokens // block_tokens)])
        on_device = torch.tensor(table, dtype=torch.int64, device=device)
        prefills.append(PrefillSpan(start, start + span.count, on_device, context_tokens, mask))
        start += span.count
    return groups, prefills


def _seen(span: Span, window_tokens: int | None) -> tuple[int, int]:
    """Return the positions [low, end) that the span's only token sees."""
    end = span.first_position + 1
    return 0 if window_tokens is None else max(0, end - window_tokens), end
