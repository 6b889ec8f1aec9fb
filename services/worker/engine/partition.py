"""Which worker holds which keys of a step: a part for each, of the rows that see any of its keys. Pure.

A part's keys are counted as if its blocks followed one another: attention does not mind where its keys come
from, as long as each row sees the right ones, and only a sequence's last block is not full. So every part is
an ordinary call of the attention operator. Knows block ids and positions; no tensor, no connection. Source:
Infinite-LLM §4.2 and §4.3 (rBlocks), papers/001.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.engine.layout import PackedSpans, Span

OWN = 0
"""The holder of the engine's own blocks; the others are creditors."""
ELSEWHERE = -1
"""The slot of a row whose K and V another holder keeps."""

PartSlice = tuple[int, int, int, int, int]
"""Rows, position of the first, where the table starts, end of its keys, first packed row."""


class Homes:
    """Where blocks are: ids below `own_blocks` in the engine's pools, those above in creditors'."""

    def __init__(self, own_blocks: int) -> None:
        self.own_blocks = own_blocks
        self._there: dict[int, tuple[int, int]] = {}

    def place(self, ids: Sequence[int], holder: int, blocks: Sequence[int]) -> None:
        """Block `ids` are a creditor's `blocks` from now on. Raises ValueError for the engine's own ids."""
        if len(ids) != len(blocks) or holder == OWN or any(each < self.own_blocks for each in ids):
            raise ValueError(f"{len(ids)} ids cannot be {len(blocks)} blocks of {holder}")
        self._there.update(zip(ids, ((holder, block) for block in blocks), strict=True))

    def forget(self, ids: Iterable[int]) -> None:
        """Nobody holds these any more."""
        for each in ids:
            self._there.pop(each, None)

    def are_own(self, blocks: Sequence[int]) -> bool:
        """Whether all of them are in the engine's own pools."""
        return not blocks or max(blocks) < self.own_blocks

    def locate(self, ids: Sequence[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Holder and block there of each. Raises ValueError for an id that nobody holds."""
        own, there = self.own_blocks, self._there
        try:
            found = [(OWN, each) if each < own else there[each] for each in ids]
        except KeyError as error:
            raise ValueError(f"nobody holds block {error}") from error
        pairs = np.array(found, dtype=np.int32).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]


@dataclass(frozen=True, slots=True)
class Part:
    """What one holder attends to in a step."""

    holder: int
    rows: npt.NDArray[np.int64]
    """`[n]`: packed rows, ascending."""
    spans: PackedSpans
    """Of those rows. `slots` is where the holder keeps their K and V, `ELSEWHERE` where it does not."""

    @property
    def kept(self) -> npt.NDArray[np.int64]:
        """Which of the part's rows have their K and V there."""
        return np.flatnonzero(self.spans.slots != ELSEWHERE)

    @property
    def seen_keys(self) -> int:
        """Keys in the tables: what fetching it all would bring."""
        return int(self.spans.blocks.size)


class _Collector:
    """Pieces of one holder, as they are found."""

    def __init__(self) -> None:
        self.pieces: list[PartSlice] = []
        self.blocks: list[npt.NDArray[np.int32]] = []
        self.size = 0
        self.rows: list[npt.NDArray[np.int64]] = []
        self.slots: list[npt.NDArray[np.int64]] = []

    def add_table(self, blocks: npt.NDArray[np.int32]) -> int:
        start, self.size = self.size, self.size + len(blocks)
        self.blocks.append(blocks)
        return start

    def add(self, piece: PartSlice, slots: npt.NDArray[np.int64]) -> None:
        self.pieces.append(piece)
        self.rows.append(np.arange(piece[4], piece[4] + piece[0], dtype=np.int64))
        self.slots.append(slots)

    def part(self, holder: int) -> Part:
        found = np.array([piece[:4] for piece in self.pieces], dtype=np.int32).reshape(-1, 4)
        counts, first_position, table_start, key_end = np.ascontiguousarray(found.T)
        first_row = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=first_row[1:])
        packed = PackedSpans(
            first_row=first_row,
            first_position=first_position,
            table_start=table_start,
            table_position=np.zeros_like(first_position),
            key_end=key_end,
            blocks=np.concatenate([np.zeros(0, dtype=np.int32), *self.blocks]),
            slots=np.concatenate([np.zeros(0, dtype=np.int64), *self.slots]),
        )
        return Part(holder, np.concatenate([np.zeros(0, dtype=np.int64), *self.rows]), packed)


def split(spans: Sequence[Span], homes: Homes, block_tokens: int) -> list[Part]:
    """The parts of a step, the engine's own first; that one has every row, seeing nothing where it must.

    Raises ValueError for a block that nobody holds.
    """
    found: dict[int, _Collector] = {OWN: _Collector()}
    row = 0
    for span in spans:
        needed = -(-(span.first_position + span.count) // block_tokens)
        if len(span.blocks) < needed:
            raise ValueError(f"{len(span.blocks)} blocks for positions up to {needed * block_tokens}")
        holder, block = homes.locate(span.blocks[:needed])
        for each in sorted({OWN, *holder.tolist()}):
            _collect(
                found.setdefault(each, _Collector()), span, row, holder == each, block, block_tokens, each
            )
        row += span.count
    return [found[holder].part(holder) for holder in sorted(found)]


def _collect(
    found: _Collector,
    span: Span,
    row: int,
    is_there: npt.NDArray[np.bool_],
    block: npt.NDArray[np.int32],
    block_tokens: int,
    holder: int,
) -> None:
    """One span's pieces at one holder: runs of rows whose own K and V are there, or are not."""
    table = found.add_table(block[is_there])
    at, end = span.first_position, span.first_position + span.count
    full, rest = divmod(at, block_tokens)
    seen = int(is_there[:full].sum()) * block_tokens + (rest if rest and is_there[full] else 0)
    while at < end:
        first = at // block_tokens
        last = first
        while last < len(is_there) and is_there[last] == is_there[first]:
            last += 1
        until = min(end, last * block_tokens)
        count, first_row = until - at, row + at - span.first_position
        if is_there[first]:
            position = np.arange(at, until)
            slots = block[position // block_tokens].astype(np.int64) * block_tokens + position % block_tokens
            found.add((count, seen, table, seen + count, first_row), slots)
            seen += count
        elif seen or holder == OWN:
            found.add((count, seen, table, seen, first_row), np.full(count, ELSEWHERE, dtype=np.int64))
        at = until
