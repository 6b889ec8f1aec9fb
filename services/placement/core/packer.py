"""Feeds worker reports to a packing policy and orders the resulting moves.

The policy's state says where every sequence should be, heartbeats where it is; moves are the difference. So
detours, returns and ended sequences need no special case, and a failed move is simply recorded. State is
soft: one round of heartbeats rebuilds it. Source: papers/000 §VI-C; `algorithms.md` §3.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.placement.core.fleet import FleetCapacity, Reservation, Resident
from services.placement.policy.contract import Action, Operation, PackingEffects, PackingPolicy
from shared.errors import InvalidRequest
from shared.messages.commands import PlacementItem
from shared.messages.moves import SequenceMove, SequenceMoved
from shared.messages.plans import WorkerStepped
from shared.messages.sequence import SequenceKey, SequenceRef


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

    def capacity(self, total_blocks: int) -> int:
        """Return how many of a worker's blocks are packed."""
        return max(1, int(self.share * total_blocks))


@dataclass(slots=True)
class PackedSequence:
    """A sequence as the packer knows it: its size, and where it was last seen."""

    ref: SequenceRef
    blocks: int
    heard_s: float
    worker_id: str | None = None
    """Worker where it was last seen; None: placed, not seen yet."""
    moving_s: float | None = None
    calm_until_s: float = float("-inf")


@dataclass(slots=True)
class PackingCounts:
    """Counters of moves since the start, for `status`."""

    ordered: int = 0
    moved: int = 0
    failed: int = 0
    strays: int = 0
    """Sequences running where the policy has no room for them."""


GROWTH_BLOCKS = 1
"""Blocks added to a sequence's size for its growth until the next epoch."""
_JUST_NOW_S = 1.0


