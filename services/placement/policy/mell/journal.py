"""What an operation, or an epoch of them, has changed: the operation buffer of papers/000 §VI-C.

A request that went A→B→C is a move A→C; one that came back, arrived or ended within the epoch is none.
"""

from services.placement.policy.contract import PackedMove, PackingEffects, RequestKey
from services.placement.policy.mell.cluster import Cluster, Gpu, Item


class Journal:
    """Collects changes from the first one to `close`, and tells their net effects then."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._origins: dict[RequestKey, str] = {}
        self._arrived: dict[RequestKey, None] = {}
        self._effects = PackingEffects()
        self.steps = 0
        """Moves of items so far, before any are composed or dropped."""

    def moved(self, item: Item, source: Gpu) -> None:
        """`item` was taken off `source` and is about to be put elsewhere."""
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
        """It has to leave its worker and there is no other; an arrival of the same epoch just waits."""
        if request in self._arrived:
            del self._arrived[request]
            self._effects.waiting.append(request)
        else:
            self._origins.pop(request, None)
            self._effects.displaced.append(request)

    def close(self) -> PackingEffects:
        """The net effects; the journal is empty afterwards."""
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
