"""Rooms of the simulated workers, as placement sees them: all of a small fleet, shortlists of a large one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from services.placement.core.prefix_index import NOTHING, CachedTokens
from services.placement.core.room_table import MANY_WORKERS, RoomRow, RoomTable, Shortlists
from services.placement.core.speeds import PromptSpeeds, plain_tokens
from services.placement.policy.contract import RankingPolicy, Room, is_ranking
from shared.messages.commands import PlacementItem, WaitingAhead
from shared.messages.sequence import SequenceKey
from sim.books import spoken_for_blocks, uncomputed
from sim.events import EventQueue
from sim.handover import HandoverTransfers
from sim.prefixes import SimPrefixes
from sim.requests import ServedRecord
from sim.setup import Setup
from sim.worker import SimWorker

_NO_LIMIT = 1 << 62
_Load = tuple[int, list[tuple[int, int]]]
"""A worker's free tokens, and its ranges of prompt tokens to compute (`uncomputed`)."""


class SimRooms:
    """The rooms of one simulation. Call `note_change` after each event of a worker."""

    def __init__(
        self,
        setup: Setup,
        names: Sequence[str],
        workers: Sequence[SimWorker],
        records: Mapping[SequenceKey, ServedRecord],
        prefixes: SimPrefixes | None,
        transfers: HandoverTransfers,
        events: EventQueue[Any],
    ) -> None:
        self._setup, self._names, self._workers, self._records = setup, names, workers, records
        self._prefixes, self._transfers, self._events = prefixes, transfers, events
        self._speeds = PromptSpeeds()
        self._table = RoomTable()
        self._changed = dict.fromkeys(range(len(workers)))
        """Workers whose rows in `_table` are not up to date."""
        self._loads: dict[str, _Load] = {}
        """The load of each row."""

    def note_change(self, index: int) -> None:
        """Note that a worker's sequences or memory changed."""
        self._changed[index] = None

    def cached(self, item: PlacementItem, worker_id: str) -> CachedTokens:
        """Return the tokens of a prompt that placement expects in a worker's cache."""
        names = self._records[item.ref.key].request.names
        if self._prefixes is None or not names:
            return NOTHING
        return self._prefixes.expected(worker_id, names, self._events.now_s)

    def of(self, ahead: WaitingAhead, requests: int) -> list[Room] | Shortlists:
        """Return the rooms for so many requests."""
        crowds = {crowd.worker_id: crowd.places for crowd in ahead.crowds}
        roles = self._setup.roles
        if roles is None and len(self._workers) > MANY_WORKERS and is_ranking(self._setup.router):
            return self._shortlists(ahead, crowds, requests, self._setup.router)
        names = [name for name in ahead.only or self._names if name not in ahead.closed]
        names = [name for name in names if roles is None or roles.role_of(name).may_prefill]
        return [self._room(name, crowds.get(name, ahead.places), self._load(int(name))) for name in names]

    def _shortlists(
        self, ahead: WaitingAhead, crowds: dict[str, int], requests: int, router: RankingPolicy
    ) -> Shortlists:
        for index in self._changed:
            self._table.put(self._names[index], self._row(index))
        self._changed.clear()
        places = np.full(len(self._workers), ahead.places)
        for name, most in crowds.items():
            places[self._table.row_of[name]] = most
        return Shortlists(
            self._table,
            self._table.columns(self._speeds.preceding_token_s),
            router,
            lambda name: self._room(name, crowds.get(name, ahead.places), self._loads[name]),
            self._holders,
            requests=requests,
            places=places,
            excluded=ahead.closed,
            only=ahead.only,
        )

    def _row(self, index: int) -> RoomRow:
        meter, shape, name = self._workers[index].meter, self._setup.shape, self._names[index]
        self._speeds.on_measured(name, meter.prefill_tokens_per_s, meter.prefill_context_tokens)
        free_tokens, parts = self._loads[name] = self._load(index)
        return RoomRow(
            free=free_tokens,
            total=shape.capacity_blocks * shape.block_tokens,
            sequences=len(self._workers[index].books.held),
            pending=sum([end - first for first, end in parts]),
            pending_squares=sum([(end - first) * (first + end) / 2 for first, end in parts]),
            reported_s=0.0,
            fit=self._speeds.sums(name),
            assumed_tokens_per_s=0.0,
            decode_step_s=meter.decode_step_s,
            most=_NO_LIMIT,
            block=shape.block_tokens,
        )

    def _holders(self, item: PlacementItem) -> Iterable[str]:
        """Return the workers that may have a part of the prompt cached."""
        names = self._records[item.ref.key].request.names
        return () if self._prefixes is None or not names else self._prefixes.holders(names)

    def _load(self, index: int) -> _Load:
        return self.free_blocks(index) * self._setup.shape.block_tokens, uncomputed(
            self._workers[index].books
        )

    def _room(self, name: str, places: int, load: _Load) -> Room:
        worker, shape = self._workers[int(name)], self._setup.shape
        meter, speeds, (free_tokens, parts) = worker.meter, self._speeds, load
        speeds.on_measured(name, meter.prefill_tokens_per_s, meter.prefill_context_tokens)
        rate = speeds.alone(name)
        share = speeds.preceding_token_s * rate
        return Room(
            worker_id=name,
            free_tokens=free_tokens,
            total_tokens=shape.capacity_blocks * shape.block_tokens,
            sequences=len(worker.books.held),
            pending_tokens=sum([plain_tokens(first, end, share) for first, end in parts], 0.0),
            prefill_tokens_per_s=rate,
            decode_step_s=worker.meter.decode_step_s,
            preceding_share=share,
            block_tokens=shape.block_tokens,
            places=places,
        )

    def free_blocks(self, index: int) -> int:
        """Return the blocks of a worker that are neither needed there nor promised to a transfer."""
        size, worker = self._setup.shape.block_tokens, self._workers[index]
        spoken_for = spoken_for_blocks(worker.books, size) + self._transfers.promised_blocks(index, size)
        return self._setup.shape.capacity_blocks - spoken_for