class Packer:
    """Syncs a packing policy with what workers report, and turns the difference into moves.

    `make` builds the policy for the smallest capacity of all workers, in blocks. When that changes, a new
    policy starts, and the next epoch finds every sequence again.
    """

    def __init__(self, make: Callable[[int], PackingPolicy], rules: PackingRules | None = None) -> None:
        self.rules = rules or PackingRules()
        self.counts = PackingCounts()
        self._make = make
        self._capacity = 0
        self._policy: PackingPolicy | None = None
        self._roster = WorkerRoster()
        self._known: dict[SequenceKey, PackedSequence] = {}
        self._wanting = 0
        self._asked_s = float("-inf")

    @property
    def capacity_blocks(self) -> int:
        """Packed blocks of each worker; 0 before the first heartbeat."""
        return self._capacity

    def place(
        self, items: Iterable[PlacementItem], excluded: frozenset[str], fleet: FleetCapacity, now_s: float
    ) -> tuple[str | None, ...]:
        """Return a worker per item; None means wait. Once an item waits, so do all after it."""
        self.sync(fleet, now_s)
        answers: list[str | None] = []
        self._wanting, self._asked_s = 0, now_s
        for item in items:
            is_able = any(worker.admits(item) for worker in fleet.workers.values())
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
        policy = self._policy
        if policy is None:
            return None
        key = item.ref.key
        home = policy.worker_of(key)
        if home in excluded:
            self._forget(key)
            home = None
        worker = next(iter(fleet.workers.values()))
        blocks = self._blocks(worker.blocks(item.size_tokens) + GROWTH_BLOCKS)
        if home is None:
            policy.allocate(key, blocks)
            home = policy.worker_of(key)
        if home is None:
            return None
        if home in excluded or home not in fleet.workers:
            self._forget(key)
            home = self._elsewhere(key, blocks, excluded, fleet)
            if home is None:
                return None
        known = self._known.get(key)
        calm_until_s = known.calm_until_s if known else float("-inf")
        blocks = known.blocks if known else blocks
        self._known[key] = PackedSequence(item.ref, blocks, now_s, calm_until_s=calm_until_s)
        fleet.workers[home].reservations[key] = Reservation(item.ref.attempt, blocks, now_s)
        return home

    def _elsewhere(
        self, key: SequenceKey, blocks: int, excluded: frozenset[str], fleet: FleetCapacity
    ) -> str | None:
        """Replace an excluded worker, which the policy cannot know: by an idle one, else the emptiest."""
        policy = self._policy
        if policy is None:
            return None
        homes = ((policy.worker_of(other), known.blocks) for other, known in self._known.items())
        able = [name for name in self.idle_workers(fleet) if name not in excluded]
        able += [
            name
            for name in self._roster.emptiest(homes, self._capacity - blocks)
            if name in fleet.workers and name not in excluded
        ]
        if not able:
            return None
        policy.adopt(key, blocks, able[0])
        return policy.worker_of(key)

    def sync(self, fleet: FleetCapacity, now_s: float) -> None:
        """Apply workers that joined, left or restarted."""
        heard = self._roster.heard(fleet)
        capacity = min(
            (self.rules.capacity(fleet.workers[name].total_blocks) for name in heard), default=self._capacity
        )
        if capacity != self._capacity:
            self._begin_anew(capacity)
        for name, incarnation in list(self._roster.present.items()):
            if heard.get(name) != incarnation:
                self._drop_worker(name)
        for name, incarnation in heard.items():
            if name not in self._roster.present and self._policy is not None:
                self._roster.present[name] = incarnation
                self._policy.add_worker(name, fleet.workers[name].host)

    def _begin_anew(self, capacity: int) -> None:
        """Start a new policy for another capacity. The next epoch finds every sequence again."""
        self._capacity, self._policy = capacity, self._make(capacity)
        self._roster.present.clear()
        self._known.clear()

    def _drop_worker(self, name: str) -> None:
        del self._roster.present[name]
        if self._policy is not None:
            for key in self._policy.remove_worker(name):
                self._known.pop(key, None)  # type: ignore[call-overload]

    def on_stepped(self, stepped: WorkerStepped) -> None:
        """Release ended sequences, even those that no heartbeat listed yet."""
        attempts = {end.ref.key: end.ref.attempt for end in stepped.ended}
        over = [
            key for key in attempts if key in self._known and self._known[key].ref.attempt <= attempts[key]
        ]
        if over and self._policy is not None:
            self._end(self._policy, over)

    def on_withdrawn(self, refs: Iterable[SequenceRef]) -> None:
        """Release sequences withdrawn before their start, unless a heartbeat has listed them."""
        attempts = {ref.key: ref.attempt for ref in refs}
        left = [
            key
            for key, attempt in attempts.items()
            if (known := self._known.get(key)) is not None
            and known.worker_id is None
            and known.ref.attempt <= attempt
        ]
        if left and self._policy is not None:
            self._end(self._policy, left)

    def on_epoch(self, fleet: FleetCapacity, now_s: float) -> tuple[SequenceMove, ...]:
        """Sync the policy with the fleet and return the moves to order."""
        self.sync(fleet, now_s)
        policy = self._policy
        if policy is None:
            return ()
        seen = self._roster.seen(fleet)
        self._follow(policy, seen, now_s)
        ended = list(self._ends(seen, now_s))
        if ended:
            self._end(policy, ended)
        for key, (worker_id, resident) in seen.items():
            if key not in self._known:
                self._adopt(policy, key, worker_id, resident, now_s)
        self._note(policy.apply(list(self._growths(seen))))
        return tuple(self._orders(policy, fleet, now_s))

    def _follow(
        self, policy: PackingPolicy, seen: dict[SequenceKey, tuple[str, Resident]], now_s: float
    ) -> None:
        """Record where sequences run. One that moved without our order stays where it is."""
        for key, (worker_id, resident) in seen.items():
            known = self._known.get(key)
            if known is None or resident.attempt < known.ref.attempt:
                continue
            was = known.worker_id
            known.ref = SequenceRef(request_id=key[0], choice=key[1], attempt=resident.attempt)
            known.heard_s, known.worker_id = now_s, worker_id
            home = policy.worker_of(key)
            if worker_id == home:
                known.moving_s = None
            elif was != worker_id and home is not None:
                self._take_back(policy, key, known)

    def _ends(self, seen: dict[SequenceKey, tuple[str, Resident]], now_s: float) -> Iterable[SequenceKey]:
        for key, known in self._known.items():
            waited_s = now_s - known.heard_s
            patience_s = self.rules.patience_s if known.worker_id is None or known.moving_s else 0.0
            if key not in seen and waited_s >= patience_s:
                yield key

    def _end(self, policy: PackingPolicy, ended: list[SequenceKey]) -> None:
        for key in ended:
            del self._known[key]
        self._note(policy.apply([Operation(Action.END, key) for key in ended]))

    def _growths(self, seen: dict[SequenceKey, tuple[str, Resident]]) -> Iterable[Operation]:
        for key, (_, resident) in seen.items():
            known = self._known.get(key)
            blocks = self._blocks(_size(resident))
            if known is not None and blocks > known.blocks:
                known.blocks = blocks
                yield Operation(Action.GROW, key, blocks)

    def _adopt(
        self, policy: PackingPolicy, key: SequenceKey, worker_id: str, resident: Resident, now_s: float
    ) -> None:
        ref = SequenceRef(request_id=key[0], choice=key[1], attempt=resident.attempt)
        blocks = self._blocks(_size(resident))
        try:
            effects = policy.adopt(key, blocks, worker_id)
        except InvalidRequest:
            self.counts.strays += 1
            return
        self._note(effects)
        if policy.worker_of(key) is not None:
            self._known[key] = PackedSequence(ref, blocks, now_s, worker_id)

    def _note(self, effects: PackingEffects) -> None:
        """Forget displaced sequences. They keep running until a later epoch finds room for them."""
        self.counts.strays += len(effects.displaced)
        for key in (*effects.displaced, *effects.waiting):
            self._known.pop(key, None)  # type: ignore[call-overload]

    def _orders(self, policy: PackingPolicy, fleet: FleetCapacity, now_s: float) -> Iterable[SequenceMove]:
        for key, known in self._known.items():
            home = policy.worker_of(key)
            if known.moving_s is not None and now_s - known.moving_s > self.rules.move_patience_s:
                known.moving_s = None
            is_free = known.moving_s is None and now_s >= known.calm_until_s
            if not is_free or home is None or known.worker_id in (None, home) or home not in fleet.workers:
                continue
            known.moving_s = now_s
            self.counts.ordered += 1
            yield SequenceMove(ref=known.ref, target=home)

    def on_postponed(self, order: SequenceMove) -> None:
        """Cancel a move for this epoch. The next epoch orders it again."""
        known = self._known.get(order.ref.key)
        if known is not None:
            known.moving_s = None
            self.counts.ordered -= 1

    def on_refused(self, order: SequenceMove, now_s: float) -> None:
        """Record that the scheduler refused a move."""
        self._on_failed(order.ref, now_s)

    def on_moved(self, moved: SequenceMoved, now_s: float) -> None:
        """Record the outcome of a move, also of one that others ordered."""
        if moved.reason:
            self._on_failed(moved.ref, now_s)
            return
        self.counts.moved += 1
        known = self._known.get(moved.ref.key)
        if known is not None and known.ref == moved.ref:
            known.worker_id, known.moving_s, known.heard_s = moved.target, None, now_s
        if known is not None:
            known.calm_until_s = now_s + self.rules.calm_s

    def _on_failed(self, ref: SequenceRef, now_s: float) -> None:
        known = self._known.get(ref.key)
        if known is None or known.moving_s is None or self._policy is None:
            return
        self.counts.failed += 1
        known.moving_s, known.calm_until_s = None, now_s + self.rules.calm_s
        self._take_back(self._policy, ref.key, known)

    def _take_back(self, policy: PackingPolicy, key: SequenceKey, known: PackedSequence) -> None:
        """Set the policy's state to where the sequence actually runs."""
        if known.worker_id is None or known.worker_id not in self._roster.present:
            return
        policy.end(key)
        effects = policy.adopt(key, known.blocks, known.worker_id)
        known.moving_s = None
        self._note(effects)

    def _forget(self, key: SequenceKey) -> None:
        self._known.pop(key, None)
        if self._policy is not None:
            self._policy.end(key)

    def idle_workers(self, fleet: FleetCapacity) -> list[str]:
        """Return workers without sequences, both in the policy and in their heartbeats."""
        used = {self._policy.worker_of(key) for key in self._known} if self._policy else set()
        return sorted(
            name
            for name in self._roster.present
            if name in fleet.workers and name not in used and not fleet.workers[name].residents
        )

    def retire(self, worker_id: str, fleet: FleetCapacity) -> None:
        """Stop using a worker in this incarnation, because it is about to be stopped."""
        self._roster.retire(worker_id, fleet)
        if worker_id in self._roster.present:
            self._drop_worker(worker_id)

    def unretire(self, worker_id: str) -> None:
        """Use a retired worker again."""
        self._roster.unretire(worker_id)

    def state_of(self, worker_id: str) -> str:
        """Return a worker's state for `status`: the class of its largest item, idle, draining or retired."""
        categories = getattr(self._policy, "categories", None)
        used = [key for key in self._known if self._policy and self._policy.worker_of(key) == worker_id]
        if used and worker_id in self._roster.present:
            return str(categories()[worker_id]) if categories is not None else "active"
        residents = any(known.worker_id == worker_id for known in self._known.values())
        return self._roster.state_of(worker_id, has_residents=residents)

    def check_integrity(self) -> None:
        """Raise AssertionError if the packer's state and the policy's are inconsistent."""
        if self._policy is None:
            assert not self._known and not self._roster.present
            return
        self._policy.check_integrity()
        for key in self._known:
            assert self._policy.worker_of(key) in self._roster.present, f"{key} is known and has no place"

    def _blocks(self, blocks: int) -> int:
        least = -(-self._capacity // self.rules.most_sequences)
        return max(1, least, min(blocks, self._capacity))


class WorkerRoster:
    """Workers in use, each in one incarnation, and retired ones. A restarted worker is a new one."""

    def __init__(self) -> None:
        self.present: dict[str, int] = {}
        """Incarnation of each worker that the policy knows."""
        self._retired: dict[str, int] = {}
        """Incarnation of each retired worker."""

    def heard(self, fleet: FleetCapacity) -> dict[str, int]:
        """Return the incarnation of each worker that is not retired."""
        return {
            name: worker.incarnation
            for name, worker in fleet.workers.items()
            if self._retired.get(name) != worker.incarnation
        }

    def seen(self, fleet: FleetCapacity) -> dict[SequenceKey, tuple[str, Resident]]:
        """Return the worker and resident of each sequence's highest attempt, rehearsals of moves excluded."""
        seen: dict[SequenceKey, tuple[str, Resident]] = {}
        for worker in fleet.workers.values():
            if self.present.get(worker.worker_id) != worker.incarnation:
                continue
            for key, resident in worker.residents.items():
                before = seen.get(key)
                is_newer = before is None or before[1].attempt < resident.attempt
                if resident.is_read and is_newer:
                    seen[key] = (worker.worker_id, resident)
        return seen

    def retire(self, worker_id: str, fleet: FleetCapacity) -> None:
        """Stop using a worker in this incarnation."""
        worker = fleet.workers.get(worker_id)
        if worker is not None:
            self._retired[worker_id] = worker.incarnation

    def unretire(self, worker_id: str) -> None:
        """Use a retired worker again."""
        self._retired.pop(worker_id, None)

    def state_of(self, worker_id: str, *, has_residents: bool) -> str:
        """Return the state, for `status`, of a worker that holds no sequence in the policy."""
        if worker_id not in self.present:
            return "retired" if worker_id in self._retired else "unknown"
        return "draining" if has_residents else "idle"

    def emptiest(self, homes: Iterable[tuple[object, int]], most_blocks: int) -> list[str]:
        """Return workers with at most `most_blocks` in use by `homes` (worker, blocks), emptiest first."""
        used = dict.fromkeys(self.present, 0)
        for home, blocks in homes:
            if home in used:
                used[home] += blocks
        return [
            name for _, name in sorted((size, name) for name, size in used.items() if size <= most_blocks)
        ]


def _size(resident: Resident) -> int:
    return max(resident.allocated_blocks, resident.needed_blocks + GROWTH_BLOCKS)
