"""MELL's *allocate*, which chooses the GPU for an item by priority (papers/000 figure 10), and its repairs.

T-items may use any GPU with room; the paper skips some and violates its own property 5. Requests of at most
C/8 are bundled into items of at most C/4 (§VI-C). The `Journal` is the paper's operation buffer.
"""

from services.placement.policy.contract import PackedMove, PackingEffects, RequestKey
from services.placement.policy.mell.cluster import (
    CANDIDATES,
    DISTANCE_WEIGHT,
    EVACUATION_ITEMS,
    FREE_WEIGHT,
    LARGE,
    MEDIUM,
    REQUESTS_WEIGHT,
    SMALL,
    TINY,
    Cluster,
    Gpu,
    Item,
    MellSettings,
    SizeClass,
    class_of,
    is_crumb,
)


class Bundles:
    """Puts requests on GPUs and removes them: small ones in bundles, others as single items."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._capacity = cluster.capacity

    def item_for(self, request: RequestKey, blocks: int) -> Item:
        """Return a new item that is on no GPU yet."""
        is_bundle = is_crumb(blocks, self._capacity)
        size_class = SizeClass.TINY if is_bundle else class_of(blocks, self._capacity)
        return Item({request: blocks}, blocks, size_class, is_bundle)

    def put(self, item: Item, gpu: Gpu) -> None:
        """Put an item on a GPU; a bundle joins another bundle there with room for all of it."""
        host = self._roomy(gpu, item) if item.is_bundle else None
        if host is None:
            self._cluster.put(item, gpu)
            host = item
        else:
            host.members |= item.members
            gpu.requests += len(item.members)
            self._cluster.resize(host, host.size + item.size)
        for request in item.members:
            self._cluster.homes[request] = host

    def grow(self, request: RequestKey, blocks: int) -> Item:
        """Return the request's item after growth. It differs if the request left its bundle."""
        cluster = self._cluster
        item = cluster.homes[request]
        if not item.is_bundle:
            item.members[request] = blocks
            cluster.resize(item, blocks)
            return item
        if is_crumb(blocks, self._capacity):
            grown = item.size + blocks - item.members[request]
            if 4 * grown <= self._capacity:
                item.members[request] = blocks
                cluster.resize(item, grown)
                return item
        gpu = self.remove(request)
        self.put(self.item_for(request, blocks), gpu)
        return cluster.homes[request]

    def remove(self, request: RequestKey) -> Gpu:
        """Take a request off its GPU and return that GPU. Raises KeyError if it is not placed."""
        cluster = self._cluster
        item = cluster.homes.pop(request)
        gpu = item.gpu
        assert gpu is not None
        blocks = item.members.pop(request)
        gpu.requests -= 1
        if not item.members:
            cluster.take(item)
            return gpu
        cluster.resize(item, item.size - blocks)
        if is_crumb(item.size, self._capacity):
            self._join(item, gpu)
        return gpu

    def _join(self, item: Item, gpu: Gpu) -> None:
        """Merge an under-full bundle into another one on the GPU with room for it."""
        if self._roomy(gpu, item) is not None:
            self._cluster.take(item)
            self.put(item, gpu)

    def _roomy(self, gpu: Gpu, item: Item) -> Item | None:
        for other in gpu.held[SizeClass.TINY]:
            if other.is_bundle and other is not item and 4 * (other.size + item.size) <= self._capacity:
                return other
        return None


