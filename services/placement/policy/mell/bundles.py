"""Bundles: requests of at most C/8 go together as items of at most C/4 (papers/000 §VI-C, "multi-items").

First fit within a GPU; a GPU has at most one under-full bundle (at most C/8); a bundle that outgrows C/4
splits. All of this is bookkeeping on one GPU: nothing here moves a request.
"""

from services.placement.policy.contract import RequestKey
from services.placement.policy.mell.cluster import Cluster, Gpu, Item
from services.placement.policy.mell.settings import SizeClass, class_of, is_crumb


class Bundles:
    """Puts requests on GPUs and takes them off; small ones in bundles, the others as items of their own."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._capacity = cluster.capacity

    def item_for(self, request: RequestKey, blocks: int) -> Item:
        """A new item, on no GPU yet."""
        is_bundle = is_crumb(blocks, self._capacity)
        size_class = SizeClass.TINY if is_bundle else class_of(blocks, self._capacity)
        return Item({request: blocks}, blocks, size_class, is_bundle)

    def put(self, item: Item, gpu: Gpu) -> None:
        """On that GPU, joined with a bundle there that has room for all of it."""
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
        """Its item afterwards: another one when it left its bundle or the bundle was split."""
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
        """Off its GPU, which is returned. Raises KeyError for a request that is not there."""
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
        """A bundle that has become under-full joins another that is, or has room."""
        if self._roomy(gpu, item) is not None:
            self._cluster.take(item)
            self.put(item, gpu)

    def _roomy(self, gpu: Gpu, item: Item) -> Item | None:
        for other in gpu.held[SizeClass.TINY]:
            if other.is_bundle and other is not item and 4 * (other.size + item.size) <= self._capacity:
                return other
        return None
