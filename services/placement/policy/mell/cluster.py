"""MELL's model of the workers: size classes and settings, and items on GPUs with constant-time indexes.

An item is one request, or a bundle of small requests (`placing.py`). The placement rules are elsewhere.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from services.placement.policy.contract import RequestKey
from services.placement.policy.size_index import SizeIndex


class SizeClass(IntEnum):
    """Size class of an item relative to its worker's capacity. A GPU's category is its largest item's."""

    TINY = 0
    SMALL = 1
    MEDIUM = 2
    LARGE = 3


WEIGHT_SIXTHS = (0, 2, 3, 6)
"""Weight of an item by class (Lemma 2.1), in sixths of a GPU. A GPU of weight 6 is complete."""
COMPLETE_SIXTHS = 6


def class_of(blocks: int, capacity: int) -> SizeClass:
    """Return L for (C/2, C], M for (C/3, C/2], S for (C/4, C/3], else T."""
    if 2 * blocks > capacity:
        return SizeClass.LARGE
    if 3 * blocks > capacity:
        return SizeClass.MEDIUM
    return SizeClass.SMALL if 4 * blocks > capacity else SizeClass.TINY


def is_crumb(blocks: int, capacity: int) -> bool:
    """Return whether a request is so small that it is bundled: at most C/8."""
    return 8 * blocks <= capacity


