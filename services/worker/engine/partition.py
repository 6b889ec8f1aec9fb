"""Attention in parts: a step cut by who holds its blocks, attended to where the keys are, and joined again.

`Homes` knows which block ids are the engine's own and which another worker holds, `split` cuts a step into
one `Part` for each holder; `remote.RemoteAttention` attends to the others' parts, and `remote.merge_into`
joins what comes back with the engine's own:

    a row sees blocks 0 1 2 3; 0 and 3 are our own, worker 1 holds 1 and 2 (as its blocks 7 and 8)
    split → [Part(OWN, blocks 0 3), Part(1, blocks 7 8)]; each yields (output, log-sum-exp) for that row
    joined: outputs weighed by exp(log-sum-exp), exact within rounding, whatever the order of the parts

A part's result is its normalised output and its log-sum-exp, which is m + ln l of the paper's running maximum
and sum. Source: Infinite-LLM §4.2 (papers/001), with the values and the scale 1/√d that its equations leave
out. Knows no connection, no sequence and no tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from services.worker.engine.spans import PackedSpans, starts

OWN = 0
"""The holder of the engine's own blocks; the others are creditors."""
ELSEWHERE = -1
"""The slot of a row whose K and V another holder keeps."""


class Homes:
    """Where blocks are: ids below `own_blocks` in the engine's pools, those above in creditors'.

    Ids of creditors' blocks are never used again, so memory is for those between the lowest and the highest
    that are held.
    """

    def __init__(self, own_blocks: int) -> None:
        self.own_blocks = own_blocks
        self._first = own_blocks
        """The id of the first entry of both arrays."""
        self._holder = np.full(1, OWN, dtype=np.int32)
        """`OWN`: nobody holds it."""
        self._block = np.zeros(1, dtype=np.int32)

    def place(self, ids: Sequence[int], holder: int, blocks: Sequence[int]) -> None:
        """Block `ids` are a creditor's `blocks` from now on. Raises ValueError for the engine's own ids."""
        named = np.array(ids, dtype=np.int64)
        if len(ids) != len(blocks) or holder == OWN or bool((named < self.own_blocks).any()):
            raise ValueError(f"{len(ids)} ids cannot be {len(blocks)} blocks of {holder}")
        if not named.size:
            return
        self._make_room(int(named.min()), int(named.max()) + 1)
        at = named - self._first
        self._holder[at], self._block[at] = holder, blocks

    def forget(self, ids: Iterable[int]) -> None:
        """Nobody holds these any more."""
        at = np.fromiter(ids, dtype=np.int64) - self._first
        self._holder[at[(at >= 0) & (at < len(self._holder))]] = OWN

    @property
    def is_empty(self) -> bool:
        """Nothing is held by anybody else."""
        return not self._holder.any()

    def are_own(self, blocks: npt.NDArray[np.int32]) -> bool:
        """Whether all of them are in the engine's own pools."""
        return not blocks.size or int(blocks.max()) < self.own_blocks

    def locate(
        self, ids: Sequence[int] | npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Holder and block there of each. Raises ValueError for an id that nobody holds."""
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
        """For ids from `first` to before `end`, and as many again. What is forgotten makes room."""
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


def whole(holder: int, blocks: npt.NDArray[np.int32], block_tokens: int) -> Part:
    """A part of nothing but these blocks, as one row after them would see them."""
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
    """`split_by_window` for a model whose layers see everything."""
    return split_by_window(packed, homes, block_tokens, (0,))[0]


def split_by_window(
    packed: PackedSpans, homes: Homes, block_tokens: int, windows: Sequence[int]
) -> list[list[Part]]:
    """The parts of a step, for each window that layers of the model have (0: everything), in this order.

    The engine's own is the first of each, and has every row, seeing nothing where it must; `blocks` of these
    are one array. `packed`: from `spans.pack`. Spans whose blocks are all own cost no more than to look for
    others among their ids; the own parts see their tables where they lie. Raises ValueError for a block that
    nobody holds.
    """
    rows = np.arange(packed.first_row[-1], dtype=np.int64)
    needed = -(-(packed.first_position + np.diff(packed.first_row)) // block_tokens)
    elsewhere = np.flatnonzero(packed.blocks >= homes.own_blocks)
    start = packed.table_start[: len(needed)]
    found = np.searchsorted(elsewhere, start + needed) > np.searchsorted(elsewhere, start)
    if not found.any():
        return [
            [Part(OWN, rows, replace(packed, window_tokens=window) if window else packed)]
            for window in windows
        ]
    spans = np.flatnonzero(found)
    kinds = [_Divided(packed, spans, needed, homes, block_tokens, window) for window in windows]
    tables = [packed.blocks, *(kind.blocks(OWN) for kind in kinds)]
    joined, ends = np.concatenate(tables), np.cumsum([len(table) for table in tables]).tolist()
    return [
        [Part(OWN, rows, _with_pieces(packed, kind, joined, first)), *kind.others()]
        for kind, first in zip(kinds, ends[:-1], strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Runs of rows whose own K and V are all at one holder, or all are not: one entry each."""

    span: npt.NDArray[np.int32]
    """Which of the divided spans."""
    count: npt.NDArray[np.int32]
    """Of rows."""
    seen: npt.NDArray[np.int32]
    """Where the first row stands among the holder's keys: behind so many."""
    table_start: npt.NDArray[np.int32]
    """In the tables of all divided spans at this holder."""
    key_end: npt.NDArray[np.int32]


class _Divided:
    """The spans of a step that see blocks of somebody else, as arrays over their blocks and rows.

    A holder's keys are numbered from 0 for each span, as if they lay one behind the other; rows are counted
    on, so that what is causal stays so. Under a window each row is a piece of its own, and stands where its
    window begins with the first key that it sees (`key_end` cuts off what comes after the row):

        window of 4, blocks of 2, a row at position 6 sees 3 4 5 6; somebody holds blocks 1 (2 3) and 3 (6 7)
        its table there: 1 3, keys 2 3 6 7 as 0 1 2 3; it sees 1 and 2: stands at 1 + 4 - 1 = 4, key_end is 3
    """

    def __init__(
        self,
        packed: PackedSpans,
        spans: npt.NDArray[np.int64],
        needed: npt.NDArray[np.int32],
        homes: Homes,
        block_tokens: int,
        window_tokens: int,
    ) -> None:
        """`spans`: which they are, ascending. `needed`: blocks that each span of the step fills."""
        self.spans = spans
        self.window_tokens = window_tokens
        self._block_tokens = block_tokens
        first = packed.first_position[spans]
        end = first + (packed.first_row[spans + 1] - packed.first_row[spans])
        self._first, self._count = first, end - first
        lowest_seen = np.maximum(0, first + 1 - window_tokens) // block_tokens if window_tokens else 0 * first
        self._base = starts(needed[spans] - lowest_seen)
        """`[spans + 1]`: where the blocks of each begin, with the first that any of its rows sees."""
        self._origin = self._base[:-1] - lowest_seen
        """Where block 0 of each would be."""
        self._span = np.repeat(np.arange(len(spans), dtype=np.int32), np.diff(self._base))
        index = np.arange(self._base[-1], dtype=np.int32) - self._origin[self._span]
        table = packed.table_start[spans][self._span] + index
        self.holder, self.block = homes.locate(packed.blocks[table])
        # From here on only blocks in which rows of the step stand.
        lowest = (first // block_tokens)[self._span]
        self._tail = np.flatnonzero(index >= lowest)
        self._is_first = (index == lowest)[self._tail]
        span, border = self._span[self._tail], index[self._tail] * block_tokens
        self._position = np.maximum(first[span], border)
        self._end = np.minimum(end[span], border + block_tokens)
        count = self._end - self._position
        within = _counted(count)
        self.rows = np.repeat(packed.first_row[spans][span] + self._position - first[span], count) + within
        """Packed rows of all these spans, ascending."""
        slot = self.block[self._tail].astype(np.int64) * block_tokens + self._position % block_tokens
        self._slot = np.repeat(slot, count) + within
        self._kept_by = np.repeat(self.holder[self._tail], count)

    def pieces(self, holder: int) -> _Pieces:
        """Of all rows, also of those that see nothing there."""
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
        span = np.repeat(np.arange(len(self.spans), dtype=np.int32), self._count)
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
        """One for each creditor that holds any of the blocks."""
        creditors = 1 + np.flatnonzero(np.bincount(self.holder)[OWN + 1 :])
        return [self.part(holder) for holder in creditors.tolist()]

    def blocks(self, holder: int) -> npt.NDArray[np.int32]:
        """The tables there, one after the other."""
        found: npt.NDArray[np.int32] = self.block[self.holder == holder]
        return found

    def slots(self, holder: int) -> npt.NDArray[np.int64]:
        """Of `rows`."""
        return np.where(self._kept_by == holder, self._slot, ELSEWHERE)

    def part(self, holder: int) -> Part:
        """A creditor's: rows that see nothing there are left out."""
        pieces = self.pieces(holder)
        is_seen = pieces.key_end > 0
        is_sent = np.repeat(is_seen, pieces.count)
        spans = PackedSpans(
            first_row=starts(pieces.count[is_seen]),
            first_position=pieces.seen[is_seen],
            table_start=pieces.table_start[is_seen],
            table_position=np.zeros(np.count_nonzero(is_seen), dtype=np.int32),
            key_end=pieces.key_end[is_seen],
            blocks=self.blocks(holder),
            slots=self.slots(holder)[is_sent],
            window_tokens=self.window_tokens,
        )
        return Part(holder, self.rows[is_sent].astype(np.int64), spans)


def _with_pieces(
    packed: PackedSpans, divided: _Divided, blocks: npt.NDArray[np.int32], first: int
) -> PackedSpans:
    """The own part's: divided spans' pieces in their places, and their tables from `first` on in `blocks`."""
    pieces = divided.pieces(OWN)
    many = np.ones(len(packed.first_position), dtype=np.int64)
    many[divided.spans] = np.bincount(pieces.span)
    of = np.repeat(np.arange(len(many)), many)
    undivided_before = divided.spans - np.arange(len(divided.spans))
    at = np.arange(len(pieces.span)) + undivided_before[pieces.span]
    count, first_position = np.diff(packed.first_row)[of], packed.first_position[of]
    table_start, key_end, slots = packed.table_start[of], packed.key_end[of], packed.slots.copy()
    count[at], first_position[at], key_end[at] = pieces.count, pieces.seen, pieces.key_end
    table_start[at] = first + pieces.table_start
    slots[divided.rows] = divided.slots(OWN)
    return PackedSpans(
        first_row=starts(count),
        first_position=first_position,
        table_start=table_start,
        table_position=np.zeros_like(first_position),
        key_end=key_end,
        blocks=blocks,
        slots=slots,
        window_tokens=divided.window_tokens,
    )


def _counted(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """0, 1, … `count` - 1 for each of them, one after the other."""
    before = starts(counts)
    return np.arange(before[-1], dtype=np.int32) - np.repeat(before[:-1], counts)
