"""MELL's baselines: best fit, worst fit, and load balancing by migration (papers/000 §VIII).

In best fit and worst fit a request stays where it was placed. When one outgrows its worker, the youngest
request there is evicted and recomputed elsewhere (*redispatch*; the paper defines nothing). Load balancing
is Llumnix's: an arrival goes to the worker with the most free memory, and once an epoch loaded workers give
their shortest requests to the least loaded ones.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.placement.policy.contract import (
    Action,
    Operation,
    PackedMove,
    PackingEffects,
    RequestKey,
    check_blocks,
    check_new,
)
from services.placement.policy.size_index import SizeIndex


@dataclass(eq=False, slots=True)
class Bin:
    """One active worker and the blocks of its requests, youngest last."""

    worker_id: str
    free: int
    requests: dict[RequestKey, int] = field(default_factory=dict)


class DispatchPolicy:
    """Packing policy without migration: best fit with `is_tight`, else worst fit."""

    def __init__(self, capacity_blocks: int, *, is_tight: bool) -> None:
        self.capacity_blocks = capacity_blocks
        self.idle: deque[str] = deque()
        self.bins: dict[str, Bin] = {}
        self.homes: dict[RequestKey, Bin] = {}
        self._is_tight = is_tight
        self._by_free: SizeIndex[Bin] = SizeIndex()
        self._effects = PackingEffects()

    @property
    def active_workers(self) -> int:
        return len(self.bins)

    def add_worker(self, worker_id: str, host: str = "") -> None:
        if worker_id in self.bins or worker_id in self.idle:
            raise ValueError(f"worker {worker_id} is there already")
        self.idle.append(worker_id)

    def remove_worker(self, worker_id: str) -> list[RequestKey]:
        if worker_id in self.idle:
            self.idle.remove(worker_id)
            return []
        gone = self.bins.pop(worker_id)
        self._unindex(gone)
        for request in gone.requests:
            del self.homes[request]
        return list(gone.requests)

    def worker_of(self, request: RequestKey) -> str | None:
        home = self.homes.get(request)
        return home.worker_id if home is not None else None

    def allocate(self, request: RequestKey, blocks: int) -> PackingEffects:
        """Place a request. Raises InvalidRequest (larger than a worker), ValueError (already placed)."""
        self._allocate(request, blocks)
        return self._close()

    def adopt(self, request: RequestKey, blocks: int, worker_id: str) -> PackingEffects:
        """Register a running request if it fits. Raises as `allocate`, and KeyError (unknown worker)."""
        check_new(request, blocks, self.capacity_blocks, self.homes)
        if worker_id not in self.bins and worker_id not in self.idle:
            raise KeyError(worker_id)
        home = self.bins.get(worker_id)
        if home is None:
            self.idle.remove(worker_id)
            home = self._open(worker_id)
        if blocks > home.free:
            self._effects.displaced.append(request)
        else:
            self._set(request, blocks, home)
            self._effects.placed[request] = worker_id
        return self._close()

    def grow(self, request: RequestKey, blocks: int) -> PackingEffects:
        """Set a request's size to `blocks`. Raises InvalidRequest (nothing changes) and KeyError."""
        self._grow(request, blocks)
        return self._close()

    def end(self, request: RequestKey) -> PackingEffects:
        """Remove a request. Raises KeyError."""
        self._end(request)
        return self._close()

    def apply(self, operations: Iterable[Operation]) -> PackingEffects:
        for operation in sorted(operations, key=lambda one: one.action.value):
            if operation.action is Action.END:
                self._end(operation.request)
            elif operation.action is Action.ALLOCATE:
                self._allocate(operation.request, operation.blocks)
            elif operation.request in self.homes:
                self._grow(operation.request, operation.blocks)
        self._rebalance()
        return self._close()

    def check_integrity(self) -> None:
        assert not set(self.bins) & set(self.idle), "idle and active"
        for one in self.bins.values():
            assert one.requests, "an active worker without requests"
            assert one.free == self.capacity_blocks - sum(one.requests.values()) >= 0, "over capacity"
            assert all(self.homes[request] is one for request in one.requests)
        assert sum(len(one.requests) for one in self.bins.values()) == len(self.homes)
        assert {(free, one.worker_id) for free, one in self._by_free} == {
            (one.free, one.worker_id) for one in self.bins.values()
        }, "the index is stale"

    def _allocate(self, request: RequestKey, blocks: int) -> None:
        check_new(request, blocks, self.capacity_blocks, self.homes)
        home = self._room(blocks)
        if home is None:
            self._effects.waiting.append(request)
            return
        self._set(request, blocks, home)
        self._effects.placed[request] = home.worker_id

    def _grow(self, request: RequestKey, blocks: int) -> None:
        check_blocks(request, blocks, self.capacity_blocks)
        home = self.homes[request]
        if blocks - home.requests[request] <= home.free:
            self._set(request, blocks, home)
        else:
            self._overflow(home, request, blocks)

    def _overflow(self, home: Bin, request: RequestKey, blocks: int) -> None:
        """Restart the youngest requests elsewhere, the growing one included, until the rest fits."""
        while True:
            youngest = next(reversed(home.requests))
            leaves = youngest == request
            self._leave(youngest, blocks if leaves else home.requests[youngest], is_recompute=True)
            if leaves:
                return
            if blocks - home.requests[request] <= home.free:
                self._set(request, blocks, home)
                return

    def _leave(self, request: RequestKey, blocks: int, *, is_recompute: bool) -> None:
        source = self.homes[request]
        self._set(request, 0, source)
        target = self._room(blocks, source)
        if target is None:
            self._effects.displaced.append(request)
            return
        self._set(request, blocks, target)
        self._effects.moves.append(PackedMove(request, source.worker_id, target.worker_id, blocks))
        self._effects.recomputes += is_recompute

    def _room(self, blocks: int, avoided: Bin | None = None) -> Bin | None:
        if self._is_tight:
            able = self._by_free.ascending(blocks, 2)
        else:
            able = [one for one in self._by_free.descending(self.capacity_blocks, 2) if one.free >= blocks]
        for one in able:
            if one is not avoided:
                return one
        return self._open(self.idle.popleft()) if self.idle else None

    def _open(self, worker_id: str) -> Bin:
        made = self.bins[worker_id] = Bin(worker_id, self.capacity_blocks)
        self._effects.activated.append(worker_id)
        self._index(made)
        return made

    def _set(self, request: RequestKey, blocks: int, home: Bin) -> None:
        """Put a request on a worker, change its size there, or remove it (0 blocks)."""
        self._unindex(home)
        home.free += home.requests.get(request, 0) - blocks
        if blocks:
            home.requests[request] = blocks
            self.homes[request] = home
        else:
            del home.requests[request], self.homes[request]
        self._index(home)

    def _end(self, request: RequestKey) -> None:
        home = self.homes[request]
        self._set(request, 0, home)
        if not home.requests:
            self._retire(home)

    def _retire(self, home: Bin) -> None:
        self._unindex(home)
        del self.bins[home.worker_id]
        self.idle.appendleft(home.worker_id)
        self._effects.terminated.append(home.worker_id)

    def _index(self, one: Bin) -> None:
        self._by_free.add(one.free, one)

    def _unindex(self, one: Bin) -> None:
        self._by_free.remove(one.free, one)

    def _rebalance(self) -> None:
        """Hook called once an epoch; does nothing without migration."""

    def _close(self) -> PackingEffects:
        effects = self._effects
        for worker_id in {move.source: None for move in effects.moves}:
            home = self.bins.get(worker_id)
            if home is not None and not home.requests:
                self._retire(home)
        effects.item_moves = len(effects.moves)
        self._effects = PackingEffects()
        return effects


