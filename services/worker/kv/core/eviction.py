"""Which copy goes when a tier is full: orders of eviction, by name.

An order ranks nodes by what is known of them; the lowest goes first. An installed package adds orders with
entry points in the group `kvasir.worker.evictions`, `my_file.py:MyOrder` names one in a file
(`shared/plugins.py`): a subclass of `EvictionOrder` with a `rank`. Ranks are taken when a node becomes
evictable; a node that is used in between is ranked again. Pure. Source: papers/002 §IV-B for the first three;
`frequent` is ours: in conversations most blocks are never wanted again, and those that were wanted twice are
wanted a third time after about as long.
"""

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping

from services.worker.kv.core.block_pool import RowPool, RowShare
from services.worker.kv.core.radix_tree import Node, Tier
from shared.average import averaged
from shared.blocks import BlockHash
from shared.plugins import PluginKind, told

_LEAST_WEIGHT = 0.0005
"""Of one use in the mean gap; the first uses weigh more."""
_FEW_NAMES = 256
"""Of fewer nobody knows yet how many are wanted again."""
_MOST_NAMES = 4096
"""Of more those that came first count half."""
NEVER = -1
"""When a block was last used that nobody here has wanted: it tells nothing of how long blocks wait."""


class ReuseHistory:
    """How long blocks of one cache wait until they are wanted again, those dropped since included."""

    def __init__(self, most_ghosts: int = 65536) -> None:
        self._most_ghosts = most_ghosts
        self._ghosts: dict[BlockHash, tuple[int, int]] = {}
        """Uses and last use of blocks stored nowhere, the one dropped first first."""
        self._uses = 0
        self.mean_gap = 0.0
        self._names = self._returned = 0

    @property
    def returning(self) -> float | None:
        """Of all blocks that were stored, the share that was wanted again; None while they are few."""
        return self._returned / self._names if self._names >= _FEW_NAMES else None

    def on_returned(self) -> None:
        """A block is wanted again for the first time."""
        self._returned += 1

    def on_used(self, last: int, now: int) -> None:
        """A block that was last used then is used again."""
        self._uses += 1
        self.mean_gap = averaged(self.mean_gap, now - last, max(_LEAST_WEIGHT, 1 / self._uses))

    def on_dropped(self, node: Node) -> None:
        """The block is stored nowhere any more."""
        if node.used == NEVER:
            return
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
            self._returned += hits == 0
            node.hits = hits + 1
            return
        self._names += 1
        if self._names > _MOST_NAMES:
            self._names, self._returned = self._names // 2, self._returned // 2


EvictionRank = tuple[float, ...]


_RECENT_REQUESTS = 4096
"""One that has had nothing stored or found for so many requests has no share."""
_Entry = tuple[int, EvictionRank, int, Node]
"""Group, rank, number, node."""


