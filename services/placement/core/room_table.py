"""Rooms of a large fleet as columns, to find the few rooms that a policy would choose from. Pure.

Rows change with events, and a question costs some array operations instead of a loop over all workers. The
policy then chooses from real `Room`s, as in a small fleet.
"""

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.placement.core.speeds import LEAST_ALONE
from services.placement.policy.contract import Column, RankingPolicy, Room, RoomColumns, is_costed
from shared.messages.commands import PlacementItem

MANY_WORKERS = 16
"""Number of workers up to which every room is compared."""
GROWTH_BLOCKS = 1
"""Blocks kept free for a sequence's growth beside others, so that its next decode step preempts none."""
_SPARE = 4
"""Number of rooms in a shortlist beyond one per request of the question."""


class RoomRow(NamedTuple):
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
        self._columns = np.zeros((len(RoomRow._fields) + 2, 64))

    def put(self, name: str, row: RoomRow) -> None:
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

    def rows(self, names: Iterable[str]) -> list[int]:
        """Return the rows of the names that have one."""
        return [self.row_of[name] for name in names if name in self.row_of]

    def columns(self, preceding_token_s: float, now_s: float | None = None) -> RoomColumns:
        """Return the columns; only `free_tokens` and `pending_tokens` may be changed. With `now_s`, prompt
        tokens count as computed since the report."""
        free, total, sequences, pending, squares, reported_s, n, x, y, assumed, step_s, most, block = (
            self._columns[:, : len(self.names)]
        )
        each_s = np.maximum(LEAST_ALONE * y, y - preceding_token_s * x)
        rate = np.divide(n, each_s, where=n > 0, out=np.zeros(len(n)))
        share = preceding_token_s * rate
        pending = pending + share * squares
        if now_s is not None:
            pending -= np.where(rate > 0, rate, assumed) * (now_s - reported_s)
        pending = np.maximum(0.0, pending)
        return RoomColumns(free.copy(), total, sequences, pending, rate, step_s, share, most, block)


class Shortlists:
    """The rooms of one question: for each request, those among which the policy's choice is.

    Each request of the question fills one room at most, so the best of the others is in a list that is longer
    than the number of requests. Rooms that got one are in it, and workers that may have a part of the prompt
    cached. Beside full rooms, workers without measurements may be judged by others than in a small fleet.
    """

    def __init__(
        self,
        table: RoomTable,
        columns: RoomColumns,
        policy: RankingPolicy,
        room: Callable[[str], Room],
        holders: Callable[[PlacementItem], Iterable[str]],
        *,
        requests: int,
        places: npt.NDArray[np.int64],
        excluded: Collection[str] = (),
        only: Collection[str] = (),
    ) -> None:
        """`places`: number of sequences that may wait, by row. `only`: some workers; empty for all."""
        self._table, self._columns, self._policy, self._room = table, columns, policy, room
        self._holders, self._count, self._places = holders, requests + _SPARE, places
        self._listed: dict[int, Room] = {}
        """Rooms in earlier lists; some of them got a request."""
        self._is_open = np.full(len(table.names), not only)
        self._is_open[table.rows(only)] = True
        self._is_open[table.rows(excluded)] = False

    def admits(self, limit_tokens: int) -> bool:
        """Return whether a worker could hold so many tokens."""
        return bool(np.any(self._is_open & (limit_tokens <= self._columns.most_tokens)))

    def of(self, item: PlacementItem) -> list[Room]:
        """Return the rooms to choose from."""
        rooms, size = self._columns, item.size_tokens
        is_open = self._is_open & (item.limit_tokens <= rooms.most_tokens)
        needed = (-(-size // rooms.block_tokens) + GROWTH_BLOCKS) * rooms.block_tokens
        has_room = (rooms.sequences == 0) | (needed <= rooms.free_tokens)
        able = np.flatnonzero(is_open & has_room)
        found = self._first(able, size)
        if len(able) < self._count:
            may_wait = np.flatnonzero(is_open & (self._places > 0))
            if is_costed(self._policy):
                found |= self._first(may_wait, size)
            else:
                ranks = -(self._places * 2.0**40 + rooms.free_tokens)
                found |= self._lowest(may_wait, ranks[may_wait])
        found |= {row for row in self._table.rows(self._holders(item)) if is_open[row]}
        found |= {row for row, room in self._listed.items() if room.sequences > rooms.sequences[row]}
        listed = sorted((self._table.names[row], row) for row in found)
        self._listed |= {row: self._room(name) for name, row in listed if row not in self._listed}
        return [self._listed[row] for _, row in listed]

    def _first(self, rows: npt.NDArray[np.intp], size_tokens: int) -> set[int]:
        """Return the rows that the policy prefers, the fastest, and the one of the shortest decode step:
        workers without measurements are judged by these."""
        if not len(rows):
            return set()
        rooms = self._columns
        if len(rows) < len(self._table.names):
            rooms = RoomColumns(*(column[rows] for column in rooms))
        steps_s = np.where(rooms.decode_step_s > 0, rooms.decode_step_s, np.inf)
        extremes = {int(rows[rooms.prefill_tokens_per_s.argmax()]), int(rows[steps_s.argmin()])}
        return extremes | self._lowest(rows, self._policy.ranks(size_tokens, rooms))

    def _lowest(self, rows: npt.NDArray[np.intp], ranks: Column) -> set[int]:
        """Return the rows of the lowest ranks; of equal ones, the first."""
        if len(rows) > self._count:
            are_low = ranks <= np.partition(ranks, self._count - 1)[self._count - 1]
            rows, ranks = rows[are_low], ranks[are_low]
            if len(rows) > self._count:
                rows = rows[np.argsort(ranks, kind="stable")[: self._count]]
        return set(rows.tolist())
