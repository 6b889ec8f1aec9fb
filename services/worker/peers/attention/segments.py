"""A part cut into pieces that fit the staging: what to fetch, and the part as each piece sees it. Pure.

A block whose every key is made in this step needs no fetching. Knows a part's arrays; no tensor, no link.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.engine.layout import PackedSpans
from services.worker.engine.partition import ELSEWHERE


@dataclass(frozen=True, slots=True)
class Segment:
    """Some consecutive blocks of a part's tables, as they lie in the staging: fetched ones first."""

    fetched: npt.NDArray[np.int32]
    """Which of the part's blocks to fetch, in the order in which they lie."""
    spans: PackedSpans
    """With tables, and slots, of the staging."""


def cut(spans: PackedSpans, block_tokens: int, most_blocks: int, *, refetch: bool = False) -> list[Segment]:
    """Segments of at most so many blocks each. `refetch`: also what this step made; it is there already."""
    total = len(spans.blocks)
    of_block = {int(block): index for index, block in enumerate(spans.blocks)}
    kept = spans.slots != ELSEWHERE
    home = np.full(len(spans.slots), ELSEWHERE, dtype=np.int64)
    home[kept] = [of_block[int(slot) // block_tokens] for slot in spans.slots[kept]]
    offset = spans.slots % block_tokens
    is_fresh = np.zeros(total, dtype=bool)
    if not refetch:
        is_fresh[home[kept & (offset == 0)]] = True
    return [
        _segment(spans, first, min(first + most_blocks, total), block_tokens, home, offset, is_fresh)
        for first in range(0, total, most_blocks)
    ]


def _segment(
    spans: PackedSpans,
    first: int,
    end: int,
    block_tokens: int,
    home: npt.NDArray[np.int64],
    offset: npt.NDArray[np.int64],
    is_fresh: npt.NDArray[np.bool_],
) -> Segment:
    inside = np.arange(first, end, dtype=np.int32)
    fetched = inside[~is_fresh[first:end]]
    staged = np.empty(end - first, dtype=np.int32)
    staged[np.concatenate([fetched, inside[is_fresh[first:end]]]) - first] = inside - first
    start = spans.table_start
    low = np.maximum(start, first)
    blocks = -(-spans.key_end // block_tokens)
    high = np.minimum(start + blocks, end)
    is_seen = high > low
    there = (home >= first) & (home < end)
    slots = np.full(len(home), ELSEWHERE, dtype=np.int64)
    slots[there] = staged[home[there] - first].astype(np.int64) * block_tokens + offset[there]
    position = np.where(is_seen, (low - start) * block_tokens, 0).astype(np.int32)
    return Segment(
        fetched,
        PackedSpans(
            first_row=spans.first_row,
            first_position=spans.first_position,
            table_start=np.where(is_seen, low - first, 0).astype(np.int32),
            table_position=position,
            key_end=np.where(is_seen, np.minimum(spans.key_end, (high - start) * block_tokens), 0).astype(
                np.int32
            ),
            blocks=staged,
            slots=slots,
        ),
    )


def pairs(spans: PackedSpans) -> int:
    """Of a row and a key it sees."""
    rows = np.diff(spans.first_row).astype(np.int64)
    first, end = spans.first_position.astype(np.int64) + 1, spans.key_end.astype(np.int64)
    rising = np.minimum(rows, np.maximum(0, end - first))
    return int((rising * first + rising * (rising - 1) // 2 + (rows - rising) * end).clip(0).sum())
