"""Eviction orders by name, and the slots of the lower tiers. Pure.

An order ranks evictable nodes; the lowest rank is evicted first. A node is ranked when it becomes evictable,
and again after each use. An installed package adds orders with entry points in the group
`kvasir.worker.evictions`; `my_file.py:MyOrder` names one in a file (`shared/plugins.py`). An order is a
subclass of `EvictionOrder` with a `rank`. Source: papers/002 §IV-B for `lru`, `fifo` and `random`. `frequent`
is ours: in conversations most blocks are used once, and blocks used twice are used again after about as long.
"""

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from services.worker.kv.core.block_pool import BlockPool, RowShare
from services.worker.kv.core.radix_tree import Node, Tier
from shared.average import averaged
from shared.blocks import BlockHash
from shared.plugins import PluginKind, told

_LEAST_WEIGHT = 0.0005
"""Least weight of one use in the mean gap; the first uses weigh more."""
_FEW_NAMES = 256
"""Least number of names for a share of returning blocks."""
_MOST_NAMES = 4096
"""Number of names above which older ones count half."""
NEVER = -1
"""Last use of a block that no request here has used; it does not count as a gap."""


class ReuseHistory:
    """Statistics of how long blocks wait for their next use, dropped blocks included."""

    def __init__(self, most_ghosts: int = 65536) -> None:
        self._most_ghosts = most_ghosts
        self._ghosts: dict[BlockHash, tuple[int, int]] = {}
        """Uses and last use of dropped blocks, oldest first."""
        self._uses = 0
        self.mean_gap = 0.0
        self._names = self._returned = 0

    @property
    def returning(self) -> float | None:
        """Share of stored blocks that were used again; None while they are few."""
        return self._returned / self._names if self._names >= _FEW_NAMES else None

    def on_returned(self) -> None:
        """Count a block that is used again for the first time."""
        self._returned += 1

    def on_used(self, last: int, now: int) -> None:
        """Count another use of a block."""
        self._uses += 1
        self.mean_gap = averaged(self.mean_gap, now - last, max(_LEAST_WEIGHT, 1 / self._uses))

    def on_dropped(self, node: Node) -> None:
        """Remember a dropped block."""
        if node.used == NEVER:
            return
        self._ghosts[node.name] = (node.hits, node.used)
        if len(self._ghosts) > self._most_ghosts:
            del self._ghosts[next(iter(self._ghosts))]

    def on_stored(self, node: Node, now: int) -> None:
        """Count a new node, which starts with the uses that it had when it was dropped."""
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
"""A tenant without a use in so many requests has no share."""
_Entry = tuple[int, EvictionRank, int, Node]
"""Group, rank, number, node."""
_NOT_IN_HEAP = -1


