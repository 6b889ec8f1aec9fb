"""Feeds worker reports to a packing policy and orders the resulting moves.

The policy's state says where every sequence should be, heartbeats where it is; moves are the difference. So
detours, returns and ended sequences need no special case, and a failed move is simply recorded. State is
soft: one round of heartbeats rebuilds it. Source: papers/000 §VI-C; `algorithms.md` §3.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf

from services.placement.core.fleet import FleetCapacity, Reservation, Resident
from services.placement.core.room_table import GROWTH_BLOCKS
from services.placement.policy.contract import Action, Operation, PackingEffects, PackingPolicy
from shared.errors import InvalidRequest
from shared.messages.commands import PlacementItem
from shared.messages.moves import SequenceMove, SequenceMoved
from shared.messages.plans import WorkerStepped
from shared.messages.sequence import SequenceKey, SequenceRef

_JUST_NOW_S = 1.0


@dataclass(frozen=True, slots=True)
class PackingRules:
    """Packed share of a worker, and timeouts of sequences and moves."""

    share: float = 0.85
    """Share of a worker's blocks that is packed; the rest is for growth between epochs and for moves."""
    most_sequences: int = 64
    """Maximum sequences per worker: each counts as at least that fraction of its capacity."""
    patience_s: float = 5.0
    """How long a placed sequence counts before a heartbeat lists it."""
    move_patience_s: float = 30.0
    """How long a move counts as under way without a report."""
    calm_s: float = 3.0
    """How long a sequence is not moved again after a move or a failed one."""


@dataclass(slots=True)
class PackedSequence:
    """A sequence as the packer knows it: its size, and where it was last seen."""

    ref: SequenceRef
    blocks: int
    heard_s: float
    worker_id: str | None = None
    """Worker where it was last seen; None: placed, not seen yet."""
    moving_s: float | None = None
    calm_until_s: float = -inf


