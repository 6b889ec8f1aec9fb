"""Prefix caches of the simulated workers, each with an eviction order.

A prompt's blocks are cached once it is computed. Placement sees them through its live index
(`services/placement/core/prefix_index.py`): reports of workers and recent placements.
"""

from collections.abc import Sequence

from services.placement.core.prefix_index import CachedTokens, PrefixIndex
from services.worker.kv.core.eviction import ReuseHistory, order_maker
from services.worker.kv.core.radix_tree import Node, Tier
from shared.blocks import BlockHash
from shared.messages.prefixes import PrefixChain, WorkerPrefixes


class _Kept:
    """The cached blocks of one worker, as a tree. Only leaves can be evicted."""

    def __init__(self, eviction: str) -> None:
        self.nodes: dict[BlockHash, Node] = {}
        self._history = ReuseHistory()
        self._order = order_maker(eviction)(Tier.DEVICE, self._history)
        self._requests = 0

    def find(self, names: Sequence[BlockHash]) -> int:
        """Return the number of leading blocks that are cached, and mark them used."""
        self._requests += 1
        count = 0
        for name in names:
            if name not in self.nodes:
                break
            self._use(self.nodes[name])
            count += 1
        return count

    def keep(self, names: Sequence[BlockHash], most: int) -> tuple[list[BlockHash], list[BlockHash]]:
        """Cache the blocks of a computed prompt; return the added and the evicted blocks."""
        above: Node | None = None
        added, removed = [], []
        for name in names:
            node = self.nodes.get(name)
            if node is None:
                node = self.nodes[name] = self._insert(name, above)
                added.append(name)
            node.used = self._requests
            above = node
        for name in names:
            self._offer(self.nodes[name])
        while len(self.nodes) > most and (gone := self._order.pop()) is not None:
            removed.append(gone.name)
            self._drop(gone)
        return added, removed

    def _insert(self, name: BlockHash, above: Node | None) -> Node:
        node = Node(name, above)
        self._history.on_stored(node, self._requests)
        if above is not None:
            above.kids[Tier.DEVICE] += 1
            self._order.discard(above)
        return node

    def _use(self, node: Node) -> None:
        self._history.on_used(node.used, self._requests)
        if not node.hits:
            self._history.on_returned()
        node.used = self._requests
        node.hits += 1
        self._offer(node)

    def _offer(self, node: Node) -> None:
        if not node.kids[Tier.DEVICE]:
            self._order.add(node)

    def _drop(self, node: Node) -> None:
        del self.nodes[node.name]
        self._history.on_dropped(node)
        if node.parent is not None:
            node.parent.kids[Tier.DEVICE] -= 1
            self._offer(node.parent)


class SimPrefixes:
    """Prefix caches of all workers, each with `most_blocks` blocks of `block_tokens` tokens."""

    def __init__(
        self, workers: Sequence[str], most_blocks: int, block_tokens: int, eviction: str = "lru"
    ) -> None:
        """`eviction` names the eviction order. Raises ConfigError for an unknown name."""
        self.block_tokens = block_tokens
        self.index = PrefixIndex()
        self._most_blocks = most_blocks
        self._kept = {name: _Kept(eviction) for name in workers}
        self._said = dict.fromkeys(workers, 0)
        for name in workers:
            self.index.on_worker(name, 1)
            self._say(name, (), ())

    def expected(self, worker: str, names: Sequence[BlockHash], now_s: float) -> CachedTokens:
        """Return the cached tokens that placement expects at a worker."""
        return self.index.cached(worker, self._chains(names), now_s)

    def holders(self, names: Sequence[BlockHash]) -> list[str]:
        """Return the workers that placement expects to hold a prompt's first block."""
        return self.index.holders(self._chains(names))

    def expect(self, worker: str, names: Sequence[BlockHash], now_s: float) -> None:
        """Note that a prompt was placed at a worker."""
        self.index.expect(worker, self._chains(names), now_s)
        self.index.on_tick(now_s)

    def find(self, worker: str, names: Sequence[BlockHash]) -> int:
        """Return the number of prompt tokens cached at a worker, and mark their blocks used."""
        return self._kept[worker].find(names) * self.block_tokens

    def keep(self, worker: str, names: Sequence[BlockHash]) -> None:
        """Cache a computed prompt at a worker; its first blocks are evicted last."""
        self._say(worker, *self._kept[worker].keep(names, self._most_blocks))

    def _chains(self, names: Sequence[BlockHash]) -> tuple[PrefixChain, ...]:
        return (PrefixChain(block_tokens=self.block_tokens, names=b"".join(names)),)

    def _say(self, worker: str, added: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        """Report a worker's added and removed blocks to the index."""
        self._said[worker] += 1
        gone = set(removed)
        stays = [name for name in added if name not in gone]
        news = WorkerPrefixes(
            worker_id=worker,
            incarnation=1,
            seq=self._said[worker],
            full=self._said[worker] == 1,
            added=b"".join(stays),
            tiers=bytes(len(stays)),
            removed=b"".join(removed),
        )
        self.index.on_news(news)
