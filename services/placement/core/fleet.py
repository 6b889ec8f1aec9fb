"""Which worker has room: its last heartbeat, less what it owes its sequences, less what was placed since.

Soft state: one round of heartbeats rebuilds it; a reservation ends when a heartbeat lists its sequence, when
a step report says it ended, when the scheduler says it left before, or after `reservation_s`. It knows no bus
and no clock; `now_s` is passed in.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.placement.core.move_mode import MoveCosts
from services.placement.core.order import ORDERS, PlacementRank, Waiting, arrange, distance
from services.placement.core.prefix_index import NOTHING, CachedTokens, PrefixIndex
from services.placement.policy.contract import CostedPolicy, PlacementPolicy, Room
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
    pending_tokens: int = 0
    """Of its prompt, those that are not expected to be cached."""


@dataclass(frozen=True)
class Resident:
    """A live sequence in a heartbeat: the blocks it has, and those that its tokens need at least."""

    attempt: int
    allocated_blocks: int
    needed_blocks: int
    tokens: int = 0
    """Prompt and answer so far."""
    pending_tokens: int = 0
    """Of those, not computed yet, where it does not decode."""
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
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0

    reported_s: float = 0.0

    def pending_tokens(self, now_s: float) -> int:
        """Of prompts that are there or were promised a place, what is not likely to be computed by now."""
        rate = self.prefill_tokens_per_s or _PREFILL_TOKENS_PER_S
        known = sum(resident.pending_tokens for resident in self.residents.values())
        pending = max(0.0, known - rate * (now_s - self.reported_s))
        for promised in self.reservations.values():
            pending += max(0.0, promised.pending_tokens - rate * (now_s - promised.placed_s))
        return int(pending)

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
    pending_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0

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

    def reserve(self, item: PlacementItem, cached_tokens: int = 0) -> None:
        """It goes there."""
        self.pending_tokens += max(0, item.size_tokens - cached_tokens)
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
            pending_tokens=self.pending_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_step_s=self.decode_step_s,
        )

    def _blocks(self, item: PlacementItem) -> int:
        return -(-item.size_tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Choice:
    """Why a sequence goes where it goes."""

    item: PlacementItem
    worker_id: str
    expected_tokens: int
    """Of its prompt, that are expected to be found there."""
    costs_s: tuple[tuple[str, float], ...]
    """What each worker that could have taken it would have cost, as the policy reckons, the least first; none
    where it does not."""


def seat(
    items: Iterable[PlacementItem],
    openings: Iterable[Opening],
    policy: PlacementPolicy,
    cached: Callable[[PlacementItem, str], CachedTokens] = lambda *_: NOTHING,
    note: Callable[[Choice], None] = lambda choice: None,
) -> list[str | None]:
    """A worker for each item, or None: it waits. Taken one after the other.

    Where some have room the policy chooses among them; where none has, among those that let it wait there,
    if it knows what that costs; else it goes to the least crowded of those. Those that find a place pass one
    that finds none, until that has waited for `PASSED_S`: then all after it wait as well. An item larger than
    every worker waits alone: room for it can only come with another worker. `cached`: what a worker has of an
    item. `note` hears of each choice.
    """
    openings = list(openings)
    answers: list[str | None] = []
    is_held_up = False
    for item in items:
        choice = None if is_held_up else _seat_one(item, openings, policy, cached)
        chosen = None if choice is None else next(o for o in openings if o.worker_id == choice.worker_id)
        if chosen is not None and choice is not None:
            note(choice)
            chosen.reserve(item, choice.expected_tokens)
        elif item.waited_s >= PASSED_S:
            is_held_up = is_held_up or any(opening.admits(item) for opening in openings)
        answers.append(None if chosen is None else chosen.worker_id)
    return answers


def _seat_one(
    item: PlacementItem,
    openings: list[Opening],
    policy: PlacementPolicy,
    cached: Callable[[PlacementItem, str], CachedTokens],
) -> Choice | None:
    able = [opening for opening in openings if opening.fits(item)]
    has_room = bool(able)
    able = able or [opening for opening in openings if opening.takes(item)]
    if not able:
        return None
    if not has_room and not isinstance(policy, CostedPolicy):
        crowd = max(able, key=lambda one: (one.places, one.free_blocks))
        return Choice(item, crowd.worker_id, sum(cached(item, crowd.worker_id)), ())
    rooms = [one.room(cached(item, one.worker_id)) for one in able]
    chosen = policy.choose(item.size_tokens, rooms)
    expected = next(sum(room.cached_tokens) for room in rooms if room.worker_id == chosen)
    costs: list[tuple[str, float]] = []
    if isinstance(policy, CostedPolicy):
        found = zip((room.worker_id for room in rooms), policy.costs_s(item.size_tokens, rooms), strict=True)
        costs = sorted(found, key=lambda one: one[1])[:_SHOWN_COSTS]
    return Choice(item, chosen, expected, tuple(costs))


_SHOWN_COSTS = 8
"""Of workers that could have taken a sequence."""
_PREFILL_TOKENS_PER_S = 4000.0
"""Of a worker that has not measured it."""
_MOST_CHOICES = 256
"""Kept until they are taken."""


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
        self._choices: deque[Choice] = deque(maxlen=_MOST_CHOICES)

    def take_choices(self) -> list[Choice]:
        """Those since the last call, and why they were made."""
        choices = list(self._choices)
        self._choices.clear()
        return choices

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
        self.workers[report.worker_id] = _worker(report, reservations, now_s)

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
        openings = self._openings(excluded, ahead, now_s)
        order = self._arranged(items, openings, now_s)

        def cached(item: PlacementItem, worker_id: str) -> CachedTokens:
            return self.prefixes.cached(worker_id, item.prefixes, now_s) if item.prefixes else NOTHING

        answers: list[str | None] = [None] * len(items)
        expected: dict[SequenceKey, int] = {}

        def note(choice: Choice) -> None:
            expected[choice.item.ref.key] = choice.expected_tokens
            self._choices.append(choice)

        seats = seat((items[at] for at in order), openings.values(), policy, cached, note)
        for at, chosen in zip(order, seats, strict=True):
            answers[at] = chosen
            if chosen is not None:
                pending_tokens = items[at].size_tokens - expected[items[at].ref.key]
                self._reserve(items[at], self.workers[chosen], max(0, pending_tokens), now_s)
        return tuple(answers)

    def _reserve(self, item: PlacementItem, worker: WorkerRoom, pending_tokens: int, now_s: float) -> None:
        blocks = worker.blocks(item.size_tokens)
        worker.reservations[item.ref.key] = Reservation(item.ref.attempt, blocks, now_s, pending_tokens)
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

    def _openings(self, excluded: frozenset[str], ahead: WaitingAhead, now_s: float) -> dict[str, Opening]:
        crowds = {crowd.worker_id: crowd for crowd in ahead.crowds}
        out = excluded.union(ahead.closed)
        names = [name for name in ahead.only or self.workers if name in self.workers and name not in out]
        return {
            name: self._opening(self.workers[name], crowds.get(name), ahead.places, now_s) for name in names
        }

    def _opening(self, worker: WorkerRoom, crowd: Crowd | None, places: int, now_s: float) -> Opening:
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
            pending_tokens=worker.pending_tokens(now_s),
            prefill_tokens_per_s=worker.prefill_tokens_per_s,
            decode_step_s=worker.decode_step_s,
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


def _worker(report: WorkerReported, reservations: dict[SequenceKey, Reservation], now_s: float) -> WorkerRoom:
    def resident(sequence: SequenceReport) -> Resident:
        tokens = sequence.prompt_tokens + sequence.generated_tokens
        needed = -(-tokens // report.block_tokens)
        decodes = sequence.state is SequenceState.DECODING
        return Resident(
            sequence.ref.attempt,
            sequence.allocated_blocks,
            needed,
            tokens,
            0 if decodes else max(0, tokens - sequence.computed_tokens),
            bool(sequence.gateway_id),
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
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        decode_step_s=report.decode_step_s,
        reported_s=now_s,
    )
