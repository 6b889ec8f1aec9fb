"""Tracks the free memory of each worker from its last heartbeat and the reservations since.

State is soft: one round of heartbeats rebuilds it. A reservation ends when a heartbeat lists its sequence, a
step report ends it, the scheduler withdraws it, or `reservation_s` passes. Pure; `now_s` is passed in.
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
    tokens: int = 0
    """Tokens of prompt and answer so far."""
    pending_tokens: int = 0
    """Tokens of these not computed yet; 0 while it decodes."""
    expected_tokens: int = 0
    """Prompt tokens expected to be cached, until it starts."""
    is_read: bool = True
    """Whether a gateway waits for it; else it is a rehearsal of a move."""
    decodes: bool = False

    def plain_tokens(self, preceding_share: float) -> float:
        """Return the prompt tokens that are probably not computed, as plain tokens."""
        pending = self.pending_tokens
        if not pending:
            return 0.0
        first = max(self.tokens - pending, min(self.expected_tokens, self.tokens - 1))
        return plain_tokens(first, self.tokens, preceding_share)


@dataclass
class WorkerRoom:
    """One worker: its last heartbeat, in its own blocks, and reservations since."""

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
        """Return prompt tokens, resident or reserved, that are probably not computed by now, in plain tokens.
        `rate`: prefill tokens per second; 0: the measured rate."""
        rate = rate or self.prefill_tokens_per_s or _PREFILL_TOKENS_PER_S
        known = sum(resident.plain_tokens(preceding_share) for resident in self.residents.values())
        pending = max(0.0, known - rate * (now_s - self.reported_s))
        for promised in self.reservations.values():
            pending += max(0.0, promised.pending_tokens - rate * (now_s - promised.placed_s))
        return int(pending)

    @property
    def free_blocks(self) -> int:
        """Plannable blocks less reservations and the blocks residents lack; negative if memory is short."""
        owed = sum(max(0, r.needed_blocks - r.allocated_blocks) for r in self.residents.values())
        return self.plannable_blocks - owed - sum(r.blocks for r in self.reservations.values())

    @property
    def sequences(self) -> int:
        """Number of resident and reserved sequences."""
        return len(self.residents) + len(self.reservations)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def admits(self, item: PlacementItem) -> bool:
        """Return whether the whole answer could ever fit."""
        return item.limit_tokens <= self.max_context_tokens


_PREFILL_TOKENS_PER_S = 4000.0
"""Assumed prefill speed of a worker without measurement."""
_MOST_CHOICES = 256
"""Maximum number of choices kept for `take_choices`."""


class FleetCapacity:
    """The workers heard within `silence_s`, with their room; places items on them."""

    def __init__(
        self,
        *,
        silence_s: float = 2.0,
        reservation_s: float = 5.0,
        order: PlacementRank = ORDERS["policy"],
        roles: FleetRoles | None = None,
    ) -> None:
        """Without `roles`, every worker does both."""
        self.reservation_s = reservation_s
        self.workers: dict[str, WorkerRoom] = {}
        self._rank = order
        self.roles = FleetRoles() if roles is None else roles
        self.prefixes = PrefixIndex(expect_s=reservation_s)
        self.speeds = PromptSpeeds()
        self.liveness = Liveness(silence_s)
        self._choices: deque[SeatChoice] = deque(maxlen=_MOST_CHOICES)

    def take_choices(self) -> list[SeatChoice]:
        """Return the choices since the last call."""
        choices = list(self._choices)
        self._choices.clear()
        return choices

    def on_reported(self, report: WorkerReported, now_s: float) -> None:
        """Apply a heartbeat. An older one is ignored; a new incarnation starts without reservations."""
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
        """Free the blocks of ended sequences before the next heartbeat."""
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
                # Shared prefix blocks count in every sequence that has them.
                free = worker.plannable_blocks + resident.allocated_blocks
                worker.plannable_blocks = min(free, worker.total_blocks)

    def on_withdrawn(self, refs: Iterable[SequenceRef]) -> None:
        """Release reservations of withdrawn sequences, for these attempts and lower ones."""
        for ref in refs:
            for worker in self.workers.values():
                reserved = worker.reservations.get(ref.key)
                if reserved is not None and reserved.attempt <= ref.attempt:
                    del worker.reservations[ref.key]

    def on_tick(self, now_s: float) -> list[str]:
        """Drop silent workers and expired reservations; return the ids of the dropped workers."""
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
        """Drop a worker whose incarnation left the bus. Return whether it was known."""
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
        """Return a worker per item, or None: wait (`seat`). Items are taken by `order`.

        `ahead` allows items to wait at workers without memory for them. `are_placed`: the items are already
        on a worker, whatever its role; all other workers are excluded.
        """
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
        """Return a worker's opening. Tokens waiting there count as the scheduler says, or as reserved, if
        more."""
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
        """Return plain prompt tokens per second, and the share that each preceding token adds."""
        rate = self.speeds.alone(worker.worker_id)
        return rate, self.speeds.preceding_token_s * rate

    def _release(self, items: tuple[PlacementItem, ...]) -> None:
        """Release reservations of items that are requested again: the earlier answer was lost or is void."""
        for worker in self.workers.values():
            for item in items:
                worker.reservations.pop(item.ref.key, None)

    def check_integrity(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
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