class Journal:
    """Collects changes until `close` and returns their net effects."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._origins: dict[RequestKey, str] = {}
        self._arrived: dict[RequestKey, None] = {}
        self._effects = PackingEffects()
        self.steps = 0
        """Item moves so far, before any are combined or dropped."""

    def moved(self, item: Item, source: Gpu) -> None:
        """Record that `item` was taken off `source` to be put elsewhere."""
        for request in item.members:
            if request not in self._arrived:
                self._origins.setdefault(request, source.worker_id)
        self.steps += 1

    def arrived(self, request: RequestKey) -> None:
        self._arrived[request] = None

    def ended(self, request: RequestKey) -> None:
        self._origins.pop(request, None)
        self._arrived.pop(request, None)

    def waits(self, request: RequestKey) -> None:
        self._effects.waiting.append(request)

    def displaced(self, request: RequestKey) -> None:
        """Record a request that fits nowhere. An arrival of the same epoch counts as waiting."""
        if request in self._arrived:
            del self._arrived[request]
            self._effects.waiting.append(request)
        else:
            self._origins.pop(request, None)
            self._effects.displaced.append(request)

    def close(self) -> PackingEffects:
        """Return the net effects and clear the journal."""
        effects, cluster = self._effects, self._cluster
        homes = cluster.homes
        items: set[tuple[str, int]] = set()
        for request, source in self._origins.items():
            item = homes[request]
            assert item.gpu is not None
            if item.gpu.worker_id != source:
                effects.moves.append(PackedMove(request, source, item.gpu.worker_id, item.members[request]))
                items.add((source, id(item)))
        for request in self._arrived:
            gpu = homes[request].gpu
            assert gpu is not None
            effects.placed[request] = gpu.worker_id
        effects.item_moves = len(items)
        effects.activated, cluster.activated = list(cluster.activated), {}
        effects.terminated, cluster.terminated = list(cluster.terminated), {}
        self._origins, self._arrived, self._effects, self.steps = {}, {}, PackingEffects(), 0
        return effects


class Placing:
    """Finds a GPU for an item, makes room for one, and moves items between GPUs."""

    def __init__(self, cluster: Cluster, bundles: Bundles, journal: Journal, settings: MellSettings) -> None:
        self._cluster = cluster
        self._bundles = bundles
        self._journal = journal
        self.headroom = int(settings.headroom_share * cluster.capacity)
        self.hosts: dict[str, str] = {}
        self._left: Gpu | None = None
        """Source of an S or M that looks for a place, and returns if it finds none: its place stays free."""

    def place(self, item: Item, source: Gpu | None = None) -> bool:
        """Put an unplaced item on any GPU but `source`. Returns False if there is no room."""
        if item.size_class in (SMALL, MEDIUM):
            self._left = source
            target = self._for_middle(item, source)
            self._left = None
        else:
            target = self.roomiest(item.size, source)
        if target is None:
            target = self._cluster.activate()
        if target is None or target is source:
            return False
        self._bundles.put(item, target)
        return True

    def relocate(self, item: Item, target: Gpu) -> None:
        """Move an item to `target`, which must have room."""
        source = self._cluster.take(item)
        self._journal.moved(item, source)
        self._bundles.put(item, target)

    def evict(self, item: Item) -> bool:
        """Move an item to any other GPU with room. Returns False, and leaves it, if there is none."""
        source = self._cluster.take(item)
        if not self.place(item, source):
            self._bundles.put(item, source)
            return False
        self._journal.moved(item, source)
        return True

    def make_room(self, gpu: Gpu, blocks: int) -> bool:
        """Evict T-items until `blocks` are free: the smallest that suffices, else the largest."""
        while (lacking := gpu.used + blocks - self._cluster.capacity) > 0:
            if sum(item.size for item in gpu.held[TINY]) < lacking:
                return False
            enough = [item for item in gpu.held[TINY] if item.size >= lacking]
            item = min(enough, key=item_size) if enough else max(gpu.held[TINY], key=item_size)
            if not self.evict(item):
                return False
        return True

    def roomiest(self, blocks: int, source: Gpu | None) -> Gpu | None:
        """Return the highest-priority GPU among the ones with most free memory of each category."""
        best, least = None, 0.0
        capacity = self._cluster.capacity
        for by_free in self._cluster.by_free:
            if by_free.largest() < blocks:
                continue
            for gpu in by_free.descending(capacity, CANDIDATES):
                if gpu is not source and gpu is not self._left and gpu.free >= blocks:
                    demerit = self._demerit(gpu, source)
                    if best is None or demerit < least:
                        best, least = gpu, demerit
        return best

    def _for_middle(self, item: Item, source: Gpu | None) -> Gpu | None:
        """Return a GPU for an S or M: beside an L, else one with room, else one freed of T-items."""
        cluster, blocks = self._cluster, item.size
        for gpu in cluster.loners.descending(cluster.capacity, 2):
            wanted = blocks + self.headroom
            if gpu is not source and gpu.companion_room >= wanted and self.make_room(gpu, blocks):
                return gpu
        for gpu in cluster.open[item.size_class]:
            if gpu is not source and gpu.free >= blocks:
                return gpu
        found = self.roomiest(blocks, source)
        if found is not None:
            return found
        for gpu in (*cluster.open[MEDIUM], *cluster.open[SMALL]):
            if gpu is not source and self.make_room(gpu, blocks):
                return gpu
        return None

    def _demerit(self, gpu: Gpu, source: Gpu | None) -> float:
        """Return the penalty of a target; the lowest wins."""
        crowd = REQUESTS_WEIGHT * gpu.requests - FREE_WEIGHT * gpu.free / self._cluster.capacity
        is_far = source is not None and self.hosts[source.worker_id] != self.hosts[gpu.worker_id]
        return crowd + DISTANCE_WEIGHT * is_far


def item_size(item: Item) -> int:
    """Return the item's size, as a sort key."""
    return item.size


_STEP_MOVES = 5
"""Maximum moves of one step: an S or M, and the T-items evicted for it."""


class Repairs:
    """Restores the properties of Theorem 1, one rule each, and empties GPUs, within a move budget.

    Repairs are lazy. The properties keep the GPU count within 4/3 of any packing, and above 3/4 utilization
    volume alone guarantees that; eager repairs tripled the moves and saved 3 % of the GPUs. Work beyond the
    budget waits for the next operation. Source: papers/000 §VII.
    """

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
