"""A trace against the worker's own prefix cache, one request after the other, with no bytes behind it.

What is counted are blocks found in each tier. `belady` evicts what is wanted again last: the bound for orders
that evict one block at a time, leaves first. Pure.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.prefix.trace import Chain
from services.worker.kv.cache import PrefixCache, Tiers
from services.worker.kv.eviction import EvictionOrder, OrderMaker, Rank, order_maker
from services.worker.kv.gate import CostGate
from services.worker.kv.mover import Load, Loaded, Store, StoredBlock
from services.worker.kv.pool import BlockPool
from services.worker.kv.reuse import ReuseHistory
from services.worker.kv.tree import Node, Tier
from shared.blocks import BlockHash

BELADY = "belady"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks of each tier."""

    device: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Replayed:
    """Blocks over a whole trace."""

    asked: int
    found: tuple[int, int, int]
    """By tier."""

    @property
    def hit_rate(self) -> float:
        return sum(self.found) / self.asked if self.asked else 0.0


class Counting:
    """A mover without bytes: every copy succeeds, those in the background after the request."""

    def __init__(self) -> None:
        self._written: list[StoredBlock] = []
        self._read: list[tuple[BlockHash, int]] = []

    def load(self, loads: Sequence[Load], most_s: float) -> Loaded:
        return Loaded(len(loads))

    def store(self, stores: Sequence[Store]) -> float:
        return 0.0

    def start_write(self, source: int, node: StoredBlock) -> bool:
        self._written.append(node)
        return True

    def start_read(self, place: int, target: int, name: BlockHash) -> bool:
        self._read.append((name, target))
        return True

    def settle(self, cache: PrefixCache) -> None:
        """What was begun has ended well."""
        written, self._written = self._written, []
        read, self._read = self._read, []
        for node in written:
            cache.on_written(node.name, node.place, ok=True)
        for name, place in read:
            cache.on_read(name, place, ok=True)


class Future:
    """When each block is wanted next."""

    def __init__(self, trace: Sequence[Chain]) -> None:
        self._wanted: dict[BlockHash, deque[int]] = {}
        for number, chain in enumerate(trace):
            for name in chain:
                self._wanted.setdefault(name, deque()).append(number)

    def advance(self, chain: Chain) -> None:
        """These are wanted now."""
        for name in chain:
            self._wanted[name].popleft()

    def next_use(self, name: BlockHash) -> float:
        """Number of the request, infinite when there is none."""
        wanted = self._wanted[name]
        return wanted[0] if wanted else math.inf

    def maker(self) -> OrderMaker:
        """Orders that know it."""
        return lambda tier, history: Belady(self, history)


class Belady(EvictionOrder):
    """Wanted again last, evicted first."""

    def __init__(self, future: Future, history: ReuseHistory) -> None:
        super().__init__(history)
        self._future = future

    def _rank(self, node: Node) -> Rank:
        return (-self._future.next_use(node.name), -node.depth)


def replay(
    trace: Sequence[Chain],
    sizes: Sizes,
    policy: str,
    *,
    seed: int = 0,
    after_each: Callable[[PrefixCache], None] | None = None,
) -> Replayed:
    """Raises ConfigError for a policy that is neither known to the cache nor `belady`."""
    future = Future(trace) if policy == BELADY else None
    orders = order_maker(policy, seed) if future is None else future.maker()
    mover = Counting()
    pool = BlockPool(sizes.device, block_tokens=1)
    cache = PrefixCache(pool, Tiers(sizes.host, sizes.disk), mover, CostGate(), orders)
    asked, found = 0, [0, 0, 0]
    for chain in trace:
        if future is not None:
            future.advance(chain)
        asked += len(chain)
        for tier, blocks in zip(Tier, _request(cache, chain), strict=True):
            found[tier] += blocks
        cache.save(sizes.host)
        mover.settle(cache)
        if after_each is not None:
            after_each(cache)
    return Replayed(asked, (found[0], found[1], found[2]))


def _request(cache: PrefixCache, chain: Chain) -> tuple[int, int, int]:
    """Where its blocks were. What does not fit is computed and not kept."""
    hit = cache.acquire(chain, len(chain))
    first = len(hit.blocks)
    room = min(len(chain) - first, cache.free_blocks + cache.evictable_blocks)
    blocks = [*hit.blocks, *cache.allocate(room)]
    for index in range(first, len(blocks)):
        cache.publish(blocks[index], chain[index], chain[index - 1] if index else None)
    cache.release(blocks)
    return hit.loaded