class Packer:
    """Syncs a packing policy with what workers report, and turns the difference into moves.

    `make` builds the policy for the smallest capacity of all workers, in blocks. When that changes, a new
    policy starts, and the next epoch finds every sequence again.
    """

    def __init__(self, make: Callable[[int], PackingPolicy], rules: PackingRules | None = None) -> None:
        self.counts = Counter[str]()
        """Moves `ordered`, `moved`, `failed`, and `strays`: sequences that run where there is no room."""
        self.capacity_blocks = 1
        """Packed blocks of each worker; 1 before the first heartbeat."""
        self.policy = make(1)
        self._make = make
        self._rules = rules or PackingRules()
        self._present: dict[str, int] = {}
        """Incarnation of each worker that the policy knows."""
        self._retired: dict[str, int] = {}
        """Incarnation of each retired worker."""
        self._known: dict[SequenceKey, PackedSequence] = {}
        self._wanting = 0
        self._asked_s = -inf

    def place(
        self, items: Iterable[PlacementItem], excluded: frozenset[str], fleet: FleetCapacity, now_s: float
    ) -> tuple[str | None, ...]:
        """Return a worker per item; None means wait. Once an item waits, so do all after it."""
        self.sync(fleet)
        answers: list[str | None] = []
        self._wanting, self._asked_s = 0, now_s
        most_tokens = max((one.report.max_context_tokens for one in fleet.workers.values()), default=-1)
        for item in items:
            is_able = item.limit_tokens <= most_tokens
            chosen = self._place(item, excluded, fleet, now_s) if is_able and not self._wanting else None
            self._wanting += is_able and chosen is None
            answers.append(chosen)
        return tuple(answers)

    def wanting(self, now_s: float) -> int:
        """Return how many sequences found no worker in the last request; 0 if that was over a second ago."""
        return self._wanting if now_s - self._asked_s <= _JUST_NOW_S else 0

    def _place(
        self, item: PlacementItem, excluded: frozenset[str], fleet: FleetCapacity, now_s: float
    ) -> str | None:
        key, policy = item.ref.key, self.policy
        home = policy.worker_of(key)
        if home in excluded:
            self._forget(key)
            home = None
        worker = next(iter(fleet.workers.values()))
        blocks = self._blocks(worker.blocks(item.size_tokens) + GROWTH_BLOCKS)
        if home is None:
            policy.allocate(key, blocks)
            home = policy.worker_of(key)
        if home is not None and (home in excluded or home not in fleet.workers):
            self._forget(key)
            home = self._elsewhere(key, blocks, excluded, fleet)
        if home is None:
            return None
        known = self._known.get(key)
        calm_until_s = known.calm_until_s if known else -inf
        blocks = known.blocks if known else blocks
        self._known[key] = PackedSequence(item.ref, blocks, now_s, calm_until_s=calm_until_s)
        fleet.reserve(home, key, Reservation(item.ref.attempt, blocks, now_s))
        return home

    def _elsewhere(
        self, key: SequenceKey, blocks: int, excluded: frozenset[str], fleet: FleetCapacity
    ) -> str | None:
        """Replace an excluded worker, which the policy cannot know: by an idle one, else the emptiest."""
        used = dict.fromkeys(self._present, 0)
        for other, known in self._known.items():
            home = self.policy.worker_of(other)
            if home in used:
                used[home] += known.blocks
        room = self.capacity_blocks - blocks
        emptiest = [
            name for size, name in sorted((size, name) for name, size in used.items()) if size <= room
        ]
        for name in (*self.idle_workers(fleet), *emptiest):
            if name in fleet.workers and name not in excluded:
                self.policy.adopt(key, blocks, name)
                return self.policy.worker_of(key)
        return None

    def sync(self, fleet: FleetCapacity) -> None:
        """Apply workers that joined, left or restarted. A restarted worker is a new one."""
        heard = {
            name: worker.report.incarnation
            for name, worker in fleet.workers.items()
            if self._retired.get(name) != worker.report.incarnation
        }
        totals = [fleet.workers[name].report.capacity.total_blocks for name in heard]
        capacity = max(1, int(self._rules.share * min(totals))) if totals else self.capacity_blocks
        if capacity != self.capacity_blocks:
            self.capacity_blocks, self.policy = capacity, self._make(capacity)
            self._present.clear()
            self._known.clear()
        for name, incarnation in list(self._present.items()):
            if heard.get(name) != incarnation:
                self._drop_worker(name)
        for name, incarnation in heard.items():
            if name not in self._present:
                self._present[name] = incarnation
                self.policy.add_worker(name, fleet.workers[name].report.host)

    def _drop_worker(self, name: str) -> None:
        del self._present[name]
        for key in self.policy.remove_worker(name):
            self._known.pop(key, None)  # type: ignore[call-overload]

    def on_stepped(self, stepped: WorkerStepped) -> None:
        """Release ended sequences, even those that no heartbeat listed yet."""
        over = []
        for end in stepped.ended:
            known = self._known.get(end.ref.key)
            if known is not None and known.ref.attempt <= end.ref.attempt:
                over.append(end.ref.key)
        self._end(over)

    def on_withdrawn(self, refs: Iterable[SequenceRef]) -> None:
        """Release sequences withdrawn before their start, unless a heartbeat has listed them."""
        left = []
        for ref in refs:
            known = self._known.get(ref.key)
            if known is not None and known.worker_id is None and known.ref.attempt <= ref.attempt:
                left.append(ref.key)
        self._end(left)

    def on_epoch(self, fleet: FleetCapacity, now_s: float) -> tuple[SequenceMove, ...]:
        """Sync the policy with the fleet and return the moves to order."""
        self.sync(fleet)
        seen = self._seen(fleet)
        self._follow(seen, now_s)
        self._end(list(self._ends(seen, now_s)))
        for key, (worker_id, resident) in seen.items():
            if key not in self._known:
                self._adopt(key, worker_id, resident, now_s)
        self._note(self.policy.apply(list(self._growths(seen))))
        return tuple(self._orders(fleet, now_s))

    def _seen(self, fleet: FleetCapacity) -> dict[SequenceKey, tuple[str, Resident]]:
        """Return the worker and resident of each sequence's highest attempt, rehearsals of moves excluded."""
        seen: dict[SequenceKey, tuple[str, Resident]] = {}
        for name, worker in fleet.workers.items():
            if self._present.get(name) == worker.report.incarnation:
                for key, resident in worker.residents.items():
                    is_newer = key not in seen or seen[key][1].attempt < resident.attempt
                    if resident.is_read and is_newer:
                        seen[key] = (name, resident)
        return seen

    def _follow(self, seen: dict[SequenceKey, tuple[str, Resident]], now_s: float) -> None:
        """Record where sequences run. One that moved without our order stays where it is."""
        for key, (worker_id, resident) in seen.items():
            known = self._known.get(key)
            if known is None or resident.attempt < known.ref.attempt:
                continue
            was = known.worker_id
            known.ref = SequenceRef(request_id=key[0], choice=key[1], attempt=resident.attempt)
            known.heard_s, known.worker_id = now_s, worker_id
            home = self.policy.worker_of(key)
            if worker_id == home:
                known.moving_s = None
            elif was != worker_id and home is not None:
                self._take_back(key, known)

    def _ends(self, seen: dict[SequenceKey, tuple[str, Resident]], now_s: float) -> Iterator[SequenceKey]:
        for key, known in self._known.items():
            waited_s = now_s - known.heard_s
            patience_s = self._rules.patience_s if known.worker_id is None or known.moving_s else 0.0
            if key not in seen and waited_s >= patience_s:
                yield key

    def _end(self, ended: Iterable[SequenceKey]) -> None:
        operations = [Operation(Action.END, key) for key in dict.fromkeys(ended)]
        for operation in operations:
            del self._known[operation.request]  # type: ignore[arg-type]
        if operations:
            self._note(self.policy.apply(operations))

    def _growths(self, seen: dict[SequenceKey, tuple[str, Resident]]) -> Iterator[Operation]:
        for key, (_, resident) in seen.items():
            known = self._known.get(key)
            blocks = self._blocks(_size(resident))
            if known is not None and blocks > known.blocks:
                known.blocks = blocks
                yield Operation(Action.GROW, key, blocks)

    def _adopt(self, key: SequenceKey, worker_id: str, resident: Resident, now_s: float) -> None:
        ref = SequenceRef(request_id=key[0], choice=key[1], attempt=resident.attempt)
        blocks = self._blocks(_size(resident))
        try:
            effects = self.policy.adopt(key, blocks, worker_id)
        except InvalidRequest:
            self.counts["strays"] += 1
            return
        self._note(effects)
        if self.policy.worker_of(key) is not None:
            self._known[key] = PackedSequence(ref, blocks, now_s, worker_id)

    def _note(self, effects: PackingEffects) -> None:
        """Forget displaced sequences. They keep running until a later epoch finds room for them."""
        self.counts["strays"] += len(effects.displaced)
        for key in (*effects.displaced, *effects.waiting):
            self._known.pop(key, None)  # type: ignore[call-overload]

    def _orders(self, fleet: FleetCapacity, now_s: float) -> Iterator[SequenceMove]:
        for key, known in self._known.items():
            home = self.policy.worker_of(key)
            if known.moving_s is not None and now_s - known.moving_s > self._rules.move_patience_s:
                known.moving_s = None
            is_free = known.moving_s is None and now_s >= known.calm_until_s
            if not is_free or home is None or known.worker_id in (None, home) or home not in fleet.workers:
                continue
            known.moving_s = now_s
            self.counts["ordered"] += 1
            yield SequenceMove(ref=known.ref, target=home, why="it is packed there")

    def on_postponed(self, order: SequenceMove) -> None:
        """Cancel a move for this epoch. The next epoch orders it again."""
        known = self._known.get(order.ref.key)
        if known is not None:
            known.moving_s = None
            self.counts["ordered"] -= 1

    def on_moved(self, moved: SequenceMoved, now_s: float) -> None:
        """Record the outcome of a move, also of one that others ordered."""
        if moved.reason:
            self.on_failed(moved.ref, now_s)
            return
        self.counts["moved"] += 1
        known = self._known.get(moved.ref.key)
        if known is not None:
            known.calm_until_s = now_s + self._rules.calm_s
            if known.ref == moved.ref:
                known.worker_id, known.moving_s, known.heard_s = moved.target, None, now_s

    def on_failed(self, ref: SequenceRef, now_s: float) -> None:
        """Record that a move failed, or that the scheduler refused it."""
        known = self._known.get(ref.key)
        if known is not None and known.moving_s is not None:
            self.counts["failed"] += 1
            known.moving_s, known.calm_until_s = None, now_s + self._rules.calm_s
            self._take_back(ref.key, known)

    def _take_back(self, key: SequenceKey, known: PackedSequence) -> None:
        """Set the policy's state to where the sequence actually runs."""
        if known.worker_id is not None and known.worker_id in self._present:
            self.policy.end(key)
            known.moving_s = None
            self._note(self.policy.adopt(key, known.blocks, known.worker_id))

    def _forget(self, key: SequenceKey) -> None:
        self._known.pop(key, None)
        self.policy.end(key)

    def idle_workers(self, fleet: FleetCapacity) -> list[str]:
        """Return workers without sequences, both in the policy and in their heartbeats."""
        used = {self.policy.worker_of(key) for key in self._known}
        return sorted(
            name
            for name in self._present
            if name in fleet.workers and name not in used and not fleet.workers[name].residents
        )

    def retire(self, worker_id: str, fleet: FleetCapacity) -> None:
        """Stop using a worker in this incarnation, because it is about to be stopped."""
        if worker_id in fleet.workers:
            self._retired[worker_id] = fleet.workers[worker_id].report.incarnation
        if worker_id in self._present:
            self._drop_worker(worker_id)

    def unretire(self, worker_id: str) -> None:
        """Use a retired worker again."""
        self._retired.pop(worker_id, None)

    def state_of(self, worker_id: str) -> str:
        """Return a worker's state for `status`: the class of its largest item, idle, draining or retired."""
        if worker_id not in self._present:
            return "retired" if worker_id in self._retired else "unknown"
        if any(self.policy.worker_of(key) == worker_id for key in self._known):
            categories = getattr(self.policy, "categories", None)
            return "active" if categories is None else str(categories()[worker_id])
        is_draining = any(known.worker_id == worker_id for known in self._known.values())
        return "draining" if is_draining else "idle"

    def check_integrity(self) -> None:
        """Raise AssertionError if the packer's state and the policy's are inconsistent."""
        self.policy.check_integrity()
        for key in self._known:
            assert self.policy.worker_of(key) in self._present, f"{key} is known and has no place"

    def _blocks(self, blocks: int) -> int:
        least = -(-self.capacity_blocks // self._rules.most_sequences)
        return max(1, least, min(blocks, self.capacity_blocks))


def _size(resident: Resident) -> int:
    return max(resident.allocated_blocks, resident.needed_blocks + GROWTH_BLOCKS)
