"""Which worker has room: its last heartbeat, less what it owes its sequences, less what was placed since.

Soft state: one round of heartbeats rebuilds it; a reservation ends when a heartbeat lists its sequence, when
a step report says it ended, when the scheduler says it left before, or after `reservation_s`. It knows no bus
and no clock; `now_s` is passed in.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.placement.core.move_mode import MoveCosts
from services.placement.core.order import ORDERS, PlacementRank, Waiting, arrange, distance
from services.placement.core.prefix_index import NOTHING, CachedTokens, PrefixIndex
from services.placement.policy.contract import PlacementPolicy, Room
from shared.liveness import Liveness
from shared.messages.commands import NOBODY_AHEAD, Crowd, PlacementItem, WaitingAhead
from shared.messages.plans import WorkerStepped
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported
from shared.messages.sequence import SequenceKey, SequenceRef

GROWTH_BLOCKS = 1
"""Left free beside a sequence that joins others, so that its first decode does not preempt one of them."""

PASSED_S = 5.0
"""So long those that need less may pass a sequence that finds no room."""


@dataclass(frozen=True)
class Reservation:
    """What a sequence was promised on a worker until a heartbeat of that worker shows the sequence itself."""

    attempt: int
    blocks: int
    placed_s: float


@dataclass(frozen=True)
class Resident:
    """A live sequence in a heartbeat: the blocks it has, and those that its tokens need at least."""

    attempt: int
    allocated_blocks: int
    needed_blocks: int
    tokens: int = 0
    """Prompt and answer so far."""
    is_read: bool = True
    """A gateway waits for it; else it is a rehearsal of a move."""


@dataclass
class WorkerRoom:
    """One worker: its last heartbeat, in its own blocks, and what was promised on it since."""

    worker_id: str
    incarnation: int
    seq: int
    stepped_seq: int
    block_tokens: int
    max_context_tokens: int
    total_blocks: int
    plannable_blocks: int
    residents: dict[SequenceKey, Resident]
    reservations: dict[SequenceKey, Reservation] = field(default_factory=dict)
    host: str = ""
    move_costs: MoveCosts = field(default_factory=MoveCosts)

    @property
    def free_blocks(self) -> int:
        """Plannable and spoken for by nobody; negative when residents wait for memory themselves."""
        owed = sum(max(0, r.needed_blocks - r.allocated_blocks) for r in self.residents.values())
        return self.plannable_blocks - owed - sum(r.blocks for r in self.reservations.values())

    @property
    def sequences(self) -> int:
        """Live, or on their way."""
        return len(self.residents) + len(self.reservations)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def admits(self, item: PlacementItem) -> bool:
        """Whether it could ever hold the whole answer."""
        return item.limit_tokens <= self.max_context_tokens


@dataclass
class Opening:
    """What is left of a worker while one question is answered: summed up once, then counted down per item."""

    worker_id: str
    block_tokens: int
    total_blocks: int
    most_tokens: int
    """Of one sequence, prompt and longest answer."""
    free_blocks: int
    sequences: int
    places: int = 0
    """So many may go there although it has no memory for them yet, and wait there."""

    def admits(self, item: PlacementItem) -> bool:
        """Whether it could ever hold the whole answer."""
        return item.limit_tokens <= self.most_tokens

    def fits(self, item: PlacementItem) -> bool:
        """Whether it has room now. An empty worker takes whatever it admits."""
        has_room = not self.sequences or self._blocks(item) + GROWTH_BLOCKS <= self.free_blocks
        return has_room and self.admits(item)

    def takes(self, item: PlacementItem) -> bool:
        """Whether it has room, or lets one more wait there."""
        return self.fits(item) or (self.places > 0 and self.admits(item))

    def reserve(self, item: PlacementItem) -> None:
        """It goes there."""
        self.free_blocks -= self._blocks(item)
        self.sequences += 1
        self.places -= 1

    def room(self, cached_tokens: CachedTokens = NOTHING) -> Room:
        return Room(
            worker_id=self.worker_id,
            free_tokens=self.free_blocks * self.block_tokens,
            total_tokens=self.total_blocks * self.block_tokens,
            sequences=self.sequences,
            cached_tokens=cached_tokens,
        )

    def _blocks(self, item: PlacementItem) -> int:
        return -(-item.size_tokens // self.block_tokens)


def seat(
    items: Iterable[PlacementItem],
    openings: Iterable[Opening],
    policy: PlacementPolicy,
    cached: Callable[[PlacementItem, str], CachedTokens] = lambda *_: NOTHING,
) -> list[str | None]:
    """A worker for each item, or None: it waits. Taken one after the other.

    Where some have room the policy chooses among them; where none has, it goes to the least crowded of those
    that let it wait there. Those that find a place pass one that finds none, until that has waited for
    `PASSED_S`: then all after it wait as well. An item larger than every worker waits alone: room for it can
    only come with another worker. `cached`: what a worker has of an item.
    """
    openings = list(openings)
    answers: list[str | None] = []
    is_held_up = False
    for item in items:
        chosen = None if is_held_up else _seat_one(item, openings, policy, cached)
        if chosen is not None:
            chosen.reserve(item)
        elif item.waited_s >= PASSED_S:
            is_held_up = is_held_up or any(opening.admits(item) for opening in openings)
        answers.append(None if chosen is None else chosen.worker_id)
    return answers


def _seat_one(
    item: PlacementItem,
    openings: list[Opening],
    policy: PlacementPolicy,
    cached: Callable[[PlacementItem, str], CachedTokens],
) -> Opening | None:
    able = [opening for opening in openings if opening.fits(item)]
    if able:
        chosen = policy.choose(item.size_tokens, [one.room(cached(item, one.worker_id)) for one in able])
        return next(one for one in able if one.worker_id == chosen)
    able = [opening for opening in openings if opening.takes(item)]
    return max(able, key=lambda one: (one.places, one.free_blocks), default=None)


class FleetCapacity:
    """Every worker that was heard within `silence_s`, with its room, and which of them an item goes to."""

    def __init__(
        self, *, silence_s: float = 2.0, reservation_s: float = 5.0, order: PlacementRank = ORDERS["policy"]
    ) -> None:
        self.reservation_s = reservation_s
        self.workers: dict[str, WorkerRoom] = {}
        self._rank = order
        self.prefixes = PrefixIndex(expect_s=reservation_s)
        self.liveness = Liveness(silence_s)

    def on_reported(self, report: WorkerReported, now_s: float) -> None:
        """Takes a heartbeat in. An older one is ignored; a new incarnation starts without reservations."""
        if not self.liveness.hear(report.worker_id, report.incarnation, now_s):
            return
        known = self.workers.get(report.worker_id)
        reservations: dict[SequenceKey, Reservation] = {}
        if known is not None and report.incarnation == known.incarnation:
            if report.seq <= known.seq:
                return
            reservations = known.reservations
        if report.caches_prefixes:
            self.prefixes.on_worker(report.worker_id, report.incarnation)
        for sequence in report.sequences:
            reserved = reservations.get(sequence.ref.key)
            if reserved is not None and reserved.attempt <= sequence.ref.attempt:
                del reservations[sequence.ref.key]
        self.workers[report.worker_id] = _worker(report, reservations)

    def on_stepped(self, stepped: WorkerStepped) -> None:
        """Frees what ended sequences held, ahead of the next heartbeat."""
        worker = self.workers.get(stepped.worker_id)
        if worker is None or stepped.incarnation != worker.incarnation:
            return
        for end in stepped.ended:
            key, attempt = end.ref.key, end.ref.attempt
            reserved = worker.reservations.get(key)
            if reserved is not None and reserved.attempt <= attempt:
                del worker.reservations[key]
            resident = worker.residents.get(key)
            if stepped.seq > worker.stepped_seq and resident is not None and resident.attempt <= attempt:
                del worker.residents[key]
                # Blocks of a common prefix count in everyone that has them.
                free = worker.plannable_blocks + resident.allocated_blocks
                worker.plannable_blocks = min(free, worker.total_blocks)

    def on_withdrawn(self, refs: Iterable[SequenceRef]) -> None:
        """They left before their start: what was promised to these attempts, and lower ones, is free."""
        for ref in refs:
            for worker in self.workers.values():
                reserved = worker.reservations.get(ref.key)
                if reserved is not None and reserved.attempt <= ref.attempt:
                    del worker.reservations[ref.key]

    def on_tick(self, now_s: float) -> list[str]:
        """Drops silent workers and expired reservations; returns the ids of the workers dropped."""
        silent = self.liveness.silent(now_s)
        for worker_id in silent:
            self._drop(worker_id)
        self.prefixes.on_tick(now_s)
        for worker in self.workers.values():
            worker.reservations = {
                key: r for key, r in worker.reservations.items() if now_s - r.placed_s <= self.reservation_s
            }
        return silent

    def on_gone(self, worker_id: str, incarnation: int) -> bool:
        """That start of it has left the bus. Whether it counted until now."""
        worker = self.workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return False
        self.liveness.forget(worker_id)
        self._drop(worker_id)
        return True

    def _drop(self, worker_id: str) -> None:
        del self.workers[worker_id]
        self.prefixes.forget(worker_id)

    def place(
        self,
        items: tuple[PlacementItem, ...],
        excluded: frozenset[str],
        policy: PlacementPolicy,
        now_s: float,
        ahead: WaitingAhead = NOBODY_AHEAD,
    ) -> tuple[str | None, ...]:
        """A worker for each item, or None: wait (`seat`), taken by `order`. Where `ahead` has places an item
        may go to a worker without memory for it, to wait there."""
        self.on_tick(now_s)
        self._release(items)
        openings = self._openings(excluded, ahead)
        order = self._arranged(items, openings, now_s)

        def cached(item: PlacementItem, worker_id: str) -> CachedTokens:
            return self.prefixes.cached(worker_id, item.prefixes, now_s) if item.prefixes else NOTHING

        answers: list[str | None] = [None] * len(items)
        seats = seat((items[at] for at in order), openings.values(), policy, cached)
        for at, chosen in zip(order, seats, strict=True):
            answers[at] = chosen
            if chosen is not None:
                self._reserve(items[at], self.workers[chosen], now_s)
        return tuple(answers)

    def _reserve(self, item: PlacementItem, worker: WorkerRoom, now_s: float) -> None:
        blocks = worker.blocks(item.size_tokens)
        worker.reservations[item.ref.key] = Reservation(item.ref.attempt, blocks, now_s)
        if item.prefixes:
            self.prefixes.expect(worker.worker_id, item.prefixes, now_s)

    def _arranged(
        self, items: tuple[PlacementItem, ...], openings: dict[str, Opening], now_s: float
    ) -> Sequence[int]:
        if self._rank is ORDERS["policy"]:
            return range(len(items))
        cached = self.prefixes.cached
        waiting = [
            Waiting(
                item.waited_s,
                distance(item, [cached(name, item.prefixes, now_s) for name in openings]),
                item.priority,
            )
            for item in items
        ]
        return arrange(waiting, self._rank)

    def _openings(self, excluded: frozenset[str], ahead: WaitingAhead) -> dict[str, Opening]:
        crowds = {crowd.worker_id: crowd for crowd in ahead.crowds}
        out = excluded.union(ahead.closed)
        names = [name for name in ahead.only or self.workers if name in self.workers and name not in out]
        return {name: self._opening(self.workers[name], crowds.get(name), ahead.places) for name in names}

    def _opening(self, worker: WorkerRoom, crowd: Crowd | None, places: int) -> Opening:
        """What waits there counts as the scheduler says, or as it was promised: whichever is more."""
        promised = sum(reservation.blocks for reservation in worker.reservations.values())
        waiting = worker.blocks(crowd.tokens) if crowd is not None else 0
        return Opening(
            worker_id=worker.worker_id,
            block_tokens=worker.block_tokens,
            total_blocks=worker.total_blocks,
            most_tokens=worker.max_context_tokens,
            free_blocks=worker.free_blocks - max(0, waiting - promised),
            sequences=worker.sequences,
            places=places if crowd is None else crowd.places,
        )

    def _release(self, items: tuple[PlacementItem, ...]) -> None:
        """They are asked for again: an earlier answer did not arrive or no longer holds."""
        for worker in self.workers.values():
            for item in items:
                worker.reservations.pop(item.ref.key, None)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books contradict themselves."""
        self.prefixes.check_integrity()
        assert self.workers.keys() == set(self.liveness)
        homes: set[SequenceKey] = set()
        for worker_id, worker in self.workers.items():
            assert worker_id == worker.worker_id
            assert worker.plannable_blocks <= worker.total_blocks, "more free than there is"
            assert not worker.reservations.keys() & worker.residents.keys() or all(
                r.attempt > worker.residents[key].attempt
                for key, r in worker.reservations.items()
                if key in worker.residents
            ), "counted twice"
            assert not homes & worker.reservations.keys(), "reserved on two workers"
            homes |= worker.reservations.keys()


def _worker(report: WorkerReported, reservations: dict[SequenceKey, Reservation]) -> WorkerRoom:
    def resident(sequence: SequenceReport) -> Resident:
        tokens = sequence.prompt_tokens + sequence.generated_tokens
        needed = -(-tokens // report.block_tokens)
        return Resident(
            sequence.ref.attempt, sequence.allocated_blocks, needed, tokens, bool(sequence.gateway_id)
        )

    return WorkerRoom(
        worker_id=report.worker_id,
        incarnation=report.incarnation,
        seq=report.seq,
        stepped_seq=report.stepped_seq,
        block_tokens=report.block_tokens,
        max_context_tokens=report.max_context_tokens,
        total_blocks=report.capacity.total_blocks,
        plannable_blocks=min(report.capacity.plannable_blocks, report.capacity.total_blocks),
        residents={s.ref.key: resident(s) for s in report.sequences if s.state is not SequenceState.ENDED},
        reservations=reservations,
        host=report.host,
        move_costs=MoveCosts.of(report),
    )
