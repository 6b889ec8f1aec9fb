"""An eviction order: blocks that were found least often go first. See docs/prefix-cache.md."""

from services.worker.kv.core.eviction import EvictionOrder, EvictionRank
from services.worker.kv.core.radix_tree import Node


class LeastFound(EvictionOrder):
    def rank(self, node: Node) -> EvictionRank:
        return (node.hits, node.used, -node.depth)
