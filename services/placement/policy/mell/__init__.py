"""MELL packs requests on as few workers as possible, with a bounded number of moves (papers/000 §VI).

Pure. Where the paper is silent or violates its own properties, it follows design §3.
"""

from collections.abc import Iterable

from services.placement.policy.contract import (
    Action,
    Operation,
    PackingEffects,
    RequestKey,
    check_blocks,
    check_new,
)
from services.placement.policy.mell.cluster import MAX_MOVES, Cluster, Gpu, MellSettings
from services.placement.policy.mell.placing import Bundles, Journal, Placing, Repairs


class Mell:
    """The MELL packing policy for workers of `capacity_blocks` each.

    The cost of an operation depends on the items of the few GPUs it touches. An example with C = 100: a
    request of 60 (L) opens GPU a. One of 40 (M) joins it, and one of 30 (S) opens GPU b. When the first grows
    to 70, the M is evicted and moves to b, where 70 are free. When the L ends, a is empty and is terminated.
    """

    def __init__(self, capacity_blocks: int, settings: MellSettings | None = None) -> None:
        self.capacity_blocks = capacity_blocks
        self.settings = settings or MellSettings()
        self.cluster = Cluster(capacity_blocks)
        self._bundles = Bundles(self.cluster)
        self._journal = Journal(self.cluster)
        self._placing = Placing(self.cluster, self._bundles, self._journal, self.settings)
        self._repairs = Repairs(self.cluster, self._placing, self._journal, self.settings)

    @property
    def active_workers(self) -> int:
        return len(self.cluster.active)

    def add_worker(self, worker_id: str, host: str = "") -> None:
        """Add an idle worker. Raises ValueError if it is already known."""
        if worker_id in self.cluster.active or worker_id in self.cluster.idle:
            raise ValueError(f"worker {worker_id} is there already")
        self.cluster.idle.append(worker_id)
        self._placing.hosts[worker_id] = host

    def remove_worker(self, worker_id: str) -> list[RequestKey]:
        """Remove a lost worker and return its requests, now forgotten. Raises KeyError."""
        lost = self.cluster.remove_worker(worker_id)
        del self._placing.hosts[worker_id]
        return lost

    def categories(self) -> dict[str, str]:
        """Return the class of each active worker's largest item: T, S, M or L."""
        found = {worker: gpu.category for worker, gpu in self.cluster.active.items()}
        return {worker: category.name[0] for worker, category in found.items() if category is not None}

    def worker_of(self, request: RequestKey) -> str | None:
        item = self.cluster.homes.get(request)
        return item.gpu.worker_id if item is not None and item.gpu is not None else None

    def allocate(self, request: RequestKey, blocks: int) -> PackingEffects:
        """Place a request. Raises InvalidRequest (larger than a worker), ValueError (already placed)."""
        self._allocate(request, blocks)
        return self._close(1)

    def grow(self, request: RequestKey, blocks: int) -> PackingEffects:
        """Set a request's size to `blocks`. Raises InvalidRequest (nothing changes) and KeyError."""
        gpu = self._grow(request, blocks)
        self._relieve(gpu)
        return self._close(1)

    def end(self, request: RequestKey) -> PackingEffects:
        """Remove a request. Raises KeyError."""
        self._end(request)
        return self._close(1, can_empty=True)

    def apply(self, operations: Iterable[Operation]) -> PackingEffects:
        """Apply an epoch's ends, growths and arrivals, then repair once. On error nothing has changed."""
        ordered = sorted(operations, key=lambda operation: operation.action.value)
        self._check(ordered)
        grown: dict[Gpu, None] = {}
        for operation in ordered:
            if operation.action is Action.END:
                self._end(operation.request)
            elif operation.action is Action.GROW:
                grown[self._grow(operation.request, operation.blocks)] = None
        for gpu in grown:
            self._relieve(gpu)
        for operation in ordered:
            if operation.action is Action.ALLOCATE:
                self._allocate(operation.request, operation.blocks)
        return self._close(max(1, len(ordered)), can_empty=True)

    def adopt(self, request: RequestKey, blocks: int, worker_id: str) -> PackingEffects:
        """Register a request found running on a worker, and evict others if it does not fit. Runs no repairs.
        Raises InvalidRequest, ValueError if the request is already placed, KeyError for an unknown worker."""
        check_new(request, blocks, self.capacity_blocks, self.cluster.homes)
        gpu = self.cluster.opened(worker_id)
        self._bundles.put(self._bundles.item_for(request, blocks), gpu)
        self._journal.arrived(request)
        self._relieve(gpu, kept=request)
        return self._close(0)

    def _check(self, ordered: list[Operation]) -> None:
        ended: set[RequestKey] = set()
        arriving: set[RequestKey] = set()
        for operation in ordered:
            request, action = operation.request, operation.action
            if action is not Action.END:
                check_blocks(request, operation.blocks, self.capacity_blocks)
            is_here = request in self.cluster.homes and request not in ended
            if action is Action.ALLOCATE:
                if is_here or request in arriving:
                    raise ValueError(f"request {request} is placed already")
                arriving.add(request)
            elif not is_here:
                raise KeyError(request)
            elif action is Action.END:
                ended.add(request)

    def _allocate(self, request: RequestKey, blocks: int) -> None:
        check_new(request, blocks, self.capacity_blocks, self.cluster.homes)
        item = self._bundles.item_for(request, blocks)
        if self._placing.place(item):
            self._journal.arrived(request)
        else:
            self._journal.waits(request)

    def _grow(self, request: RequestKey, blocks: int) -> Gpu:
        check_blocks(request, blocks, self.capacity_blocks)
        gpu = self._bundles.grow(request, blocks).gpu
        assert gpu is not None
        return gpu

    def _end(self, request: RequestKey) -> None:
        self._bundles.remove(request)
        self._journal.ended(request)

    def _relieve(self, gpu: Gpu, kept: RequestKey | None = None) -> None:
        """Evict items until the rest fits: T first, then S and M, then L, the youngest of each first."""
        while gpu.used > self.capacity_blocks:
            items = (item for shelf in gpu.held for item in reversed(shelf))
            item = next(item for item in items if kept not in item.members)
            if not self._placing.evict(item):
                for request in list(item.members):
                    self._bundles.remove(request)
                    self._journal.displaced(request)

    def check_integrity(self) -> None:
        self.cluster.check_integrity()
        assert self._journal.steps == 0, "an operation was not closed"

    def _close(self, operations: int, *, can_empty: bool = False) -> PackingEffects:
        self._repairs.run(MAX_MOVES * operations, can_empty=can_empty)
        self.cluster.retire()
        return self._journal.close()
