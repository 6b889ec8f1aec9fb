"""Which worker has room: its last heartbeat, less what it owes its sequences, less what was placed since.

Soft state: one round of heartbeats rebuilds it; a reservation ends when a heartbeat lists its sequence, when
a step report says it ended, when the scheduler says it left before, or after `reservation_s`. It knows no bus
and no clock; `now_s` is passed in.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.placement.core.move_mode import MoveCosts
from services.placement.core.order import ORDERS, PlacementRank, Waiting, arrange, distance
from services.placement.core.prefix_index import NOTHING, CachedTokens, PrefixIndex
from services.placement.core.roles import FleetRoles
from services.placement.core.seating import Opening, SeatChoice, seat
from services.placement.core.speeds import PromptSpeeds, plain_tokens
from services.placement.policy.contract import PlacementPolicy
from shared.liveness import Liveness
from shared.messages.commands import NOBODY_AHEAD, Crowd, PlacementItem, WaitingAhead
from shared.messages.plans import WorkerStepped
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported
from shared.messages.sequence import SequenceKey, SequenceRef


@dataclass(frozen=True)
class Reservation:
    """What a sequence was promised on a worker until a heartbeat of that worker shows the sequence itself."""

    attempt: int
    blocks: int
    placed_s: float
    pending_tokens: float = 0.0
    """Of its prompt, those that are not expected to be cached, as plain ones (`core/speeds.py`)."""
    expected_tokens: int = 0
    tokens: int = 0
    """All of its prompt, and what there is of its answer."""


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
    expected_tokens: int = 0
    """Where it was not begun: of its prompt, that are expected to be cached."""
    is_read: bool = True
    """A gateway waits for it; else it is a rehearsal of a move."""
    decodes: bool = False

    def plain_tokens(self, preceding_share: float) -> float:
        """Of its prompt, what is likely to be computed yet."""
        pending = self.pending_tokens
        if not pending:
            return 0.0
        first = max(self.tokens - pending, min(self.expected_tokens, self.tokens - 1))
        return plain_tokens(first, self.tokens, preceding_share)


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
    prefill_context_tokens: int = 0
    decode_step_s: float = 0.0

    reported_s: float = 0.0

    def pending_tokens(self, now_s: float, preceding_share: float = 0.0, rate: float = 0.0) -> int:
        """Of prompts that are there or were promised a place, what is not likely to be computed by now, as
        plain tokens at that rate; 0: as it was measured."""
        rate = rate or self.prefill_tokens_per_s or _PREFILL_TOKENS_PER_S
        known = sum(resident.plain_tokens(preceding_share) for resident in self.residents.values())
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


_PREFILL_TOKENS_PER_S = 4000.0
"""Of a worker that has not measured it."""
_MOST_CHOICES = 256
"""Kept until they are taken."""


class FleetCapacity:
    """Every worker that was heard within `silence_s`, with its room, and which of them an item goes to."""

    def __init__(
        self,
        *,
        silence_s: float = 2.0,
        reservation_s: float = 5.0,
        order: PlacementRank = ORDERS["policy"],
        roles: FleetRoles | None = None,
    ) -> None:
        """`roles`: without, every worker does all."""
        self.reservation_s = reservation_s
        self.workers: dict[str, WorkerRoom] = {}
        self._rank = order
        self.roles = FleetRoles() if roles is None else roles
        self.prefixes = PrefixIndex(expect_s=reservation_s)
        self.speeds = PromptSpeeds()
        self.liveness = Liveness(silence_s)
        self._choices: deque[SeatChoice] = deque(maxlen=_MOST_CHOICES)

    def take_choices(self) -> list[SeatChoice]:
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
        expected: dict[SequenceKey, int] = {}
        if known is not None and report.incarnation == known.incarnation:
            if report.seq <= known.seq:
                return
            reservations = known.reservations
            expected = {key: one.expected_tokens for key, one in known.residents.items()}
        context_tokens = report.prefill_context_tokens
        self.speeds.on_measured(report.worker_id, report.prefill_tokens_per_s, context_tokens)
        if report.caches_prefixes:
            self.prefixes.on_worker(report.worker_id, report.incarnation)
        for sequence in report.sequences:
            reserved = reservations.get(sequence.ref.key)
            if reserved is not None and reserved.attempt <= sequence.ref.attempt:
                expected[sequence.ref.key] = reserved.expected_tokens
                del reservations[sequence.ref.key]
        self.workers[report.worker_id] = _worker(report, reservations, expected, now_s)
        if known is None:
            self.roles.on_workers(self.workers)

    def on_stepped(self, stepped: WorkerStepped) -> None:
        """Frees what ended sequences held, ahead of the next heartbeat."""
        worker = self.workers.get(stepped.worker_id)
        if worker is None or stepped.incarnation != worker.incarnation:
            return
        for end in stepped.ended:
            key, attempt = end.ref.key, end.ref.attempt
            self.roles.on_ended(key, end.generated_tokens)
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
        self.speeds.forget(worker_id)
        self.roles.on_workers(self.workers)

    def place(
        self,
        items: tuple[PlacementItem, ...],
        excluded: frozenset[str],
        policy: PlacementPolicy,
        now_s: float,
        ahead: WaitingAhead = NOBODY_AHEAD,
        *,
        are_placed: bool = False,
    ) -> tuple[str | None, ...]:
        """A worker for each item, or None: wait (`seat`), taken by `order`. Where `ahead` has places an item
        may go to a worker without memory for it, to wait there. `are_placed`: they are there already,
        whatever that worker's role is; all others are excluded."""
        self.on_tick(now_s)
        self._release(items)
        if not are_placed:
            excluded = excluded.union(
                name for name in self.workers if not self.roles.role_of(name).may_prefill
            )
        openings = self._openings(excluded, ahead, now_s)
        order = self._arranged(items, openings, now_s)

        def cached(item: PlacementItem, worker_id: str) -> CachedTokens:
            return self.prefixes.cached(worker_id, item.prefixes, now_s) if item.prefixes else NOTHING

        answers: list[str | None] = [None] * len(items)
        expected: dict[SequenceKey, int] = {}

        def note(choice: SeatChoice) -> None:
            expected[choice.item.ref.key] = choice.expected_tokens
            self._choices.append(choice)

        seats = seat((items[at] for at in order), openings.values(), policy, cached, note)
        for at, chosen in zip(order, seats, strict=True):
            answers[at] = chosen
            if chosen is not None:
                self._reserve(items[at], self.workers[chosen], expected[items[at].ref.key], now_s)
                if self.roles.is_on and not are_placed:
                    key, size_tokens = items[at].ref.key, items[at].size_tokens
                    self.roles.on_placed(key, size_tokens, expected[key], now_s)
        return tuple(answers)

    def _reserve(self, item: PlacementItem, worker: WorkerRoom, expected_tokens: int, now_s: float) -> None:
        blocks, first = worker.blocks(item.size_tokens), min(expected_tokens, item.size_tokens)
        pending_tokens = plain_tokens(first, item.size_tokens, self._rate(worker)[1])
        worker.reservations[item.ref.key] = Reservation(
            item.ref.attempt, blocks, now_s, pending_tokens, expected_tokens, item.size_tokens
        )
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
        rate, preceding_share = self._rate(worker)
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
            pending_tokens=worker.pending_tokens(now_s, preceding_share, rate),
            prefill_tokens_per_s=rate,
            decode_step_s=worker.decode_step_s,
            preceding_share=preceding_share,
        )

    def _rate(self, worker: WorkerRoom) -> tuple[float, float]:
        """Tokens a second of prompts where nothing precedes them; what each that does adds, as a share."""
        rate = self.speeds.alone(worker.worker_id)
        return rate, self.speeds.preceding_token_s * rate

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


def _worker(
    report: WorkerReported,
    reservations: dict[SequenceKey, Reservation],
    expected: dict[SequenceKey, int],
    now_s: float,
) -> WorkerRoom:
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
            0 if sequence.computed_tokens else expected.get(sequence.ref.key, 0),
            bool(sequence.gateway_id),
            decodes,
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
        prefill_context_tokens=report.prefill_context_tokens,
        decode_step_s=report.decode_step_s,
        reported_s=now_s,
    )
