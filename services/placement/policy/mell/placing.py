"""Where an item goes: MELL's *allocate*, and the choice of a target by priority (papers/000 figure 10).

Looser than the paper in one place: T-items go to any GPU with room, S-GPUs and fuller M-GPUs included; the
paper skips those, and breaks its own property 5.
"""

from services.placement.policy.mell.bundles import Bundles
from services.placement.policy.mell.cluster import MEDIUM, SMALL, TINY, Cluster, Gpu, Item
from services.placement.policy.mell.journal import Journal
from services.placement.policy.mell.settings import MellSettings


class Placing:
    """Finds a GPU for an item, makes room for one, and moves items from one to another."""

    def __init__(self, cluster: Cluster, bundles: Bundles, journal: Journal, settings: MellSettings) -> None:
        self._cluster = cluster
        self._bundles = bundles
        self._journal = journal
        self._settings = settings
        self.headroom = int(settings.headroom_share * cluster.capacity)
        self.locations: dict[str, tuple[str, str]] = {}
        """(host, switch) of a worker."""

    def place(self, item: Item, source: Gpu | None = None) -> bool:
        """Puts an item that is on no GPU somewhere else than `source`. False: there is no room."""
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
        """A move: `target` has room."""
        source = self._cluster.take(item)
        self._journal.moved(item, source)
        self._bundles.put(item, target)

    def evict(self, item: Item) -> bool:
        """Moves it to wherever there is room; it stays, and False is returned, when there is none."""
        source = self._cluster.take(item)
        if not self.place(item, source):
            self._bundles.put(item, source)
            return False
        self._journal.moved(item, source)
        return True

    def make_room(self, gpu: Gpu, blocks: int) -> bool:
        """Evicts T-items until `blocks` are free: the smallest that suffices, else the largest."""
        capacity = self._cluster.capacity
        while gpu.used + blocks > capacity:
            if not self._could_free(gpu, blocks):
                return False
            lacking = gpu.used + blocks - capacity
            enough = [item for item in gpu.held[TINY] if item.size >= lacking]
            item = min(enough, key=item_size) if enough else max(gpu.held[TINY], key=item_size)
            if not self.evict(item):
                return False
        return True

    def roomiest(self, blocks: int, source: Gpu | None) -> Gpu | None:
        """That of the highest priority among the GPUs with most free memory of each category."""
        best, least = None, 0.0
        capacity, candidates = self._cluster.capacity, self._settings.candidates
        for by_free in self._cluster.by_free:
            if by_free.largest() < blocks:
                continue
            for gpu in by_free.descending(capacity, candidates):
                if gpu is not source and gpu.free >= blocks:
                    demerit = self._demerit(gpu, source)
                    if best is None or demerit < least:
                        best, least = gpu, demerit
        return best

    def _for_middle(self, item: Item, source: Gpu | None) -> Gpu | None:
        """S and M: beside an L, else where there is room, else on an open GPU that T-items leave."""
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

    def _could_free(self, gpu: Gpu, blocks: int) -> bool:
        """Whether there would be room without its T-items."""
        tiny = sum(item.size for item in gpu.held[TINY])
        return gpu.used - tiny + blocks <= self._cluster.capacity

    def _demerit(self, gpu: Gpu, source: Gpu | None) -> float:
        """The lower, the higher its priority."""
        settings = self._settings
        crowd = (
            settings.requests_weight * gpu.requests - settings.free_weight * gpu.free / self._cluster.capacity
        )
        return crowd + settings.distance_weight * self._distance(gpu, source)

    def _distance(self, gpu: Gpu, source: Gpu | None) -> int:
        """0 same host, or not known; 1 same switch; 2 elsewhere."""
        if source is None:
            return 0
        here, there = self.locations[source.worker_id], self.locations[gpu.worker_id]
        if here == there:
            return 0
        return 1 if here[1] == there[1] else 2


def item_size(item: Item) -> int:
    """To compare by."""
    return item.size