class EvictionOrder(ABC):
    """The evictable copies of one tier, lowest rank first. With several tenants, blocks of a tenant above its
    share go first; recent tenants have equal shares. So a tenant that stores much evicts its own blocks."""

    def __init__(self, history: ReuseHistory, seed: int = 0) -> None:
        self._history = history
        self._random = random.Random(seed)
        self.faults = 0
        """Number of nodes for which `rank` raised."""
        self.fault = ""
        """Its last error."""
        self._heaps: dict[str, list[_Entry]] = {}
        """Heaps by tenant."""
        self._entry: dict[Node, int] = {}
        self._owned: Counter[str] = Counter()
        self._wanted: dict[str, int] = {}
        """Each tenant's last use, on the cache's count of requests."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, node: Node) -> bool:
        return node in self._entry

    def add(self, node: Node, group: int = 0) -> None:
        """Add a node, or rank it again. Lower groups go first."""
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
        """Remove a node if it is in the order."""
        if self._entry.pop(node, None) is not None:
            tenant = node.tenant
            self._owned[tenant] -= 1
            if not self._owned[tenant]:
                del self._owned[tenant], self._heaps[tenant], self._wanted[tenant]

    def first(self) -> Node | None:
        """Return the node to evict first; None when there is none."""
        entries = [entry for tenant in self._over_share(self._owned) if (entry := self._top(tenant))]
        return min(entries)[3] if entries else None

    def _top(self, tenant: str) -> _Entry | None:
        heap = self._heaps[tenant]
        while heap and self._entry.get(heap[0][3]) != heap[0][2]:
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _over_share(self, owned: Mapping[str, int]) -> list[str]:
        """Return the tenants that have at least their share; one at least if any blocks are owned."""
        if len(owned) < 2:
            return list(owned)
        now = max(self._wanted[tenant] for tenant in owned)
        recent = [tenant for tenant in owned if now - self._wanted[tenant] < _RECENT_REQUESTS]
        share = sum(owned.values()) / len(recent)
        return [tenant for tenant in owned if owned[tenant] >= share or tenant not in recent]

    def preview(self) -> Iterator[Node]:
        """Iterate over nodes in the order of eviction, each unused node after its last child. The order must
        not change meanwhile."""
        ahead = {tenant: [(heap[0], 0)] for tenant, heap in self._heaps.items()}
        gone: Counter[Node] = Counter()
        owned = dict(self._owned)
        while owned:
            (_, _, _, node), tenant = min((self._first_of(x, ahead[x]), x) for x in self._over_share(owned))
            self._step(tenant, ahead[tenant])
            owned[tenant] -= 1
            yield node
            above = node.parent
            if above is not None and not above.busy:
                gone[above] += 1
                if gone[above] == above.kids[Tier.DEVICE]:
                    self._count += 1
                    entry = (0, self._ranked(above), self._count, above)
                    heapq.heappush(ahead[tenant], (entry, _NOT_IN_HEAP))
                    owned[tenant] += 1
            if not owned[tenant]:
                del owned[tenant]

    def _first_of(self, tenant: str, ahead: list[tuple[_Entry, int]]) -> _Entry:
        """Return the least entry that is `ahead` in a tenant's heap, which stays as it is. An entry that is
        passed puts its children ahead, so that the first ones cost little in a large heap, too."""
        while True:
            entry, at = ahead[0]
            if at == _NOT_IN_HEAP or self._entry.get(entry[3]) == entry[2]:
                return entry
            self._step(tenant, ahead)

    def _step(self, tenant: str, ahead: list[tuple[_Entry, int]]) -> None:
        heap, (_, at) = self._heaps[tenant], heapq.heappop(ahead)
        for child in (2 * at + 1, 2 * at + 2):
            if at != _NOT_IN_HEAP and child < len(heap):
                heapq.heappush(ahead, (heap[child], child))

    def pop(self) -> Node | None:
        """Remove and return the node to evict first; None when there is none."""
        node = self.first()
        if node is not None:
            self.discard(node)
        return node

    @abstractmethod
    def rank(self, node: Node) -> EvictionRank | float:
        """Return the rank of `node`; the lowest is evicted first. Of equals the deepest should go first:
        without its beginning a prefix is useless."""

    def _ranked(self, node: Node) -> EvictionRank:
        """Return `rank`, or a rank by last use if an order from outside raises, which costs only hits."""
        try:
            found = self.rank(node)
            return tuple(map(float, found)) if isinstance(found, tuple) else (float(found),)
        except Exception as error:  # Outside code may raise anything.
            self.faults += 1
            self.fault = f"eviction order {type(self).__name__} raised {told(error)} in rank"
            return (float(node.used), -float(node.depth))


class Lru(EvictionOrder):
    """Least recently used first."""

    def rank(self, node: Node) -> EvictionRank:
        return (node.used, -node.depth)


class Fifo(EvictionOrder):
    """First stored first, whatever its uses."""

    def rank(self, node: Node) -> EvictionRank:
        return (node.inserted, -node.depth)


class Random(EvictionOrder):
    """Random order, for comparison."""

    def rank(self, node: Node) -> EvictionRank:
        return (self._random.random(),)


_MOST_DOUBLINGS = 3.0


class Frequent(EvictionOrder):
    """Least recently used first, where each doubling of the uses postpones the last use by the mean gap. The
    gap is measured over dropped blocks as well, so nothing is tuned to a trace or the size of a tier. Without
    repeated uses it is `lru`."""

    def rank(self, node: Node) -> EvictionRank:
        doublings = min(_MOST_DOUBLINGS, math.log2(1 + node.hits))
        return (node.used + self._history.mean_gap * doublings, -node.depth)


OrderMaker = Callable[[Tier, ReuseHistory], EvictionOrder]
ORDERS: dict[str, type[EvictionOrder]] = {"fifo": Fifo, "frequent": Frequent, "lru": Lru, "random": Random}


_METHODS = ("rank", "add", "discard", "first", "preview", "pop")
KIND = PluginKind("kvasir.worker.evictions", "eviction order", "eviction", _METHODS)


def order_maker(name: str, seed: int = 0) -> OrderMaker:
    """Makes the order of that name for each tier. Raises ConfigError for a name that is not known."""
    kind = KIND.find(name, ORDERS)
    KIND.made(name, lambda: kind(ReuseHistory(), seed))
    return lambda tier, history: kind(history, seed + tier)


def group_of(node: Node, tier: Tier) -> int:
    """Return a copy's group: 0 the device has it too, 1 a lower tier does, 2 the only copy, 3 the device is
    about to drop it."""
    if tier is Tier.HOST and node.is_leaving:
        return 3
    if tier is Tier.DEVICE or node.places[Tier.DEVICE] is not None:
        return 0
    is_below = node.places[Tier.DISK] is not None or node.places[Tier.PEER] is not None
    return 1 if tier is not Tier.HOST or is_below else 2


class SlotPool(RowShare):
    """Slots of the host or disk tier; `order` has the evictable copies."""

    def __init__(self, total: int, order: EvictionOrder, rows: BlockPool | None = None) -> None:
        """`rows` may be shared with other owners; None: the pool has its own."""
        super().__init__(BlockPool(max(1, total), 1) if rows is None else rows, total)
        self.order, self.most = order, total

    def __contains__(self, place: object) -> bool:
        return True

    def claim(self, places: Collection[int]) -> None:
        """Take certain slots, each once. Raises ValueError, and takes none, unless all are free."""
        self.rows.claim(places)
        self.used += len(places)

    def check_integrity(self, used: list[int]) -> None:
        """Raise AssertionError unless `used` are as many slots as were taken, each once."""
        assert len(used) == len(set(used)) == self.used, "slots lost or used twice"


class PeerSlots:
    """Up to `most` slots in host memory that other workers lend; `order` has the evictable copies. Slots come
    with grants and go with leases. No number is used twice, so a lost slot is never mistaken."""

    def __init__(self, most: int, order: EvictionOrder) -> None:
        self.most = max(0, most)
        self.order = order
        self._free: dict[int, None] = {}
        self._used: set[int] = set()
        self.at: dict[int, Node] = {}
        """Nodes by slot, without those that are being copied."""
        self.is_refused = False
        """The last search for more slots found none."""

    def __contains__(self, place: object) -> bool:
        return place in self._used or place in self._free

    @property
    def total(self) -> int:
        """Number of slots that are lent now."""
        return len(self._free) + len(self._used)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def admit(self, places: Iterable[int]) -> None:
        """Add slots."""
        self._free.update(dict.fromkeys(places))

    def take(self) -> int | None:
        """Take a free slot; None when there is none."""
        if not self._free:
            return None
        place = next(iter(self._free))
        del self._free[place]
        self._used.add(place)
        return place

    def give(self, place: int) -> None:
        """Free a slot, unless it was dropped meanwhile."""
        self.at.pop(place, None)
        if place in self._used:
            self._used.remove(place)
            self._free[place] = None

    def drop(self, places: Collection[int]) -> list[Node]:
        """Remove slots; return the nodes that were stored there."""
        for place in places:
            self._free.pop(place, None)
            self._used.discard(place)
        return [self.at[place] for place in places if place in self.at]

    def retire(self) -> list[int]:
        """Remove and return the free slots."""
        retired, self._free = list(self._free), {}
        return retired

    def check_integrity(self, used: Collection[int]) -> None:
        """Raise AssertionError unless `used` are the taken slots, each once."""
        assert len(used) == len(set(used)) and set(used) == self._used, "slots of peers lost or used twice"
        assert not self._used.intersection(self._free), "a slot is free and used"
        assert self.at.keys() <= self._used, "a block lies where nothing is lent"
