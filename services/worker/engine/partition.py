"""Attention in parts: a step cut by who holds its blocks, attended to where the keys are, and joined again.

`Homes` knows which block ids are the engine's own and which another worker holds, `split` cuts a step into
one `Part` for each holder, `RemoteAttention` attends to the others' parts, and `merge_into` joins what comes
back with the engine's own:

    a row sees blocks 0 1 2 3; 0 and 3 are our own, worker 1 holds 1 and 2 (as its blocks 7 and 8)
    split → [Part(OWN, blocks 0 3), Part(1, blocks 7 8)]; each yields (output, log-sum-exp) for that row
    joined: outputs weighed by exp(log-sum-exp), exact within rounding, whatever the order of the parts

A part's result is its normalised output and its log-sum-exp, which is m + ln l of the paper's running maximum
and sum. Source: Infinite-LLM §4.2 (papers/001), with the values and the scale 1/√d that its equations leave
out. Knows no connection and no sequence.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine import paged
from services.worker.engine.layout import PackedSpans, Span
from services.worker.engine.native.library import declare
from services.worker.engine.paged import Shape
from shared.average import averaged
from shared.clock import Clock, monotonic_s

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

    def are_own(self, blocks: npt.NDArray[np.int32]) -> bool:
        """Whether all of them are in the engine's own pools."""
        return not blocks.size or int(blocks.max()) < self.own_blocks

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


Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows, int64 `[n]`; output `[n, q_heads, value_dim]` and log-sum-exp `[n, q_heads]`, fp32."""


class RemoteAttention(Protocol):
    """The creditors' share of a step, layer by layer. Each call may raise `CreditorLost`."""

    def begin(self, parts: Sequence[Part]) -> None:
        """A step of these parts follows."""
        ...

    def send(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape
    ) -> None:
        """`[rows, heads, dim]` of all packed rows of the step: each creditor gets what it needs."""
        ...

    def collect(self, layer: int) -> Iterator[Partial]:
        """What the creditors found. While they work on it, the caller has attended to its own part."""
        ...

    def end(self) -> None:
        """Every layer is through: return when all K and V are where they belong."""
        ...

    def abandon(self) -> None:
        """The step failed and is not gone on with: nothing of it may be under way when the next begins."""
        ...


WEIGHT = 0.1
"""Of the newest step."""


class MeteredRemote:
    """`RemoteAttention` over another one. `block_s`: see there; read from whatever thread."""

    def __init__(self, remote: RemoteAttention, clock: Clock = monotonic_s) -> None:
        self.block_s = 0.0
        """A decode step takes so much longer for each block in use that lies elsewhere. Smoothed; 0 before
        the first."""
        self._remote = remote
        self._clock = clock
        self._blocks = 0
        self._spent_s = 0.0

    def begin(self, parts: Sequence[Part]) -> None:
        """See `RemoteAttention`."""
        began_s = self._clock()
        is_decoding = all(len(part.rows) == len(part.spans.first_row) - 1 for part in parts)
        self._blocks = sum(len(part.spans.blocks) for part in parts) if is_decoding else 0
        self._remote.begin(parts)
        self._spent_s = self._clock() - began_s

    def send(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape
    ) -> None:
        """See `RemoteAttention`."""
        began_s = self._clock()
        self._remote.send(layer, queries, keys, values, shape)
        self._spent_s += self._clock() - began_s

    def collect(self, layer: int) -> Iterator[Partial]:
        """See `RemoteAttention`. What the caller does with a part is its own time."""
        parts = self._remote.collect(layer)
        while True:
            began_s = self._clock()
            part = next(parts, None)
            self._spent_s += self._clock() - began_s
            if part is None:
                return
            yield part

    def end(self) -> None:
        """See `RemoteAttention`. A step that failed before is not counted."""
        began_s = self._clock()
        self._remote.end()
        self._spent_s += self._clock() - began_s
        if self._blocks:
            measured_s = self._spent_s / self._blocks
            self.block_s = averaged(self.block_s or None, measured_s, WEIGHT)

    def abandon(self) -> None:
        """See `RemoteAttention`."""
        self._remote.abandon()


_POINTER, _INT32 = ctypes.c_void_p, ctypes.c_int32
_PROTOTYPES = {
    "kv_merge": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT32, _INT32, _INT32)),
}


def merge_partials(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join parts that all have the same rows, at least one part.

    `outputs` each `[…, value_dim]`, `lses` each `[…]` fp32 (−inf: the part saw no key) → both fp32.
    """
    return paged.merge(torch.stack(list(outputs)), torch.stack(list(lses)))


def merge_into(
    output: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    rows: torch.Tensor,
    library: ctypes.CDLL | None = None,
) -> None:
    """Join a part that only some rows have, in place; in C++ where there is a library.

    `output` `[rows, heads, value_dim]`, `lse` `[rows, heads]`; `part` `[n, heads, value_dim]`, `part_lse`
    `[n, heads]` of the rows named by `rows`, int64 `[n]`, each once. All fp32.
    """
    if library is not None and output.is_contiguous() and part.is_contiguous() and part_lse.is_contiguous():
        declare(library, _PROTOTYPES)
        count, heads, value_dim = part.shape
        library.kv_merge(
            output.data_ptr(),
            lse.data_ptr(),
            part.data_ptr(),
            part_lse.data_ptr(),
            rows.data_ptr(),
            count,
            heads,
            value_dim,
        )
        return
    joined, joined_lse = merge_partials((output[rows], part), (lse[rows], part_lse))
    output[rows], lse[rows] = joined, joined_lse
