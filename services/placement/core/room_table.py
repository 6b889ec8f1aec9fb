"""Rooms of a large fleet as columns, to find the few rooms that a policy would choose from. Pure.

Rows change with events, and a question costs some array operations instead of a loop over all workers. The
policy then chooses from real `Room`s, as in a small fleet.
"""

from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.placement.core.speeds import LEAST_ALONE
from services.placement.policy.contract import Column, CostedPolicy, RankedPolicy, Room, RoomColumns
from shared.messages.commands import PlacementItem

MANY_WORKERS = 16
"""Number of workers up to which every room is compared."""
GROWTH_BLOCKS = 1
"""Blocks kept free for a sequence's growth beside others, so that its next decode step preempts none."""
_SPARE = 8
"""Number of rooms in a shortlist beyond one per request of the question."""


class Row(NamedTuple):
    """One worker. Amounts in tokens, times in seconds."""

    free: float
    total: float
    sequences: float
    pending: float
    """Prompt tokens of residents that are not computed."""
    pending_squares: float
    """The same, each times its mean number of preceding tokens."""
    reported_s: float
    fit: tuple[float, float, float]
    """Sums of measured prefill speeds (`PromptSpeeds.sums`)."""
    assumed_tokens_per_s: float
    """Prefill speed without measurements."""
    decode_step_s: float
    most: float
    block: float


class RoomTable:
    """The rows of all workers."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.row_of: dict[str, int] = {}
        self._columns = np.zeros((len(Row._fields) + 2, 64))

    def put(self, name: str, row: Row) -> None:
        """Add or replace a worker's row."""
        at = self.row_of.setdefault(name, len(self.names))
        if at == len(self.names):
            self.names.append(name)
            if at == self._columns.shape[1]:
                self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._columns[:, at] = (*row[:6], *row.fit, *row[7:])

    def remove(self, name: str) -> None:
        """Remove a worker, if it has a row. The last row takes its place."""
        at = self.row_of.pop(name, None)
        if at is not None:
            last = self.names.pop()
            if last != name:
                self.names[at], self.row_of[last] = last, at
                self._columns[:, at] = self._columns[:, len(self.names)]

    def columns(self, preceding_token_s: float, now_s: float | None = None) -> RoomColumns:
        """Return copies of the columns. With `now_s`, prompt tokens count as computed since the report."""
        free, total, sequences, pending, squares, reported_s, n, x, y, assumed, step_s, most, block = (
            self._columns[:, : len(self.names)].copy()
        )
        rate = np.divide(n, np.maximum(LEAST_ALONE * y, y - preceding_token_s * x), where=n > 0, out=n)
        share = preceding_token_s * rate
        pending += share * squares
        if now_s is not None:
            pending -= np.where(rate > 0, rate, assumed) * (now_s - reported_s)
        pending = np.maximum(0.0, pending)
        return RoomColumns(free, total, sequences, pending, rate, step_s, share, most, block)


class Shortlists:
    """The rooms of one question: for each request, those among which the policy's choice is.

    Each request of the question fills one room at most, so the best of the others is in a list that is longer
    than the number of requests. Workers that may have a part of the prompt cached are always in it.
    """

    def __init__(
        self,
        table: RoomTable,
        columns: RoomColumns,
        policy: RankedPolicy,
        room: Callable[[str], Room],
        holders: Callable[[PlacementItem], Iterable[str]],
        *,
        requests: int,
        places: npt.NDArray[np.int64],
        excluded: Container[str] = (),
        only: Container[str] = (),
    ) -> None:
        """`places`: number of sequences that may wait, by row. `only`: some workers; empty for all."""
        self._table, self._columns, self._policy, self._room = table, columns, policy, room
        self._holders, self._count, self._places = holders, requests + _SPARE, places
        self._is_open = np.ones(len(table.names), dtype=bool)
        if excluded or only:
            are_open = (name not in excluded and (not only or name in only) for name in table.names)
            self._is_open = np.fromiter(are_open, dtype=bool, count=len(table.names))

    def admits(self, limit_tokens: int) -> bool:
        """Return whether a worker could hold so many tokens."""
        return bool(np.any(self._is_open & (limit_tokens <= self._columns.most_tokens)))

    def of(self, item: PlacementItem) -> list[Room]:
        """Return the rooms to choose from."""
        rooms, size = self._columns, item.size_tokens
        is_open = self._is_open & (item.limit_tokens <= rooms.most_tokens)
        needed = (-(-size // rooms.block_tokens) + GROWTH_BLOCKS) * rooms.block_tokens
        has_room = (rooms.sequences == 0) | (needed <= rooms.free_tokens)
        ranks = self._policy.ranks(size, rooms)
        able = np.flatnonzero(is_open & has_room)
        found = self._first(able, ranks)
        if len(able):  # by these two, policies judge workers without measurements
            found |= {int(able[rooms.prefill_tokens_per_s[able].argmax()])}
            found |= {
                int(able[np.where(rooms.decode_step_s > 0, rooms.decode_step_s, np.inf)[able].argmin()])
            }
        if len(able) < self._count:
            if not isinstance(self._policy, CostedPolicy):
                ranks = -(self._places * 2.0**40 + rooms.free_tokens)
            found |= self._first(np.flatnonzero(is_open & (self._places > 0)), ranks)
        at = (self._table.row_of.get(name, -1) for name in self._holders(item))
        found |= {row for row in at if row >= 0 and is_open[row]}
        return [self._room(name) for name in sorted(self._table.names[row] for row in found)]

    def _first(self, rows: npt.NDArray[np.intp], ranks: Column) -> set[int]:
        """Return the rows of the lowest ranks."""
        return set(rows[np.argsort(ranks[rows], kind="stable")[: self._count]].tolist())
