"""MELL's model of the workers: items on GPUs, and the indexes that make every question constant-time.

An item is one request, or a bundle of requests too small to stand alone (`bundles.py` says which). It knows
capacity and classes, and no rule about where anything should go.
"""

from collections import deque
from dataclasses import dataclass, field

from services.placement.policy.contract import RequestKey
from services.placement.policy.mell.settings import (
    COMPLETE_SIXTHS,
    WEIGHT_SIXTHS,
    SizeClass,
    class_of,
    is_crumb,
)
from services.placement.policy.size_index import SizeIndex

TINY, SMALL, MEDIUM, LARGE = SizeClass.TINY, SizeClass.SMALL, SizeClass.MEDIUM, SizeClass.LARGE
_COMPANION_CLASSES = (SMALL, MEDIUM)


@dataclass(eq=False, slots=True)
class Item:
    """What is placed and moved as one: a request, or a bundle of small ones."""

    members: dict[RequestKey, int]
    """Blocks by request."""
    size: int
    size_class: SizeClass
    is_bundle: bool
    gpu: "Gpu | None" = None
    exposed_size: int = -1
    """Under which it is among the companions; -1: it is not."""


def _shelves() -> tuple[dict[Item, None], ...]:
    return ({}, {}, {}, {})


@dataclass(eq=False, slots=True)
class Gpu:
    """One active worker: the items it holds, and the figures under which the cluster has indexed it."""

    worker_id: str
    serial: int
    """Counts activations: the larger, the later."""
    held: tuple[dict[Item, None], ...] = field(default_factory=_shelves)
    """By class; the youngest last."""
    used: int = 0
    requests: int = 0
    category: SizeClass | None = None
    """None while it holds nothing."""
    free: int = 0
    """As indexed: never negative."""
    companion_room: int = -1
    """Of an L-GPU without S or M: what it could take beside its L. -1: it is none."""
    open_class: SizeClass | None = None
    """M or S, while its items weigh less than a whole GPU."""

    def items(self) -> list[Item]:
        """The largest class first."""
        return [item for shelf in reversed(self.held) for item in shelf]

    def check_integrity(self, capacity: int) -> None:
        """Raises AssertionError."""
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
    """All workers, idle and active, where every request is, and indexes over both.

    Indexes are kept by `put`, `take` and `resize`: nothing else may change an item's place or size.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.idle: deque[str] = deque()
        self.active: dict[str, Gpu] = {}
        self.homes: dict[RequestKey, Item] = {}
        self.by_free: tuple[SizeIndex[Gpu], ...] = tuple(SizeIndex() for _ in SizeClass)
        """GPUs of each category by free blocks."""
        self.loners: SizeIndex[Gpu] = SizeIndex()
        """L-GPUs without S or M, by `companion_room`."""
        self.companions: SizeIndex[Item] = SizeIndex()
        """S and M on M- and S-GPUs."""
        self.open: dict[SizeClass, dict[Gpu, None]] = {SMALL: {}, MEDIUM: {}}
        self.vacated: dict[Gpu, None] = {}
        """Hold nothing, and are still active until `retire`."""
        self.activated: dict[str, None] = {}
        self.terminated: dict[str, None] = {}
        """Since somebody last cleared them."""
        self.used = 0
        """Blocks, of all."""
        self._serial = 0

    def activate(self) -> Gpu | None:
        """A GPU that holds nothing: one just emptied, else an idle worker. None when there is none."""
        if self.vacated:
            return next(iter(self.vacated))
        return self._start(self.idle.popleft()) if self.idle else None

    def opened(self, worker_id: str) -> Gpu:
        """This worker's GPU, activated if it was idle. Raises KeyError for one that is not known."""
        gpu = self.active.get(worker_id)
        if gpu is not None:
            return gpu
        if worker_id not in self.idle:
            raise KeyError(worker_id)
        self.idle.remove(worker_id)
        return self._start(worker_id)

    def _start(self, worker_id: str) -> Gpu:
        self._serial += 1
        gpu = Gpu(worker_id, self._serial)
        self.active[gpu.worker_id] = gpu
        self.vacated[gpu] = None
        self.activated[gpu.worker_id] = None
        return gpu

    def retire(self) -> None:
        """GPUs that hold nothing become idle workers again."""
        for gpu in self.vacated:
            del self.active[gpu.worker_id]
            self.idle.appendleft(gpu.worker_id)
            if self.activated.pop(gpu.worker_id, self) is self:
                self.terminated[gpu.worker_id] = None
        self.vacated.clear()

    def put(self, item: Item, gpu: Gpu) -> None:
        """May exceed the capacity: the caller makes room before the operation ends."""
        item.gpu = gpu
        gpu.held[item.size_class][item] = None
        gpu.used += item.size
        self.used += item.size
        gpu.requests += len(item.members)
        self._refresh(gpu)
        self._expose(item, gpu.category != LARGE)

    def take(self, item: Item) -> Gpu:
        """Off its GPU, which is returned."""
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
        """Grown or shrunk where it is; its class follows."""
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
        """S and M that are beside no L can become an L's companion."""
        size = item.size if is_exposed and item.size_class in _COMPANION_CLASSES else -1
        if size == item.exposed_size:
            return
        if item.exposed_size >= 0:
            self.companions.remove(item.exposed_size, item)
        if size >= 0:
            self.companions.add(size, item)
        item.exposed_size = size

    def _refresh(self, gpu: Gpu) -> None:
        """Brings the GPU's indexes up to date after its items changed."""
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
        """It is gone; its requests are forgotten and returned. Raises KeyError."""
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
        """Raises AssertionError when the books contradict themselves."""
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
