"""Arrays that describe a packed step: the block table of each span and the slot of each row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from services.worker.core.decodes import DecodeBatch
from services.worker.kv.core.block_pool import joined, starts


class Span(msgspec.Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence in a step: positions [first, first + count)."""

    first_position: int
    count: int
    blocks: Sequence[int]
    """The sequence's block table from its first token; it covers every position of the span."""


@dataclass(frozen=True, slots=True)
class PackedSpans:
    """A step's spans as arrays, as in `Spans` of `native/attention.h`."""

    first_row: npt.NDArray[np.int32]
    """`[spans + 1]`."""
    first_position: npt.NDArray[np.int32]
    table_start: npt.NDArray[np.int32]
    table_position: npt.NDArray[np.int32]
    key_end: npt.NDArray[np.int32]
    blocks: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    """`[rows]`: slot (block * block_tokens + offset) that each row's K and V are written to."""
    window_tokens: int = 0
    """See `LayerShape.window_tokens`."""


Locate = Callable[[npt.NDArray[np.int32], npt.NDArray[np.int32]], npt.NDArray[np.int32]]
"""Maps block ids of tables, and ids of blocks that rows are written to, to their places in this step."""


def pack(spans: Sequence[Span], block_tokens: int, locate: Locate | None = None) -> PackedSpans:
    """Return the arrays of packed spans. `locate` maps block ids to places; None: they are the same.

    Raises ValueError for a block table that is too short for its span."""
    first_position, counts, lengths = _bounds(spans)
    blocks = joined([span.blocks for span in spans])
    return pack_arrays(first_position, counts, lengths, blocks, block_tokens, locate)


def _bounds(spans: Sequence[Span]) -> npt.NDArray[np.int32]:
    """Return first positions, numbers of tokens and lengths of tables, `[3, spans]`."""
    bounds = [(span.first_position, span.count, len(span.blocks)) for span in spans]
    return np.ascontiguousarray(np.array(bounds, dtype=np.int32).reshape(-1, 3).T)


def pack_arrays(
    first_position: npt.NDArray[np.int32],
    counts: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
    blocks: npt.NDArray[np.int32],
    block_tokens: int,
    locate: Locate | None = None,
) -> PackedSpans:
    """`pack` spans that are arrays: `[spans]` each, and the `blocks` of all tables, of `lengths` blocks."""
    first_row, table_start = starts(counts), starts(lengths)
    key_end = first_position + counts
    if bool((key_end > lengths * block_tokens).any()):
        short = int(np.argmax(key_end > lengths * block_tokens))
        raise ValueError(f"{lengths[short]} blocks for positions up to {key_end[short]}")
    if first_row[-1] == len(counts):  # one token each
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


def pack_step(
    batch: DecodeBatch | None, spans: Sequence[Span], block_tokens: int, locate: Locate | None = None
) -> PackedSpans:
    """`pack` the rows of a batch, if there is one, and then spans."""
    if batch is None:
        return pack(spans, block_tokens, locate)
    group, first = batch.group, batch.first.astype(np.int32)
    if not spans:
        return _pack_decodes(batch, first, block_tokens, locate)
    ours = first, np.ones(len(batch), dtype=np.int32), group.table_blocks
    first, counts, lengths = (np.concatenate(each) for each in zip(ours, _bounds(spans), strict=True))
    blocks = np.concatenate((group.blocks, joined([span.blocks for span in spans])))
    return pack_arrays(first, counts, lengths, blocks, block_tokens, locate)


def _pack_decodes(
    batch: DecodeBatch, first: npt.NDArray[np.int32], block_tokens: int, locate: Locate | None
) -> PackedSpans:
    """`pack` a batch alone; the group has what stays the same from step to step."""
    group, blocks = batch.group, batch.group.blocks
    block, offset = np.divmod(first, block_tokens)
    if int((group.table_blocks - block).min()) < 1:
        raise ValueError("a table is too short for its position")
    block += group.table_start[:-1]
    if locate is not None:
        blocks = locate(blocks, blocks[block])
    slots = blocks[block].astype(np.int64)
    slots *= block_tokens
    slots += offset
    return PackedSpans(
        first_row=group.rows,
        first_position=first,
        table_start=group.table_start,
        table_position=group.zeros,
        key_end=first + 1,
        blocks=blocks,
        slots=slots,
    )
