"""Load balancing by migration, as Llumnix does it (papers/000 §VIII, "LB").

Arrivals go to the roomiest worker. Once an epoch the most loaded worker is paired with the least loaded, by
free blocks per request, and gives it its shortest request, as long as that makes the two more equal. What
outgrows its worker sends the shortest requests away. It never empties a worker on purpose.
"""

from services.placement.policy.contract import PackedMove, RequestKey
from services.placement.policy.dispatch import Bin, DispatchPolicy
from services.placement.policy.size_index import SizeIndex


class LoadBalance(DispatchPolicy):
    """Pairs the fullest worker with the emptiest once an epoch.

    Only workers with less than `relief_share` of their capacity free per request give any away; 1: all do.
    """

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
        """The shortest migrate until it fits; the one that grows is counted at its new size."""
        while blocks - home.requests[request] > home.free:
            sizes = home.requests | {request: blocks}
            shortest = min(sizes, key=sizes.__getitem__)
            self._leave(shortest, sizes[shortest], is_recompute=False)
            if shortest == request:
                return
        self._resize(home, request, blocks)

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
                self._migrate(request, blocks, target)

    def _migrate(self, request: RequestKey, blocks: int, target: Bin) -> None:
        source = self._take(request)
        self._put(request, blocks, target)
        self._effects.moves.append(PackedMove(request, source.worker_id, target.worker_id, blocks))


def _freeness(one: Bin) -> int:
    return one.free // max(1, len(one.requests))
