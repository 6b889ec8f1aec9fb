"""Which worker has room: its last heartbeat, less what it owes its sequences, less what was placed since.

Soft state: one round of heartbeats rebuilds it; a reservation ends when a heartbeat lists its sequence, when
a step report says it ended, when the scheduler says it left before, or after `reservation_s`. It knows no bus
and no clock; `now_s` is passed in.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.placement.core.move_mode import MoveCosts
from services.placement.core.order import ORDERS, PlacementRank, Waiting, arrange, distance
from services.placement.core.prefix_index import NOTHING, CachedTokens, PrefixIndex
from services.placement.policy.contract import PlacementPolicy, Room
from shared.liveness import Liveness
from shared.messages.commands import PlacementItem
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

    worker: WorkerRoom
    free_blocks: int

    def fits(self, item: PlacementItem) -> bool:
        """Whether it has room now. An empty worker takes whatever it admits."""
        worker = self.worker
        if not worker.admits(item):
            return False
        return not worker.sequences or worker.blocks(item.size_tokens) + GROWTH_BLOCKS <= self.free_blocks

    def reserve(self, item: PlacementItem, now_s: float) -> None:
        blocks = self.worker.blocks(item.size_tokens)
        self.worker.reservations[item.ref.key] = Reservation(item.ref.attempt, blocks, now_s)
        self.free_blocks -= blocks

    def room(self, cached_tokens: CachedTokens = NOTHING) -> Room:
        worker = self.worker
        return Room(
            worker_id=worker.worker_id,
            free_tokens=self.free_blocks * worker.block_tokens,
            total_tokens=worker.total_blocks * worker.block_tokens,
            sequences=worker.sequences,
            cached_tokens=cached_tokens,
        )


class FleetCapacity:
    """Every worker that was heard within `silence_s`, with its room, and which of them an item goes to."""

    def __init__(
        self, *, silence_s: float = 2.0, reservation_s: float = 5.0, order: PlacementRank = ORDERS["fcfs"]
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
            del self.workers[worker_id]
            self.prefixes.forget(worker_id)
        self.prefixes.on_tick(now_s)
        for worker in self.workers.values():
            worker.reservations = {
                key: r for key, r in worker.reservations.items() if now_s - r.placed_s <= self.reservation_s
            }
        return silent

    def place(
        self,
        items: tuple[PlacementItem, ...],
        excluded: frozenset[str],
        policy: PlacementPolicy,
        now_s: float,
    ) -> tuple[str | None, ...]:
        """A worker for each item, or None: wait. Taken by `order`. Those that have room pass one that has
        none, until it has waited for `PASSED_S`: then all after it wait as well.

        An item larger than every worker waits alone: room for it can only come with another worker.
        """
        self.on_tick(now_s)
        self._release(items)
        openings = {w.worker_id: Opening(w, w.free_blocks) for w in self.workers.values()}
        for worker_id in excluded:
            openings.pop(worker_id, None)
        answers: list[str | None] = [None] * len(items)
        is_held_up = False
        for at in self._arranged(items, openings, now_s):
            item = items[at]
            chosen = None if is_held_up else self._place_one(item, openings, policy, now_s)
            has_waited = chosen is None and item.waited_s >= PASSED_S
            is_held_up |= has_waited and any(w.admits(item) for w in self.workers.values())
            answers[at] = chosen
        return tuple(answers)

    def _arranged(
        self, items: tuple[PlacementItem, ...], openings: dict[str, Opening], now_s: float
    ) -> Sequence[int]:
        if self._rank is ORDERS["fcfs"]:
            return range(len(items))
        cached = self.prefixes.cached
        waiting = [
            Waiting(item.waited_s, distance(item, [cached(name, item.prefixes, now_s) for name in openings]))
            for item in items
        ]
        return arrange(waiting, self._rank)

    def _place_one(
        self, item: PlacementItem, openings: dict[str, Opening], policy: PlacementPolicy, now_s: float
    ) -> str | None:
        able = [
            opening.room(self.prefixes.cached(worker_id, item.prefixes, now_s) if item.prefixes else NOTHING)
            for worker_id, opening in openings.items()
            if opening.fits(item)
        ]
        if not able:
            return None
        chosen = policy.choose(item.size_tokens, able)
        openings[chosen].reserve(item, now_s)
        if item.prefixes:
            self.prefixes.expect(chosen, item.prefixes, now_s)
        return chosen

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