def lower_bound(sizes: Iterable[int], capacity: int) -> int:
    """Return max(ceil(ΣS/C), #L + ceil(max(0, #M − #L)/2)): no packing of `sizes` uses fewer workers."""
    total = larges = mediums = 0
    for size in sizes:
        total += size
        size_class = class_of(size, capacity)
        larges += size_class == SizeClass.LARGE
        mediums += size_class == SizeClass.MEDIUM
    return max(-(-total // capacity), larges + -(-max(0, mediums - larges) // 2))


FREE_WEIGHT, REQUESTS_WEIGHT, DISTANCE_WEIGHT = 1.0, 0.01, 0.05
"""Priority of a target per share of free memory, less these per request on it and for another host."""
CANDIDATES = 3
"""Number of GPUs with most free memory that are compared, per category."""
EVACUATION_ITEMS = 8
"""Maximum items on a GPU that is emptied if all fit elsewhere."""
MAX_MOVES = 10
"""Maximum moves per operation, a bundle counting once (Theorem 3). Further repairs wait."""


@dataclass(frozen=True, slots=True)
class MellSettings:
    """How eagerly MELL repairs. Shares are of one worker's capacity, or of that of all active workers."""

    headroom_share: float = 0.035
    """Share left free for growth on the target of a repair. Evictions and arrivals may use it."""
    dense_share: float = 0.93
    """Utilization of active memory above which only unavoidable moves happen: see `placing.py:Repairs`."""
    repair_share: float = 0.80
    """Utilization below which Theorem 1 is restored; above 3/4 Theorem 2 holds by volume alone."""


EAGER = MellSettings(headroom_share=0.0, dense_share=1.0, repair_share=1.0)
"""The paper's behaviour: every property is restored at once, regardless of the number of moves."""


TINY, SMALL, MEDIUM, LARGE = SizeClass.TINY, SizeClass.SMALL, SizeClass.MEDIUM, SizeClass.LARGE
_COMPANION_CLASSES = (SMALL, MEDIUM)


@dataclass(eq=False, slots=True)
class Item:
    """Unit of placement and moves: one request or a bundle of small ones."""

    members: dict[RequestKey, int]
    """Blocks by request."""
    size: int
    size_class: SizeClass
    is_bundle: bool
    gpu: "Gpu | None" = None
    exposed_size: int = -1
    """Size under which `companions` indexes it; -1: not indexed."""


@dataclass(eq=False, slots=True)
class Gpu:
    """One active worker: its items, and the values under which the cluster has indexed it."""

    worker_id: str
    held: tuple[dict[Item, None], ...] = field(default_factory=lambda: ({}, {}, {}, {}))
    """Items by size class, youngest last."""
    used: int = 0
    requests: int = 0
    category: SizeClass | None = None
    """Class of its largest item; None while it is empty."""
    free: int = 0
    """Free blocks as indexed; never negative."""
    companion_room: int = -1
    """Blocks free beside the L of an L-GPU without S or M; -1 for any other GPU."""
    open_class: SizeClass | None = None
    """M or S while the items of such a GPU weigh less than a whole GPU."""

    def items(self) -> list[Item]:
        """Return all items, largest class first."""
        return [item for shelf in reversed(self.held) for item in shelf]

    def check_integrity(self, capacity: int) -> None:
        """Raise AssertionError if its figures do not match its items."""
        items = self.items()
        assert items, "an active worker without requests"
        assert self.used == sum(item.size for item in items) <= capacity, "over capacity"
        assert self.free == capacity - self.used
        assert self.requests == sum(len(item.members) for item in items)
        assert self.category == max(item.size_class for item in items)
        for item in items:
            assert item.gpu is self and item.size == sum(item.members.values())
            assert item.is_bundle or (len(item.members) == 1 and not is_crumb(item.size, capacity))
            assert not item.is_bundle or 4 * item.size <= capacity, "a bundle that should have been split"
            assert item.size_class == class_of(item.size, capacity)
        under_full = [item for item in items if item.is_bundle and is_crumb(item.size, capacity)]
        assert len(under_full) <= 1, "bundles that should have been joined"


class Cluster:
    """All workers, the item of every request, and indexes over both. Only `put`, `take` and `resize` may
    change an item's place or size: they update the indexes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.idle: deque[str] = deque()
        self.active: dict[str, Gpu] = {}
        self.homes: dict[RequestKey, Item] = {}
        self.by_free: tuple[SizeIndex[Gpu], ...] = tuple(SizeIndex() for _ in SizeClass)
        """GPUs of each category, indexed by free blocks."""
        self.loners: SizeIndex[Gpu] = SizeIndex()
        """L-GPUs without S or M, indexed by `companion_room`."""
        self.companions: SizeIndex[Item] = SizeIndex()
        """S and M items on M- and S-GPUs, indexed by size."""
        self.open: dict[SizeClass, dict[Gpu, None]] = {SMALL: {}, MEDIUM: {}}
        self.vacated: dict[Gpu, None] = {}
        """Empty GPUs that stay active until `retire`."""
        self.activated: dict[str, None] = {}
        self.terminated: dict[str, None] = {}
        """Workers terminated since the journal last cleared this."""
        self.used = 0
        """Blocks in use on all workers."""

    def activate(self) -> Gpu | None:
        """Return an empty GPU: a vacated one, else an idle worker's. None if there is none."""
        if self.vacated:
            return next(iter(self.vacated))
        return self._start(self.idle.popleft()) if self.idle else None

    def opened(self, worker_id: str) -> Gpu:
        """Return the worker's GPU, activated if it was idle. Raises KeyError for an unknown worker."""
        gpu = self.active.get(worker_id)
        if gpu is not None:
            return gpu
        if worker_id not in self.idle:
            raise KeyError(worker_id)
        self.idle.remove(worker_id)
        return self._start(worker_id)

    def _start(self, worker_id: str) -> Gpu:
        gpu = Gpu(worker_id)
        self.active[gpu.worker_id] = gpu
        self.vacated[gpu] = None
        self.activated[gpu.worker_id] = None
        return gpu

    def retire(self) -> None:
        """Return empty GPUs to the idle workers."""
        for gpu in self.vacated:
            del self.active[gpu.worker_id]
            self.idle.appendleft(gpu.worker_id)
            if self.activated.pop(gpu.worker_id, self) is self:
                self.terminated[gpu.worker_id] = None
        self.vacated.clear()

    def put(self, item: Item, gpu: Gpu) -> None:
        """Put an item on a GPU. It may exceed the capacity until the caller makes room."""
        item.gpu = gpu
        gpu.held[item.size_class][item] = None
        gpu.used += item.size
        self.used += item.size
        gpu.requests += len(item.members)
        self._refresh(gpu)
        self._expose(item, gpu.category != LARGE)

    def take(self, item: Item) -> Gpu:
        """Take an item off its GPU and return that GPU."""
        gpu = item.gpu
        assert gpu is not None
        self._expose(item, False)
        del gpu.held[item.size_class][item]
        gpu.used -= item.size
        self.used -= item.size
        gpu.requests -= len(item.members)
        item.gpu = None
        self._refresh(gpu)
        return gpu

    def resize(self, item: Item, size: int) -> None:
        """Change an item's size in place and update its class."""
        gpu = item.gpu
        assert gpu is not None
        size_class = TINY if item.is_bundle else class_of(size, self.capacity)
        if size_class != item.size_class:
            del gpu.held[item.size_class][item]
            gpu.held[size_class][item] = None
            item.size_class = size_class
        gpu.used += size - item.size
        self.used += size - item.size
        item.size = size
        self._refresh(gpu)
        self._expose(item, gpu.category != LARGE)

    def _expose(self, item: Item, is_exposed: bool) -> None:
        """Index an S or M item as a possible companion of an L, or remove it from that index."""
        size = item.size if is_exposed and item.size_class in _COMPANION_CLASSES else -1
        if size == item.exposed_size:
            return
        if item.exposed_size >= 0:
            self.companions.remove(item.exposed_size, item)
        if size >= 0:
            self.companions.add(size, item)
        item.exposed_size = size

    def _refresh(self, gpu: Gpu) -> None:
        """Update the GPU's indexes after a change of its items."""
        tiny, small, medium, large = gpu.held
        category = LARGE if large else MEDIUM if medium else SMALL if small else TINY if tiny else None
        free = max(0, self.capacity - gpu.used)
        if category != gpu.category or free != gpu.free:
            if gpu.category is not None:
                self.by_free[gpu.category].remove(gpu.free, gpu)
            if category is not None:
                self.by_free[category].add(free, gpu)
            gpu.free = free
        if category != gpu.category:
            self._recategorize(gpu, category)
        if category == LARGE or gpu.companion_room >= 0:
            self._refresh_loner(gpu)
        if small or medium or gpu.open_class is not None:
            self._refresh_open(gpu)

    def _recategorize(self, gpu: Gpu, category: SizeClass | None) -> None:
        before, gpu.category = gpu.category, category
        if before is None:
            self.vacated.pop(gpu, None)
        if category is None:
            self.vacated[gpu] = None
        if (before == LARGE) != (category == LARGE):
            for size_class in _COMPANION_CLASSES:
                for item in gpu.held[size_class]:
                    self._expose(item, category != LARGE)

    def _refresh_loner(self, gpu: Gpu) -> None:
        room = -1
        if gpu.category == LARGE and not gpu.held[SMALL] and not gpu.held[MEDIUM]:
            room = max(0, self.capacity - sum(item.size for item in gpu.held[LARGE]))
        if room != gpu.companion_room:
            if gpu.companion_room >= 0:
                self.loners.remove(gpu.companion_room, gpu)
            if room >= 0:
                self.loners.add(room, gpu)
            gpu.companion_room = room

    def _refresh_open(self, gpu: Gpu) -> None:
        open_class = None
        if gpu.category in (SMALL, MEDIUM):
            small, medium = len(gpu.held[SMALL]), len(gpu.held[MEDIUM])
            weight = WEIGHT_SIXTHS[SMALL] * small + WEIGHT_SIXTHS[MEDIUM] * medium
            open_class = gpu.category if weight < COMPLETE_SIXTHS else None
        if open_class != gpu.open_class:
            if gpu.open_class is not None:
                del self.open[gpu.open_class][gpu]
            if open_class is not None:
                self.open[open_class][gpu] = None
            gpu.open_class = open_class

    def remove_worker(self, worker_id: str) -> list[RequestKey]:
        """Remove a worker, forget its requests and return them. Raises KeyError."""
        if worker_id in self.idle:
            self.idle.remove(worker_id)
            return []
        gpu = self.active[worker_id]
        lost = [request for item in gpu.items() for request in item.members]
        for item in gpu.items():
            self.take(item)
        for request in lost:
            del self.homes[request]
        self.vacated.pop(gpu, None)
        del self.active[worker_id]
        return lost

    def check_integrity(self) -> None:
        assert not set(self.active) & set(self.idle), "idle and active"
        assert not self.vacated, "an active worker without requests"
        for gpu in self.active.values():
            gpu.check_integrity(self.capacity)
        items = [item for gpu in self.active.values() for item in gpu.items()]
        assert {id(item) for item in items} == {id(item) for item in self.homes.values()}
        assert sum(len(item.members) for item in items) == len(self.homes), "a request in two places"
        assert self.used == sum(gpu.used for gpu in self.active.values())
        for category, index in zip(SizeClass, self.by_free, strict=True):
            expected = {(gpu.free, gpu.worker_id) for gpu in self.active.values() if gpu.category == category}
            assert {(free, gpu.worker_id) for free, gpu in index} == expected, "the index of room is stale"
        exposed = {
            (item.size, id(item))
            for item in items
            if item.gpu is not None and item.gpu.category != LARGE and item.size_class in _COMPANION_CLASSES
        }
        assert {(size, id(item)) for size, item in self.companions} == exposed
        for size_class, opened in self.open.items():
            assert set(opened) == {gpu for gpu in self.active.values() if gpu.open_class == size_class}
        alone = {(g.companion_room, g.worker_id) for g in self.active.values() if g.companion_room >= 0}
        assert {(room, gpu.worker_id) for room, gpu in self.loners} == alone