class EvictionOrder(ABC):
    """The evictable copies of one tier, lowest rank first. Each node is in it once at most.

    Where several tenants have some, those go first whose tenant has more than its share: as much as the
    others that want any. So one that stores much pushes out what is its own.
    """

    def __init__(self, history: ReuseHistory, seed: int = 0) -> None:
        self._history = history
        self._random = random.Random(seed)
        self.faults = 0
        """Nodes that `rank` raised for."""
        self.fault = ""
        """What it raised last."""
        self._heaps: dict[str, list[_Entry]] = {}
        """By tenant."""
        self._entry: dict[Node, int] = {}
        self._owned: Counter[str] = Counter()
        self._wanted: dict[str, int] = {}
        """When a tenant last had something stored or found, on the cache's count of requests."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, node: Node) -> bool:
        return node in self._entry

    def add(self, node: Node, group: int = 0) -> None:
        """`node` may go from now on; a node that is in already is ranked again. Lower groups go first."""
        tenant = node.tenant
        self._count += 1
        self._owned[tenant] += node not in self._entry
        self._entry[node] = self._count
        self._wanted[tenant] = max(self._wanted.get(tenant, 0), node.used)
        heap = self._heaps.setdefault(tenant, [])
        heapq.heappush(heap, (group, self._ranked(node), self._count, node))
        if len(heap) > 4 * self._owned[tenant] + 64:
            heap[:] = [item for item in heap if self._entry.get(item[3]) == item[2]]
            heapq.heapify(heap)

    def discard(self, node: Node) -> None:
        """`node` may not go any more. Nothing happens when it is not in."""
        if self._entry.pop(node, None) is not None:
            self._disown(node.tenant)

    def _disown(self, tenant: str) -> None:
        self._owned[tenant] -= 1
        if not self._owned[tenant]:
            del self._owned[tenant], self._heaps[tenant], self._wanted[tenant]

    def first(self) -> Node | None:
        """The node that goes first, None when there is none."""
        entries = [entry for tenant in self._over_share(self._owned) if (entry := self._top(tenant))]
        return min(entries)[3] if entries else None

    def _top(self, tenant: str) -> _Entry | None:
        heap = self._heaps[tenant]
        while heap and self._entry.get(heap[0][3]) != heap[0][2]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _over_share(self, owned: Mapping[str, int]) -> list[str]:
        """Tenants that have no less than their share of all that is owned; there is one where any is."""
        if len(owned) < 2:
            return list(owned)
        now = max(self._wanted[tenant] for tenant in owned)
        recent = [tenant for tenant in owned if now - self._wanted[tenant] < _RECENT_REQUESTS]
        share = sum(owned.values()) / len(recent)
        return [tenant for tenant in owned if owned[tenant] >= share or tenant not in recent]

    def preview(self) -> Iterator[Node]:
        """In the order in which they would go, and after the last child of a node the node itself, if nobody
        uses it: which nodes would go if nothing came in between. The order must not change meanwhile."""
        heaps = {
            tenant: [entry for entry in heap if self._entry.get(entry[3]) == entry[2]]
            for tenant, heap in self._heaps.items()
        }
        for heap in heaps.values():
            heapq.heapify(heap)
        gone: Counter[Node] = Counter()
        owned = dict(self._owned)
        while owned:
            tenant = min(self._over_share(owned), key=lambda name: heaps[name][0])
            node = heapq.heappop(heaps[tenant])[3]
            yield node
            above = node.parent
            if above is not None and not above.busy:
                gone[above] += 1
                if gone[above] == above.kids[Tier.DEVICE]:
                    self._count += 1
                    heapq.heappush(heaps[tenant], (0, self._ranked(above), self._count, above))
            owned[tenant] = len(heaps[tenant])
            if not owned[tenant]:
                del owned[tenant]

    def pop(self) -> Node | None:
        """Takes out the node that goes first, None when there is none."""
        node = self.first()
        if node is not None:
            self.discard(node)
        return node

    @abstractmethod
    def rank(self, node: Node) -> EvictionRank | float:
        """Place of `node`: the lowest goes first. Of equal nodes the deepest should go first: without its
        beginning a prefix is worth nothing."""

    def _ranked(self, node: Node) -> EvictionRank:
        """`rank`, or the place by last use where an order from outside raises: that costs hits, no answer."""
        try:
            found = self.rank(node)
            return tuple(map(float, found)) if isinstance(found, tuple) else (float(found),)
        except Exception as error:  # anything that outside code may raise
            self.faults += 1
            self.fault = f"eviction order {type(self).__name__} raised {told(error)} in rank"
            return (float(node.used), -float(node.depth))


class Lru(EvictionOrder):
    """Least recently used."""

    def rank(self, node: Node) -> EvictionRank:
        return (node.used, -node.depth)


class Fifo(EvictionOrder):
    """First stored, first out; being used changes nothing."""

    def rank(self, node: Node) -> EvictionRank:
        return (node.inserted, -node.depth)


class Random(EvictionOrder):
    """Whichever; for comparison."""

    def rank(self, node: Node) -> EvictionRank:
        return (self._random.random(),)


_MOST_DOUBLINGS = 3.0


class Frequent(EvictionOrder):
    """Least recently used, but each doubling of its uses counts as if it had been used that much later.

    A doubling is worth the mean gap between two uses, measured over dropped blocks as well, so that nothing
    is tuned to a trace or to the size of a tier. Without uses of old blocks it is `lru`.
    """

    def rank(self, node: Node) -> EvictionRank:
        doublings = min(_MOST_DOUBLINGS, math.log2(1 + node.hits))
        return (node.used + self._history.mean_gap * doublings, -node.depth)


OrderMaker = Callable[[Tier, ReuseHistory], EvictionOrder]
ORDERS: dict[str, type[EvictionOrder]] = {"fifo": Fifo, "frequent": Frequent, "lru": Lru, "random": Random}


KIND = PluginKind(
    "kvasir.worker.evictions",
    "eviction order",
    "eviction",
    ("rank", "add", "discard", "first", "preview", "pop"),
)


def order_maker(name: str, seed: int = 0) -> OrderMaker:
    """Makes the order of that name for each tier. Raises ConfigError for a name that is not known."""
    kind = KIND.find(name, ORDERS)
    KIND.made(name, lambda: kind(ReuseHistory(), seed))
    return lambda tier, history: kind(history, seed + tier)


def group_of(node: Node, tier: Tier) -> int:
    """Copies of what the device has go first, then those that a tier below has as well, then only copies, and
    last those of what is about to leave the device."""
    if tier is Tier.HOST and node.is_leaving:
        return 3
    if tier is Tier.DEVICE or node.places[Tier.DEVICE] is not None:
        return 0
    is_below = node.places[Tier.DISK] is not None or node.places[Tier.PEER] is not None
    return 1 if tier is not Tier.HOST or is_below else 2


class SlotPool(RowShare):
    """Slots of the own host tier or of the disk; `order` has the nodes whose copy here may go."""

    def __init__(self, total: int, order: EvictionOrder, rows: RowPool | None = None) -> None:
        """Without `rows` that others take from as well: of its own."""
        super().__init__(RowPool(max(0, total)) if rows is None else rows, total)
        self.order = order

    def claim(self, places: Collection[int]) -> None:
        """Takes certain slots, each once. Raises ValueError, and takes none, unless all are free."""
        self.rows.claim(places)
        self.used += len(places)

    def check_integrity(self, used: list[int]) -> None:
        """Raises AssertionError unless `used` are as many slots as were taken, each once."""
        assert len(used) == len(set(used)) == self.used, "slots lost or used twice"
