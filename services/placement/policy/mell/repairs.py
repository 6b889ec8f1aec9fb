"""Restores the properties of Theorem 1 and empties GPUs, within a move budget (papers/000 §VII).

Repairs are lazy. The properties keep the GPU count within 4/3 of any packing, and above 3/4 utilization
volume alone guarantees that; eager repairs tripled the moves and saved 3 % of the GPUs. Work beyond the
budget waits for the next operation.
"""

from services.placement.policy.mell.cluster import LARGE, MEDIUM, SMALL, TINY, Cluster, Gpu, Item
from services.placement.policy.mell.placing import Journal, Placing, item_size
from services.placement.policy.mell.settings import CANDIDATES, EVACUATION_ITEMS, MellSettings, SizeClass

_STEP_MOVES = 5
"""Maximum moves of one step: an S or M, and the T-items evicted for it."""


class Repairs:
    """Restores the properties of Theorem 1, one rule each, until none is violated."""

    def __init__(self, cluster: Cluster, placing: Placing, journal: Journal, settings: MellSettings) -> None:
        self._cluster = cluster
        self._placing = placing
        self._journal = journal
        self._settings = settings

    def run(self, budget: int, *, can_empty: bool) -> None:
        """Repair with at most `budget` moves since the journal opened. `can_empty`: a request ended."""
        while (
            can_empty
            and not self._is_dense(self._settings.dense_share)
            and self._evacuate(budget - self._journal.steps)
        ):
            pass
        if self._is_dense(self._settings.repair_share):
            return
        limit = budget - _STEP_MOVES
        while self._journal.steps <= limit and (
            self._fill_loner() or self._join_open(MEDIUM) or self._join_open(SMALL) or self._join_tiny()
        ):
            pass
        while self._journal.steps < budget and self._spread_tiny():
            pass

    def _is_dense(self, share: float) -> bool:
        cluster = self._cluster
        active = len(cluster.active) - len(cluster.vacated)
        return cluster.used >= share * cluster.capacity * active

    def _fill_loner(self) -> bool:
        """Property 4: give an L-GPU without S or M one of them, preferably from an incomplete GPU."""
        cluster, headroom = self._cluster, self._placing.headroom
        room = cluster.loners.largest() - headroom
        if not cluster.companions or room < cluster.companions.smallest():
            return False
        gpu = cluster.loners.descending(room + headroom, 1)[0]
        fitting = [
            item
            for open_gpu in (*cluster.open[MEDIUM], *cluster.open[SMALL])
            for item in (*open_gpu.held[MEDIUM], *open_gpu.held[SMALL])
            if item.size <= room
        ]
        item = max(fitting, key=item_size) if fitting else cluster.companions.descending(room, 1)[0]
        if not self._placing.make_room(gpu, item.size):
            return False
        self._placing.relocate(item, gpu)
        return True

    def _join_open(self, size_class: SizeClass) -> bool:
        """Properties 1 and 2: of two incomplete M- (or S-) GPUs, the lighter gives an item to the other."""
        opened = list(self._cluster.open[size_class])
        if len(opened) < 2:
            return False
        weights = {gpu: 2 * len(gpu.held[SMALL]) + 3 * len(gpu.held[MEDIUM]) for gpu in opened}
        giver, taker = sorted(opened, key=lambda gpu: (weights[gpu], gpu.used))[:2]
        item = next(iter(giver.held[size_class]))
        if size_class == MEDIUM:
            for blocking in list(taker.held[SMALL]):
                self._placing.evict(blocking)
        if not self._placing.make_room(taker, item.size):
            return False
        self._placing.relocate(item, taker)
        return True

    def _join_tiny(self) -> bool:
        """Property 3: of two T-GPUs below three quarters, the emptier gives an item to the other."""
        capacity = self._cluster.capacity
        emptiest = self._cluster.by_free[TINY].descending(capacity, 2)
        if len(emptiest) < 2 or 4 * emptiest[1].free <= capacity:
            return False
        giver, taker = emptiest
        fitting = [item for item in giver.held[TINY] if item.size <= taker.free]
        if not fitting:
            return False
        self._placing.relocate(max(fitting, key=item_size), taker)
        return True

    def _spread_tiny(self) -> bool:
        """Property 5: move T-items from the emptiest T-GPU to an L-, M- or S-GPU below three quarters."""
        by_free, capacity = self._cluster.by_free, self._cluster.capacity
        category = max((LARGE, MEDIUM, SMALL), key=lambda one: by_free[one].largest())
        free = by_free[category].largest()
        if not by_free[TINY] or 4 * free <= capacity:
            return False
        taker = by_free[category].descending(free, 1)[0]
        giver = by_free[TINY].descending(capacity, 1)[0]
        item = max((one for one in giver.held[TINY] if one.size <= free), key=item_size)
        self._placing.relocate(item, taker)
        return True

    def _evacuate(self, budget: int) -> bool:
        """Empty one of the emptiest GPUs if few moves suffice and all items keep room to grow."""
        capacity, most = self._cluster.capacity, min(budget, EVACUATION_ITEMS)
        emptiest = [gpu for by_free in self._cluster.by_free for gpu in by_free.descending(capacity, 2)]
        for giver in sorted(emptiest, key=lambda gpu: gpu.used)[:CANDIDATES]:
            items = giver.items()
            targets = self._targets(giver, items) if len(items) <= most else []
            for item, target in targets:
                self._placing.relocate(item, target)
            if targets:
                return True
        return False

    def _targets(self, giver: Gpu, items: list[Item]) -> list[tuple[Item, Gpu]]:
        """Return the roomiest GPU per item, largest item first; empty if one finds none."""
        left = {
            gpu: gpu.free
            for index in self._cluster.by_free
            for gpu in index.descending(self._cluster.capacity, CANDIDATES)
            if gpu is not giver
        }
        found: list[tuple[Item, Gpu]] = []
        for item in sorted(items, key=item_size, reverse=True):
            target = max(left, key=left.__getitem__, default=None)
            if target is None or left[target] < item.size + self._placing.headroom:
                return []
            left[target] -= item.size
            found.append((item, target))
        return found
