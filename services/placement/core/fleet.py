"""Tracks the free memory of each worker since its last heartbeat. `core/seats.py` seats sequences there.

State is soft: one round of heartbeats rebuilds it. A reservation ends when a heartbeat lists its sequence, a
step report ends it, the scheduler withdraws it, or `reservation_s` passes. Pure; `now_s` is passed in.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np

from services.placement.core.orders import ORDERS, PlacementRank, arrange, distance
from services.placement.core.prefix_index import CachedTokens, PrefixIndex
from services.placement.core.room_table import MANY_WORKERS, RoomRow, RoomTable, Shortlists
from services.placement.core.seats import SeatChoice, fits, seat
from services.placement.core.speeds import PromptSpeeds, plain_tokens
from services.placement.policy.contract import CostedPolicy, PlacementPolicy, RankingPolicy, Room, is_ranking
from shared.liveness import Liveness
from shared.messages.commands import NOBODY_AHEAD, Crowd, PlacementItem, WaitingAhead
from shared.messages.plans import WorkerStepped
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported
from shared.messages.sequence import SequenceKey, SequenceRef


@dataclass(frozen=True)
class Reservation:
    """Blocks reserved for a sequence until a heartbeat lists it."""

    attempt: int
    blocks: int
    placed_s: float
    pending_tokens: float = 0.0
    """Prompt tokens not expected to be cached, as plain tokens (`core/speeds.py`)."""
    expected_tokens: int = 0
    tokens: int = 0
    """Tokens of prompt and answer so far."""


@dataclass(frozen=True)
class Resident:
    """A live sequence of a heartbeat: its allocated blocks, and the blocks that its tokens need."""

    attempt: int
    allocated_blocks: int
    needed_blocks: int
    tokens: int
    """Tokens of prompt and answer so far."""
    pending_tokens: int
    """Tokens of these not computed yet; 0 while it decodes."""
    expected_tokens: int
    """Prompt tokens expected to be cached, until it starts."""
    is_read: bool
    """Whether a gateway waits for it; else it is a rehearsal of a move."""
    decodes: bool

    @property
    def first_pending(self) -> int:
        """First token that is neither computed nor expected in the cache."""
        return max(self.tokens - self.pending_tokens, min(self.expected_tokens, self.tokens - 1))


@dataclass
class WorkerRoom:
    """One worker: its last heartbeat, in its own blocks, and what changed since."""

    report: WorkerReported
    reported_s: float
    residents: dict[SequenceKey, Resident]
    reservations: dict[SequenceKey, Reservation]
    plannable_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.plannable_blocks = self.report.capacity.plannable_blocks

    def pending_tokens(self, now_s: float, preceding_share: float = 0.0, rate: float = 0.0) -> int:
        """Return prompt tokens, resident or reserved, that are probably not computed by now, in plain tokens.
        `rate`: prefill tokens per second; 0: the measured rate."""
        rate = rate or self.report.prefill_tokens_per_s or _PREFILL_TOKENS_PER_S
        pending = 0.0
        for one in self.residents.values():
            if one.pending_tokens:
                pending += plain_tokens(one.first_pending, one.tokens, preceding_share)
        pending = max(0.0, pending - rate * (now_s - self.reported_s))
        for promised in self.reservations.values():
            pending += max(0.0, promised.pending_tokens - rate * (now_s - promised.placed_s))
        return int(pending)

    @property
    def free_blocks(self) -> int:
        """Plannable blocks less reservations and the blocks residents lack; negative if memory is short."""
        owed = sum(max(0, r.needed_blocks - r.allocated_blocks) for r in self.residents.values())
        return self.plannable_blocks - owed - sum(r.blocks for r in self.reservations.values())

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.report.block_tokens)

    def row(self, speed_sums: tuple[float, float, float]) -> RoomRow:
        """Return the row in a table of rooms, without the prompt tokens of reservations."""
        report, size = self.report, self.report.block_tokens
        pending = squares = 0.0
        for one in self.residents.values():
            if one.pending_tokens:
                first = one.first_pending
                pending += one.tokens - first
                squares += (one.tokens - first) * (first + one.tokens) / 2
        return RoomRow(
            free=self.free_blocks * size,
            total=report.capacity.total_blocks * size,
            sequences=len(self.residents) + len(self.reservations),
            pending=pending,
            pending_squares=squares,
            reported_s=self.reported_s,
            fit=speed_sums,
            assumed_tokens_per_s=report.prefill_tokens_per_s or _PREFILL_TOKENS_PER_S,
            decode_step_s=report.decode_step_s,
            most=report.max_context_tokens,
            block=size,
        )


_PREFILL_TOKENS_PER_S = 4000.0
"""Assumed prefill speed of a worker without measurement."""


class FleetCapacity:
    """The workers heard within `silence_s`, with their room; places items on them."""

    def __init__(
        self, *, silence_s: float = 2.0, reservation_s: float = 5.0, order: PlacementRank = ORDERS["policy"]
    ) -> None:
        self.workers: dict[str, WorkerRoom] = {}
        self.prefixes = PrefixIndex(expect_s=reservation_s)
        self.liveness = Liveness(silence_s)
        self.choices: list[SeatChoice] = []
        """Choices of the last `place`."""
        self._reservation_s = reservation_s
        self._rank = order
        self._speeds = PromptSpeeds()
        self._reserved: dict[SequenceKey, str] = {}
        """Worker of each reservation, oldest first."""
        self._table = RoomTable()
        self._changed: dict[str, None] = {}
        """Workers whose rows in `_table` are not up to date."""

    def on_reported(self, report: WorkerReported, now_s: float) -> None:
        """Apply a heartbeat. An older one is ignored; a new incarnation starts without reservations."""
        if not self.liveness.hear(report.worker_id, report.incarnation, now_s):
            return
        known = self.workers.get(report.worker_id)
        reservations: dict[SequenceKey, Reservation] = {}
        expected: dict[SequenceKey, int] = {}
        if known is not None and report.incarnation != known.report.incarnation:
            for key in list(known.reservations):
                self._release(key)
        elif known is not None:
            if report.seq <= known.report.seq:
                return
            reservations = known.reservations
            expected = {key: one.expected_tokens for key, one in known.residents.items()}
        self._speeds.on_measured(report.worker_id, report.prefill_tokens_per_s, report.prefill_context_tokens)
        if report.caches_prefixes:
            self.prefixes.on_worker(report.worker_id, report.incarnation)
        residents: dict[SequenceKey, Resident] = {}
        for sequence in report.sequences:
            key = sequence.ref.key
            reserved = reservations.get(key)
            if reserved is not None and reserved.attempt <= sequence.ref.attempt:
                expected[key] = reserved.expected_tokens
                self._release(key)
            if sequence.state is not SequenceState.ENDED:
                residents[key] = _resident(sequence, report.block_tokens, expected.get(key, 0))
        self.workers[report.worker_id] = WorkerRoom(report, now_s, residents, reservations)
        self._changed[report.worker_id] = None

    def reserve(self, worker_id: str, key: SequenceKey, reservation: Reservation) -> None:
        """Reserve blocks at a worker for a sequence; an earlier reservation of it ends."""
        self._release(key)
        self.workers[worker_id].reservations[key] = reservation
        self._reserved[key] = worker_id
        self._changed[worker_id] = None

    def _release(self, key: SequenceKey) -> None:
        worker_id = self._reserved.pop(key, None)
        if worker_id is not None:
            del self.workers[worker_id].reservations[key]
            self._changed[worker_id] = None

    def on_stepped(self, stepped: WorkerStepped) -> None:
        """Free the blocks of ended sequences before the next heartbeat."""
        worker = self.workers.get(stepped.worker_id)
        if worker is None or stepped.incarnation != worker.report.incarnation:
            return
        for end in stepped.ended:
            key, attempt = end.ref.key, end.ref.attempt
            reserved = worker.reservations.get(key)
            if reserved is not None and reserved.attempt <= attempt:
                self._release(key)
            resident = worker.residents.get(key)
            if (
                stepped.seq > worker.report.stepped_seq
                and resident is not None
                and resident.attempt <= attempt
            ):
                del worker.residents[key]
                self._changed[stepped.worker_id] = None
                # Shared prefix blocks count in every sequence that has them.
                free = worker.plannable_blocks + resident.allocated_blocks
                worker.plannable_blocks = min(free, worker.report.capacity.total_blocks)

    def on_withdrawn(self, refs: Iterable[SequenceRef]) -> None:
        """Release reservations of withdrawn sequences, for these attempts and lower ones."""
        for ref in refs:
            home = self._reserved.get(ref.key)
            if home is not None and self.workers[home].reservations[ref.key].attempt <= ref.attempt:
                self._release(ref.key)

    def on_tick(self, now_s: float) -> list[str]:
        """Drop silent workers and expired reservations; return the ids of the dropped workers."""
        silent = self.liveness.silent(now_s)
        for worker_id in silent:
            self._drop(worker_id)
        self.prefixes.on_tick(now_s)
        while self._reserved:
            key, home = next(iter(self._reserved.items()))
            if now_s - self.workers[home].reservations[key].placed_s <= self._reservation_s:
                break
            self._release(key)
        return silent

    def on_gone(self, worker_id: str, incarnation: int) -> bool:
        """Drop a worker whose incarnation left the bus. Return whether it was known."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.report.incarnation != incarnation:
            return False
        self.liveness.forget(worker_id)
        self._drop(worker_id)
        return True

    def _drop(self, worker_id: str) -> None:
        for key in list(self.workers[worker_id].reservations):
            self._release(key)
        del self.workers[worker_id]
        self._changed[worker_id] = None
        self.prefixes.forget(worker_id)
        self._speeds.forget(worker_id)

    def place(
        self,
        items: tuple[PlacementItem, ...],
        excluded: frozenset[str],
        policy: PlacementPolicy,
        now_s: float,
        ahead: WaitingAhead = NOBODY_AHEAD,
    ) -> tuple[str | None, ...]:
        """Return a worker per item, or None: wait (`seat`). Items are taken by `order`, and earlier
        reservations of them end. `ahead` allows items to wait at workers without memory for them."""
        self.on_tick(now_s)
        for item in items:
            self._release(item.ref.key)
        closed = excluded.union(ahead.closed)
        rooms: Sequence[Room] | Shortlists
        order: Sequence[int] = range(len(items))
        if self._rank is not ORDERS["policy"]:
            rooms = self._rooms(closed, ahead, now_s)
            order = self._arranged(items, rooms, now_s)
        elif len(self.workers) > MANY_WORKERS and is_ranking(policy):
            rooms = self._shortlists(len(items), closed, policy, ahead, now_s)
        else:
            rooms = self._rooms(closed, ahead, now_s)
        cached = partial(self._cached, now_s)
        answers: list[str | None] = [None] * len(items)
        self.choices = []
        for at, choice in zip(order, seat([items[at] for at in order], rooms, policy, cached), strict=True):
            if choice is not None:
                answers[at] = choice.worker_id
                self.choices.append(choice)
                self.promise(choice, now_s)
        return tuple(answers)

    def offer(
        self, item: PlacementItem, excluded: frozenset[str], policy: CostedPolicy, now_s: float
    ) -> SeatChoice | None:
        """Return the cheapest worker with room now of those that have some of the item's prefix cached."""
        holders = WaitingAhead(only=tuple(self.prefixes.holders(item.prefixes)))
        rooms = self._rooms(excluded, holders, now_s) if holders.only else []
        rooms = [room for room in rooms if fits(room, item)]
        for room in rooms:
            room.cached_tokens = self._cached(now_s, item, room.worker_id)
        if not any(sum(room.cached_tokens) for room in rooms):
            return None
        costs_s = policy.costs_s(item.size_tokens, rooms)
        cost_s, at = min((cost_s, at) for at, cost_s in enumerate(costs_s))
        chosen = rooms[at]
        expected = sum(chosen.cached_tokens)
        pending = plain_tokens(min(expected, item.size_tokens), item.size_tokens, chosen.preceding_share)
        return SeatChoice(item, chosen.worker_id, expected, pending, ((chosen.worker_id, cost_s),))

    def promise(self, choice: SeatChoice, now_s: float) -> None:
        """Keep the worker's blocks until it has the sequence."""
        item, worker = choice.item, self.workers[choice.worker_id]
        reservation = Reservation(
            item.ref.attempt,
            worker.blocks(item.size_tokens),
            now_s,
            choice.pending_tokens,
            choice.expected_tokens,
            item.size_tokens,
        )
        self.reserve(choice.worker_id, item.ref.key, reservation)
        if item.prefixes:
            self.prefixes.expect(choice.worker_id, item.prefixes, now_s)

    def _cached(self, now_s: float, item: PlacementItem, worker_id: str) -> CachedTokens:
        return self.prefixes.cached(worker_id, item.prefixes, now_s)

    def _arranged(
        self, items: tuple[PlacementItem, ...], rooms: Sequence[Room], now_s: float
    ) -> Sequence[int]:
        offers = [[self._cached(now_s, item, room.worker_id) for room in rooms] for item in items]
        distances = [distance(item, each) for item, each in zip(items, offers, strict=True)]
        return arrange(items, distances, self._rank)

    def _rooms(self, excluded: frozenset[str], ahead: WaitingAhead, now_s: float) -> list[Room]:
        """Return the room of each worker that may be chosen."""
        crowds = {crowd.worker_id: crowd for crowd in ahead.crowds}
        names = dict.fromkeys(ahead.only) or self.workers
        return [
            self._room(name, crowds.get(name), ahead.places, now_s)
            for name in names
            if name in self.workers and name not in excluded
        ]

    def _room(self, name: str, crowd: Crowd | None, places: int, now_s: float) -> Room:
        """Return a worker's room. Prompt tokens waiting there count as the scheduler reports them, or as
        reserved, if more."""
        worker = self.workers[name]
        report, size = worker.report, worker.report.block_tokens
        rate = self._speeds.alone(name)
        preceding_share = self._speeds.preceding_token_s * rate
        lacking = 0 if crowd is None else worker.blocks(crowd.tokens)
        for reservation in worker.reservations.values():
            lacking -= reservation.blocks
        return Room(
            worker_id=name,
            free_tokens=(worker.free_blocks - max(0, lacking)) * size,
            total_tokens=report.capacity.total_blocks * size,
            sequences=len(worker.residents) + len(worker.reservations),
            pending_tokens=worker.pending_tokens(now_s, preceding_share, rate),
            prefill_tokens_per_s=rate,
            decode_step_s=report.decode_step_s,
            preceding_share=preceding_share,
            most_tokens=report.max_context_tokens,
            block_tokens=size,
            places=places if crowd is None else crowd.places,
        )

    def _shortlists(
        self,
        requests: int,
        excluded: frozenset[str],
        policy: RankingPolicy,
        ahead: WaitingAhead,
        now_s: float,
    ) -> Shortlists:
        for name in self._changed:
            if (worker := self.workers.get(name)) is not None:
                self._table.put(name, worker.row(self._speeds.sums(name)))
            else:
                self._table.remove(name)
        self._changed.clear()
        columns = self._table.columns(self._speeds.preceding_token_s, now_s)
        places = np.full(len(self._table.names), ahead.places)
        crowds = {crowd.worker_id: crowd for crowd in ahead.crowds}
        room = cache(lambda name: self._room(name, crowds.get(name), ahead.places, now_s))
        for name in {*self._reserved.values(), *crowds} & self.workers.keys():
            at, own = self._table.row_of[name], room(name)
            columns.free_tokens[at], columns.pending_tokens[at] = own.free_tokens, own.pending_tokens
            places[at] = own.places
        return Shortlists(
            self._table,
            columns,
            policy,
            room,
            lambda item: self.prefixes.holders(item.prefixes),
            requests=requests,
            places=places,
            excluded=excluded,
            only=ahead.only,
        )

    def check_integrity(self) -> None:
        self.prefixes.check_integrity()
        assert self.workers.keys() == set(self.liveness)
        reserved = {key: name for name, worker in self.workers.items() for key in worker.reservations}
        assert reserved == self._reserved
        homes: set[SequenceKey] = set()
        for worker_id, worker in self.workers.items():
            assert worker_id == worker.report.worker_id
            assert worker.plannable_blocks <= worker.report.capacity.total_blocks, "more free than there is"
            assert not worker.reservations.keys() & worker.residents.keys() or all(
                r.attempt > worker.residents[key].attempt
                for key, r in worker.reservations.items()
                if key in worker.residents
            ), "counted twice"
            assert not homes & worker.reservations.keys(), "reserved on two workers"
            homes |= worker.reservations.keys()


def _resident(sequence: SequenceReport, block_tokens: int, expected_tokens: int) -> Resident:
    tokens = sequence.prompt_tokens + sequence.generated_tokens
    decodes = sequence.state is SequenceState.DECODING
    return Resident(
        attempt=sequence.ref.attempt,
        allocated_blocks=sequence.allocated_blocks,
        needed_blocks=-(-tokens // block_tokens),
        tokens=tokens,
        pending_tokens=0 if decodes else max(0, tokens - sequence.computed_tokens),
        expected_tokens=0 if sequence.computed_tokens else expected_tokens,
        is_read=bool(sequence.gateway_id),
        decodes=decodes,
    )
