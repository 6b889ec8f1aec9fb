"""Distributed attention: splits a step into one part per holder of its blocks.

`Homes` maps block ids to holders and `split` makes one `Part` for each holder; `remote.py` merges their
results:

    a row sees blocks 0 1 2 3; 0 and 3 are its engine's own, worker 1 holds 1 and 2 (as its blocks 7 and 8)
    split → [Part(OWN, blocks 0 3), Part(1, blocks 7 8)]; each yields (output, log-sum-exp) for that row
    merged: outputs weighted by exp(log-sum-exp), exact within rounding in any order

Source: Infinite-LLM §4.2 (papers/001), plus the values and the scale 1/√d that its equations omit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.worker.engine.spans import PackedSpans
from services.worker.kv.core.block_pool import starts

OWN = 0
"""Holder number of the engine's own blocks; other numbers are creditors."""
ELSEWHERE = -1
"""Slot of a row whose K and V another holder stores."""


class Homes:
    """Map of block ids to holders: ids below `own_blocks` are the engine's, the others are at creditors.

    Ids at creditors are never reused; the arrays cover only the range from the lowest to the highest in use.
    """

    def __init__(self, own_blocks: int) -> None:
        self.own_blocks = own_blocks
        self._first = own_blocks
        """Block id of the first entry of both arrays."""
        self._holder = np.full(1, OWN, dtype=np.int32)
        """`OWN` marks an id without a holder."""
        self._block = np.zeros(1, dtype=np.int32)

    def place(self, ids: Sequence[int], holder: int, blocks: Sequence[int]) -> None:
        """Map `ids` to a creditor's `blocks`. Raises ValueError for the engine's own ids."""
        named = np.array(ids, dtype=np.int64)
        if len(ids) != len(blocks) or holder == OWN or bool((named < self.own_blocks).any()):
            raise ValueError(f"{len(ids)} ids cannot be {len(blocks)} blocks of {holder}")
        if named.size:
            self._make_room(int(named.min()), int(named.max()) + 1)
            self._holder[named - self._first], self._block[named - self._first] = holder, blocks

    def forget(self, ids: Iterable[int]) -> None:
        """Remove ids from the map."""
        at = np.fromiter(ids, dtype=np.int64) - self._first
        self._holder[at[(at >= 0) & (at < len(self._holder))]] = OWN

    @property
    def is_empty(self) -> bool:
        """Whether no creditor holds a block."""
        return not self._holder.any()

    def locate(
        self, ids: Sequence[int] | npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the holder of each id and its block there. Raises ValueError for an id without a holder."""
        block = np.array(ids, dtype=np.int32)
        holder = np.full(len(block), OWN, dtype=np.int32)
        away = np.flatnonzero(block >= self.own_blocks)
        at = block[away] - self._first
        found = self._holder.take(at, mode="clip")
        found[(at < 0) | (at >= len(self._holder))] = OWN
        if not found.all():
            raise ValueError(f"nobody holds block {block[away[found == OWN][0]]}")
        holder[away], block[away] = found, self._block.take(at, mode="clip")
        return holder, block

    def _make_room(self, first: int, end: int) -> None:
        """Resize the arrays to twice the range of `first` to `end` and all ids in use."""
        if self._first <= first and end <= self._first + len(self._holder):
            return
        held = np.flatnonzero(self._holder != OWN)
        if held.size:
            first, end = min(first, self._first + int(held[0])), max(end, self._first + int(held[-1]) + 1)
        holder, block = (np.full(2 * (end - first), OWN, dtype=np.int32) for _ in range(2))
        moved = held + (self._first - first)
        holder[moved], block[moved] = self._holder[held], self._block[held]
        self._first, self._holder, self._block = first, holder, block


@dataclass(frozen=True, slots=True)
class Part:
    """The rows and blocks that one holder attends to in a step."""

    holder: int
    rows: npt.NDArray[np.int64]
    """`[n]`: packed rows, ascending."""
    spans: PackedSpans
    """Spans of those rows; `slots` are the holder's, or `ELSEWHERE` if another holder stores K and V."""

    @property
    def kept(self) -> npt.NDArray[np.int64]:
        """Indices of the part's rows whose K and V this holder stores."""
        return np.flatnonzero(self.spans.slots != ELSEWHERE)

    @property
    def seen_keys(self) -> int:
        """Number of blocks in the part's tables."""
        return int(self.spans.blocks.size)


def whole(holder: int, blocks: npt.NDArray[np.int32], block_tokens: int) -> Part:
    """Return a part with one row that sees exactly these blocks."""
    tokens = len(blocks) * block_tokens
    one = np.zeros(1, dtype=np.int32)
    spans = PackedSpans(
        first_row=np.array([0, 1], dtype=np.int32),
        first_position=one + tokens,
        table_start=one,
        table_position=one,
        key_end=one + tokens,
        blocks=blocks.astype(np.int32),
        slots=np.array([ELSEWHERE], dtype=np.int64),
    )
    return Part(holder, np.zeros(1, dtype=np.int64), spans)


def split(packed: PackedSpans, homes: Homes, block_tokens: int) -> list[Part]:
    """`split_by_window` for a model without sliding windows."""
    return split_by_window(packed, homes, block_tokens, (0,))[0]


def split_by_window(
    packed: PackedSpans, homes: Homes, block_tokens: int, windows: Sequence[int]
) -> list[list[Part]]:
    """Return the parts of a step for each window size in tokens (0: no window), in the order of `windows`.

    The engine's own part comes first and has every row, even rows that see nothing there. The own parts share
    one `blocks` array. `packed`: from `spans.pack`. Raises ValueError for a block without a holder."""
    rows = np.arange(packed.first_row[-1], dtype=np.int64)
    needed = -(-(packed.first_position + np.diff(packed.first_row)) // block_tokens)
    elsewhere = np.flatnonzero(packed.blocks >= homes.own_blocks)
    start = packed.table_start[: len(needed)]
    found = np.searchsorted(elsewhere, start + needed) > np.searchsorted(elsewhere, start)
    if not found.any():
        return [
            [Part(OWN, rows, replace(packed, window_tokens=each) if each else packed)] for each in windows
        ]
    spans = np.flatnonzero(found)
    kinds = [_Divided(packed, spans, needed, homes, block_tokens, window) for window in windows]
    tables = [packed.blocks, *(kind.block[kind.holder == OWN] for kind in kinds)]
    joined, ends = np.concatenate(tables), np.cumsum([len(table) for table in tables]).tolist()
    return [
        [Part(OWN, rows, kind.own_spans(packed, joined, first)), *kind.others()]
        for kind, first in zip(kinds, ends[:-1], strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Runs of rows whose K and V are all at one holder, or all elsewhere; one array entry per run."""

    span: npt.NDArray[np.int32]
    """Index of the divided span."""
    count: npt.NDArray[np.int32]
    """Number of rows."""
    seen: npt.NDArray[np.int32]
    """Position of the first row among the holder's keys."""
    table_start: npt.NDArray[np.int32]
    """Offset into the tables of all divided spans at this holder."""
    key_end: npt.NDArray[np.int32]


class _Divided:
    """The spans of a step that see blocks of creditors, as arrays over their blocks and rows.

    The keys of a span at one holder are numbered from 0, without gaps; rows keep their order, so causality
    holds. With a window each row is a piece of its own, at the position whose window begins with the first
    key that the row sees; `key_end` cuts off later keys:

        window of 4, blocks of 2: a row at position 6 sees 3 4 5 6; a creditor holds blocks 1 (2 3), 3 (6 7)
        its table there: 1 3, keys 2 3 6 7 as 0 1 2 3; it sees 1 and 2: position 1 + 4 - 1 = 4, key_end 3"""

    def __init__(
        self,
        packed: PackedSpans,
        spans: npt.NDArray[np.int64],
        needed: npt.NDArray[np.int32],
        homes: Homes,
        block_tokens: int,
        window_tokens: int,
    ) -> None:
        """`spans`: their indices, ascending. `needed`: number of blocks that each span of the step fills."""
        self._spans, self._block_tokens, self.window_tokens = spans, block_tokens, window_tokens
        first = packed.first_position[spans]
        end = first + (packed.first_row[spans + 1] - packed.first_row[spans])
        self._first, self._count = first, end - first
        lowest_seen = np.maximum(0, first + 1 - window_tokens) // block_tokens if window_tokens else 0 * first
        self._base = starts(needed[spans] - lowest_seen)
        """`[spans + 1]`: offset of each span's blocks, from the first block that any of its rows sees."""
        self._origin = self._base[:-1] - lowest_seen
        """Offset of block 0 of each span."""
        self._span = np.repeat(np.arange(len(spans), dtype=np.int32), np.diff(self._base))
        index = np.arange(self._base[-1], dtype=np.int32) - self._origin[self._span]
        table = packed.table_start[spans][self._span] + index
        self.holder, self.block = homes.locate(packed.blocks[table])
        # From here on: only the blocks that contain rows of the step.
        lowest = (first // block_tokens)[self._span]
        self._tail = np.flatnonzero(index >= lowest)
        self._is_first = (index == lowest)[self._tail]
        span, border = self._span[self._tail], index[self._tail] * block_tokens
        self._position = np.maximum(first[span], border)
        self._end = np.minimum(end[span], border + block_tokens)
        count = self._end - self._position
        within = _counted(count)
        self._rows = np.repeat(packed.first_row[spans][span] + self._position - first[span], count) + within
        """Packed rows of all these spans, ascending."""
        slot = self.block[self._tail].astype(np.int64) * block_tokens + self._position % block_tokens
        self._slot = np.repeat(slot, count) + within
        self._kept_by = np.repeat(self.holder[self._tail], count)

    def _pieces(self, holder: int) -> _Pieces:
        """Return the pieces of all rows, including rows that see nothing at the holder."""
        return self._rows_alone(holder) if self.window_tokens else self._runs(holder)

    def _runs(self, holder: int) -> _Pieces:
        tail, is_there = self._tail, self.holder == holder
        before = starts(is_there)
        begins = np.flatnonzero(self._is_first | (is_there[tail] != is_there[tail - 1]))
        at, position = tail[begins], self._position[begins]
        count = self._end[np.append(begins[1:], len(tail)) - 1] - position
        span = self._span[at]
        table_start = before[self._base[span]]
        seen = (before[at] - table_start) * self._block_tokens
        seen += position % self._block_tokens * is_there[at]
        return _Pieces(span, count, seen, table_start, seen + count * is_there[at])

    def _rows_alone(self, holder: int) -> _Pieces:
        is_there = self.holder == holder
        before = starts(is_there)
        span = np.repeat(np.arange(len(self._spans), dtype=np.int32), self._count)
        position = self._first[span] + _counted(self._count)
        lowest = np.maximum(0, position + 1 - self.window_tokens)
        first = self._origin[span] + lowest // self._block_tokens
        last = self._origin[span] + position // self._block_tokens
        unseen = lowest % self._block_tokens * is_there[first]
        behind = (self._block_tokens - 1 - position % self._block_tokens) * is_there[last]
        key_end = (before[last + 1] - before[first]) * self._block_tokens - behind
        seen = unseen + self.window_tokens - 1
        return _Pieces(span, np.ones_like(span), seen, before[first], key_end)

    def others(self) -> "list[Part]":
        """Return one part for each creditor that holds any of the blocks, without rows that see nothing."""
        creditors = 1 + np.flatnonzero(np.bincount(self.holder)[OWN + 1 :])
        return [self._part(holder) for holder in creditors.tolist()]

    def _slots(self, holder: int) -> npt.NDArray[np.int64]:
        """Return the slots of `rows` at a holder; `ELSEWHERE` if it does not store them."""
        return np.where(self._kept_by == holder, self._slot, ELSEWHERE)

    def _part(self, holder: int) -> Part:
        pieces = self._pieces(holder)
        is_seen = pieces.key_end > 0
        is_sent = np.repeat(is_seen, pieces.count)
        spans = PackedSpans(
            first_row=starts(pieces.count[is_seen]),
            first_position=pieces.seen[is_seen],
            table_start=pieces.table_start[is_seen],
            table_position=np.zeros(np.count_nonzero(is_seen), dtype=np.int32),
            key_end=pieces.key_end[is_seen],
            blocks=self.block[self.holder == holder],
            slots=self._slots(holder)[is_sent],
            window_tokens=self.window_tokens,
        )
        return Part(holder, self._rows[is_sent].astype(np.int64), spans)

    def own_spans(self, packed: PackedSpans, blocks: npt.NDArray[np.int32], first: int) -> PackedSpans:
        """Return the own part's spans, with divided spans as pieces whose tables are at `blocks[first:]`."""
        pieces = self._pieces(OWN)
        many = np.ones(len(packed.first_position), dtype=np.int64)
        many[self._spans] = np.bincount(pieces.span)
        of = np.repeat(np.arange(len(many)), many)
        undivided_before = self._spans - np.arange(len(self._spans))
        at = np.arange(len(pieces.span)) + undivided_before[pieces.span]
        count, first_position = np.diff(packed.first_row)[of], packed.first_position[of]
        table_start, key_end, slots = packed.table_start[of], packed.key_end[of], packed.slots.copy()
        count[at], first_position[at], key_end[at] = pieces.count, pieces.seen, pieces.key_end
        table_start[at] = first + pieces.table_start
        slots[self._rows] = self._slots(OWN)
        return PackedSpans(
            first_row=starts(count),
            first_position=first_position,
            table_start=table_start,
            table_position=np.zeros_like(first_position),
            key_end=key_end,
            blocks=blocks,
            slots=slots,
            window_tokens=self.window_tokens,
        )


def _counted(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the concatenation of `range(count)` for each count."""
    before = starts(counts)
    return np.arange(before[-1], dtype=np.int32) - np.repeat(before[:-1], counts)
