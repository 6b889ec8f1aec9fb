"""Which copy goes when a tier is full: orders of eviction, by name.

An order ranks nodes by what is known of them; the lowest goes first. Ranks are taken when a node becomes
evictable; a node that is used in between is ranked again. Pure. Source: papers/002 §IV-B for the first three;
`frequent` is ours: in conversations most blocks are never wanted again, and those that were wanted twice are
wanted a third time after about as long.
"""

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator

from services.worker.kv.core.radix_tree import Node, Tier
from shared.average import averaged
from shared.blocks import BlockHash
from shared.errors import ConfigError

_LEAST_WEIGHT = 0.0005
"""Of one use in the mean gap; the first uses weigh more."""


class ReuseHistory:
    """How long blocks of one cache wait until they are wanted again, those dropped since included."""

    def __init__(self, most_ghosts: int = 65536) -> None:
        self._most_ghosts = most_ghosts
        self._ghosts: dict[BlockHash, tuple[int, int]] = {}
        """Uses and last use of blocks stored nowhere, the one dropped first first."""
        self._uses = 0
        self.mean_gap = 0.0

    def on_used(self, last: int, now: int) -> None:
        """A block that was last used then is used again."""
        self._uses += 1
        self.mean_gap = averaged(self.mean_gap, now - last, max(_LEAST_WEIGHT, 1 / self._uses))

    def on_dropped(self, node: Node) -> None:
        """The block is stored nowhere any more."""
        self._ghosts[node.name] = (node.hits, node.used)
        if len(self._ghosts) > self._most_ghosts:
            del self._ghosts[next(iter(self._ghosts))]

    def on_stored(self, node: Node, now: int) -> None:
        """A new node; it starts with the uses it had when it was dropped, and this one."""
        node.inserted = node.used = now
        known = self._ghosts.pop(node.name, None)
        if known is not None:
            hits, last = known
            self.on_used(last, now)
            node.hits = hits + 1


EvictionRank = tuple[float, ...]


class EvictionOrder(ABC):
    """The evictable copies of one tier, lowest rank first. Each node is in it once at most."""

    def __init__(self, history: ReuseHistory, seed: int = 0) -> None:
        self._history = history
        self._random = random.Random(seed)
        self._heap: list[tuple[int, EvictionRank, int, Node]] = []
        self._entry: dict[Node, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, node: Node) -> bool:
        return node in self._entry

    def add(self, node: Node, group: int = 0) -> None:
        """`node` may go from now on; a node that is in already is ranked again. Lower groups go first."""
        self._count += 1
        self._entry[node] = self._count
        heapq.heappush(self._heap, (group, self._rank(node), self._count, node))
        if len(self._heap) > 4 * len(self._entry) + 64:
            self._heap = [item for item in self._heap if self._entry.get(item[3]) == item[2]]
            heapq.heapify(self._heap)

    def discard(self, node: Node) -> None:
        """`node` may not go any more. Nothing happens when it is not in."""
        self._entry.pop(node, None)

    def first(self) -> Node | None:
        """The node that goes first, None when there is none."""
        while self._heap:
            _, _, count, node = self._heap[0]
            if self._entry.get(node) == count:
                return node
            heapq.heappop(self._heap)
        return None

    def preview(self) -> Iterator[Node]:
        """In the order in which they would go, and after the last child of a node the node itself, if nobody
        uses it: which nodes would go if nothing came in between. The order must not change meanwhile."""
        heap = [
            (group, rank, count, node)
            for group, rank, count, node in self._heap
            if self._entry.get(node) == count
        ]
        heapq.heapify(heap)
        gone: Counter[Node] = Counter()
        while heap:
            node = heapq.heappop(heap)[3]
            yield node
            above = node.parent
            if above is None or above.busy:
                continue
            gone[above] += 1
            if gone[above] == above.kids[Tier.DEVICE]:
                self._count += 1
                heapq.heappush(heap, (0, self._rank(above), self._count, above))

    def pop(self) -> Node | None:
        """Takes out the node that goes first, None when there is none."""
        while self._heap:
            _, _, count, node = heapq.heappop(self._heap)
            if self._entry.get(node) == count:
                del self._entry[node]
                return node
        return None

    @abstractmethod
    def _rank(self, node: Node) -> EvictionRank:
        """Of equal nodes the deepest goes first: without its beginning a prefix is worth nothing."""


class Lru(EvictionOrder):
    """Least recently used."""

    def _rank(self, node: Node) -> EvictionRank:
        return (node.used, -node.depth)


class Fifo(EvictionOrder):
    """First stored, first out; being used changes nothing."""

    def _rank(self, node: Node) -> EvictionRank:
        return (node.inserted, -node.depth)


class Random(EvictionOrder):
    """Whichever; for comparison."""

    def _rank(self, node: Node) -> EvictionRank:
        return (self._random.random(),)


_MOST_DOUBLINGS = 3.0


class Frequent(EvictionOrder):
    """Least recently used, but each doubling of its uses counts as if it had been used that much later.

    A doubling is worth the mean gap between two uses, measured over dropped blocks as well, so that nothing
    is tuned to a trace or to the size of a tier. Without uses of old blocks it is `lru`.
    """

    def _rank(self, node: Node) -> EvictionRank:
        doublings = min(_MOST_DOUBLINGS, math.log2(1 + node.hits))
        return (node.used + self._history.mean_gap * doublings, -node.depth)


OrderMaker = Callable[[Tier, ReuseHistory], EvictionOrder]
ORDERS: dict[str, type[EvictionOrder]] = {"fifo": Fifo, "frequent": Frequent, "lru": Lru, "random": Random}


def order_maker(name: str, seed: int = 0) -> OrderMaker:
    """Makes the order of that name for each tier. Raises ConfigError for a name that is not known."""
    if name not in ORDERS:
        known = ", ".join(ORDERS)
        raise ConfigError(f"eviction order {name!r} is not known; write one of: {known}", param="eviction")
    kind = ORDERS[name]
    return lambda tier, history: kind(history, seed + tier)
