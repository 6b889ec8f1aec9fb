"""MELL's *allocate*: chooses the GPU for an item by priority (papers/000 figure 10).

T-items may use any GPU with room; the paper skips some and violates its own property 5. Requests of at most
C/8 are bundled into items of at most C/4 (§VI-C). The `Journal` is the paper's operation buffer.
"""

from services.placement.policy.contract import PackedMove, PackingEffects, RequestKey
from services.placement.policy.mell.cluster import MEDIUM, SMALL, TINY, Cluster, Gpu, Item
from services.placement.policy.mell.settings import (
    CANDIDATES,
    DISTANCE_WEIGHT,
    FREE_WEIGHT,
    REQUESTS_WEIGHT,
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

    def place(self, item: Item, source: Gpu | None = None) -> bool:
        """Put an unplaced item on any GPU but `source`. Returns False if there is no room."""
        if item.size_class in (SMALL, MEDIUM):
            target = self._for_middle(item, source)
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
                if gpu is not source and gpu.free >= blocks:
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
