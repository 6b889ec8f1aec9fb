"""The rows of a packed step as arrays: which blocks each sees, and where its K and V go. Built once a step.

Knows positions and block ids; no model, no sequence, no tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.kv.core.block_table import joined


class Span(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence that a step computes: positions [first, first + count)."""

    first_position: int
    count: int
    blocks: Sequence[int]
    """Of the sequence from its beginning; they have room for every position of the span."""


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