class LoadBalance(DispatchPolicy):
    """Packing policy that migrates from the most loaded to the least loaded workers once an epoch. Only
    workers with less than `relief_share` of their capacity free per request give any away."""

    def __init__(self, capacity_blocks: int, *, relief_share: float = 1.0) -> None:
        super().__init__(capacity_blocks, is_tight=False)
        self._relief_blocks = int(relief_share * capacity_blocks)
        self._by_freeness: SizeIndex[Bin] = SizeIndex()

    def _index(self, one: Bin) -> None:
        super()._index(one)
        self._by_freeness.add(_freeness(one), one)

    def _unindex(self, one: Bin) -> None:
        super()._unindex(one)
        self._by_freeness.remove(_freeness(one), one)

    def _overflow(self, home: Bin, request: RequestKey, blocks: int) -> None:
        """Migrate the shortest requests until the rest fits. The growing one counts at its new size."""
        while blocks - home.requests[request] > home.free:
            sizes = home.requests | {request: blocks}
            shortest = min(sizes, key=sizes.__getitem__)
            self._leave(shortest, sizes[shortest], is_recompute=False)
            if shortest == request:
                return
        self._set(request, blocks, home)

    def _rebalance(self) -> None:
        sources = self._by_freeness.ascending(0, len(self.bins) // 2)
        targets = self._by_freeness.descending(self.capacity_blocks, len(sources))
        for source, target in zip(sources, targets, strict=True):
            if _freeness(source) >= self._relief_blocks:
                return
            request = min(source.requests, key=source.requests.__getitem__)
            blocks = source.requests[request]
            is_better = (target.free - blocks) * len(source.requests) > source.free * (
                len(target.requests) + 1
            )
            if target.free >= blocks and len(source.requests) > 1 and is_better:
                self._set(request, 0, source)
                self._set(request, blocks, target)
                self._effects.moves.append(PackedMove(request, source.worker_id, target.worker_id, blocks))


def _freeness(one: Bin) -> int:
    return one.free // max(1, len(one.requests))
