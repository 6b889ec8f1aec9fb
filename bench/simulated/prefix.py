"""Part A of `python -m bench prefix`: a trace under each eviction order at several cache sizes.

It replays the cache's own bookkeeping, one request after the other, without bytes. Belady's order knows the
future and is the upper bound.
"""

import heapq
import json
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.kit.context import Context
from bench.kit.datasets import find
from bench.kit.outcome import Outcome, Table
from bench.kit.plots import Chart, draw_lines
from services.worker.kv.core.block_manager import Tiers
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.eviction import (
    EvictionOrder,
    EvictionRank,
    OrderMaker,
    ReuseHistory,
    order_maker,
)
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.radix_tree import Node, Tier
from services.worker.kv.core.tier_copier import Load, Loaded, Store, StoredBlock
from shared.blocks import HASH_BYTES, BlockHash
from shared.errors import ConfigError
from sim.sweep import sweep

Chain = tuple[BlockHash, ...]
"""The blocks of one prompt."""


def read_mooncake(file: Path) -> list[Chain]:
    """Return the prompts in order of arrival. Raises ValueError for an invalid line."""
    chains: list[Chain] = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            chains.append(tuple(_name(block) for block in json.loads(line)["hash_ids"]))
        except (KeyError, TypeError, OverflowError, json.JSONDecodeError) as error:
            raise ValueError(f"{file.name}, line {number}: no request with hash_ids: {error!r}") from error
    return chains


@dataclass(frozen=True, slots=True)
class Conversations:
    """Chats over a few shared system prompts; lengths in blocks, times in mean gaps between requests.

    Pairs are median and σ of log-normal distributions. A share `single` ends after the first turn; the others
    have an exponential number of turns. Each turn adds the user's text and the previous answer.
    """

    system_prompts: int = 20
    system_blocks: int = 4
    single: float = 0.4
    turns: float = 6.0
    first_blocks: tuple[float, float] = (8.0, 1.2)
    turn_blocks: tuple[float, float] = (3.0, 1.2)
    think: tuple[float, float] = (400.0, 1.0)


CHATS = "chats"


def generate(shape: Conversations, requests: int, seed: random.Random) -> list[Chain]:
    """Return `requests` prompts in order of arrival."""
    fresh = shape.system_prompts * shape.system_blocks
    waiting: list[tuple[float, int, bool, int, list[int]]] = []
    """(time, number, is first turn, turns left, blocks so far)"""
    chains: list[Chain] = []
    now, started = 0.0, 0
    per_chat = shape.single + (1 - shape.single) * (1 + shape.turns)
    while len(chains) < requests:
        if not waiting or waiting[0][0] > now:
            system = min(int(seed.paretovariate(0.8)), shape.system_prompts) - 1
            blocks = list(range(system * shape.system_blocks, (system + 1) * shape.system_blocks))
            turns = 1 if seed.random() < shape.single else 1 + int(seed.expovariate(1 / shape.turns))
            started += 1
            heapq.heappush(waiting, (now, started, True, turns, blocks))
            now += seed.expovariate(1 / per_chat)
            continue
        at, number, first, turns, blocks = heapq.heappop(waiting)
        median, sigma = shape.first_blocks if first else shape.turn_blocks
        added = max(1, round(median * seed.lognormvariate(0, sigma)))
        blocks = [*blocks, *range(fresh, fresh + added)]
        fresh += added
        chains.append(tuple(map(_name, blocks)))
        if turns > 1:
            again = at + shape.think[0] * seed.lognormvariate(0, shape.think[1])
            heapq.heappush(waiting, (again, number, False, turns - 1, blocks))
    return chains


def infinite_hit_rate(trace: Sequence[Chain]) -> float:
    """Return the share of blocks that an infinite cache would find."""
    asked = sum(map(len, trace))
    return 1 - len({name for chain in trace for name in chain}) / asked if asked else 0.0


def _name(block: int) -> BlockHash:
    return block.to_bytes(HASH_BYTES, "little")


BELADY = "belady"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Number of blocks in each tier."""

    device: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class Replayed:
    """Blocks requested and found over a whole trace."""

    asked: int
    found: tuple[int, int, int]
    """Blocks found by tier."""

    @property
    def hit_rate(self) -> float:
        return sum(self.found) / self.asked if self.asked else 0.0


class Counting:
    """A block mover without bytes. Every copy succeeds; background copies end after the request."""

    def __init__(self) -> None:
        self._open: list[Callable[[], None]] = []

    def start_load(self, loads: Sequence[Load], most_s: float, ended: Callable[[Loaded], None]) -> bool:
        self._open.append(lambda: ended(Loaded(len(loads))))
        return True

    def start_store(self, ticket: int, stores: Sequence[Store], ended: Callable[[bool], None]) -> bool:
        self._open.append(lambda: ended(True))
        return True

    def finish_store(self, ticket: int) -> bool:
        return True

    def store(self, stores: Sequence[Store]) -> float:
        return 0.0

    def seal(self, place: int, name: BlockHash) -> None:
        """See `BlockMover`. Only copied blocks are on the host, so there is nothing to do."""

    def start_write(self, tier: Tier, source: int, node: StoredBlock, ended: Callable[[bool], None]) -> bool:
        self._open.append(lambda: ended(True))
        return True

    def start_read(self, place: int, target: int, name: BlockHash, ended: Callable[[bool], None]) -> bool:
        self._open.append(lambda: ended(True))
        return True

    def settle(self) -> None:
        """End every copy with success."""
        ends, self._open = self._open, []
        for end in ends:
            end()


class Future:
    """The next use of every block."""

    def __init__(self, trace: Sequence[Chain]) -> None:
        self._wanted: dict[BlockHash, deque[int]] = {}
        for number, chain in enumerate(trace):
            for name in chain:
                self._wanted.setdefault(name, deque()).append(number)

    def advance(self, chain: Chain) -> None:
        """Move past a request for these blocks."""
        for name in chain:
            self._wanted[name].popleft()

    def next_use(self, name: BlockHash) -> float:
        """Return the number of the next request that uses the block, or infinity."""
        wanted = self._wanted[name]
        return wanted[0] if wanted else math.inf

    def maker(self) -> OrderMaker:
        """Return a maker of Belady orders."""
        return lambda tier, history: Belady(self, history)


class Belady(EvictionOrder):
    """Evicts the block with the latest next use first."""

    def __init__(self, future: Future, history: ReuseHistory) -> None:
        super().__init__(history)
        self._future = future

    def rank(self, node: Node) -> EvictionRank:
        return (-self._future.next_use(node.name), -node.depth)


def replay(
    trace: Sequence[Chain],
    sizes: Sizes,
    policy: str,
    *,
    seed: int = 0,
    after_each: Callable[[PrefixCache], None] | None = None,
) -> Replayed:
    """Replay a trace under one policy. Raises ConfigError for an unknown policy."""
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
        for tier, blocks in enumerate(_request(cache, mover, chain)):
            found[tier] += blocks
        cache.save_ahead()
        cache.writes.start(sizes.host)
        mover.settle()
        if after_each is not None:
            after_each(cache)
    return Replayed(asked, (found[0], found[1], found[2]))


def _request(cache: PrefixCache, mover: Counting, chain: Chain) -> tuple[int, int, int]:
    """Run one request and return the blocks found by tier. Blocks that do not fit are computed but not
    kept."""
    hit = cache.acquire(chain, len(chain))
    found, tiers = hit.blocks, hit.loaded
    if hit.awaited is not None:
        mover.settle()
        came = cache.collect(hit.awaited)
        found += came.blocks
        tiers = (tiers[0] + came.loaded[0], tiers[1] + came.loaded[1], tiers[2] + came.loaded[2])
    first = len(found)
    room = min(len(chain) - first, cache.free_blocks + cache.evictable_blocks)
    blocks = [*found, *cache.allocate(room)]
    for index in range(first, len(blocks)):
        cache.publish(blocks[index], chain[index], chain[index - 1] if index else None)
    cache.release(blocks)
    return tiers


MOONCAKE = "mooncake/conversation_trace.jsonl"
OURS = Tiers().eviction
POLICIES = (OURS, "lru", "fifo", "random", BELADY)
_SIZES = (500, 1000, 2000, 5000, 10000, 20000, 50000)
_QUICK_SIZES = (1000, 5000)
_REQUESTS = 12000
_QUICK_REQUESTS = 2000
_TIERED = (Sizes(500, 2000, 7500), Sizes(1000, 4000, 15000))
_QUICK_TIERED = (Sizes(300, 800, 2500),)

Rates = Mapping[str, float]
"""Hit rate by policy."""
Job = tuple[Sizes, str]


@dataclass(frozen=True)
class Trace:
    """A named trace: prompts in order of arrival."""

    name: str
    chains: Sequence[Chain]


def run(context: Context) -> Outcome:
    """Run the bench. Failures are sizes where our order does not beat LRU although Belady's does."""
    trace = load_trace(context)
    sizes = context.arguments.sizes or (_QUICK_SIZES if context.quick else _SIZES)
    cells = [Sizes(size) for size in sizes] + list(_QUICK_TIERED if context.quick else _TIERED)
    rates: dict[Sizes, dict[str, float]] = {cell: {} for cell in cells}
    jobs = [(cell, policy) for cell in cells for policy in POLICIES]
    with context.progress(f"replays of {trace.name}", len(jobs)) as progress:

        def note(job: Job, replayed: Replayed) -> None:
            cell, policy = job
            rates[cell][policy] = replayed.hit_rate
            context.record({"trace": trace.name, "policy": policy, "sizes": cell, "found": replayed.found})
            progress.advance()

        replays = partial(_replay, trace.chains, context.seed)
        sweep(replays, jobs, processes=context.arguments.processes, on_result=note)
    infinite = infinite_hit_rate(trace.chains)
    single = [cell for cell in cells if not cell.host]
    draw_lines(
        context.picture("hit_rates"),
        Chart(
            {policy: [(cell.device, rates[cell][policy]) for cell in single] for policy in POLICIES},
            f"{trace.name}: blocks found",
            "cache, blocks",
            "share of blocks found (simulated)",
            dashed_y=infinite,
            log_x=10,
            bottom=0,
        ),
    )
    return outcome_of(trace.name, infinite, rates)


def load_trace(context: Context) -> Trace:
    """Return the requested trace. Raises ConfigError if it is missing or invalid."""
    wanted: str = context.arguments.trace
    most = _QUICK_REQUESTS if context.quick else _REQUESTS
    file = find(MOONCAKE) if wanted in ("auto", "mooncake") else Path(wanted)
    if wanted == CHATS or (file is None and wanted == "auto"):
        return Trace(CHATS, generate(Conversations(), most, context.random(CHATS)))
    if file is None or not file.is_file():
        raise ConfigError(f"there is no trace {wanted}: `python -m bench data`, or --trace chats")
    try:
        chains = read_mooncake(file)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{file} is no trace of requests with hash_ids: {error}", param="trace") from error
    return Trace(
        "mooncake" if wanted in ("auto", "mooncake") else file.stem,
        chains[:most] if context.quick else chains,
    )


def outcome_of(trace: str, infinite: float, rates: Mapping[Sizes, Rates]) -> Outcome:
    """Return figures and table; rates are shares of the blocks requested."""
    figures = {"hit_rate_infinite": infinite}
    rows: list[Sequence[object]] = []
    for sizes, found in rates.items():
        label = _label(sizes)
        gap = found[BELADY] - found["lru"]
        closed = (found[OURS] - found["lru"]) / gap if gap > 0 else 1.0
        figures |= {f"hit_rate_{policy}_{label}": rate for policy, rate in found.items()}
        figures[f"hit_vs_infinite_{label}"] = found[OURS] / infinite
        figures[f"hit_vs_lru_{label}"] = found[OURS] / found["lru"]
        figures[f"hit_vs_belady_{label}"] = found[OURS] / found[BELADY]
        rows.append([label, *(found[policy] for policy in POLICIES), found[OURS] / found["lru"], closed])
    figures |= _summary(infinite, rates)
    behind = [_label(sizes) for sizes, found in rates.items() if found[OURS] <= found["lru"] < found[BELADY]]
    return Outcome(
        figures=figures,
        failures=len(behind),
        tables=[
            Table(
                f"simulated: hit rate on {trace} (infinite cache: {infinite:.4f})",
                ("blocks", *POLICIES, "ours/lru", "closed"),
                rows,
            )
        ],
        notes=[
            "closed: share of the way from LRU to Belady's order, which knows the future",
            "one request at a time, each kept whole; several tiers as device+host+disk",
            *(f"not better than LRU at {label}" for label in behind),
        ],
        simulated=True,
        headline=["hit_rate", "hit_vs_infinite", "hit_vs_lru"],
    )


def _summary(infinite: float, rates: Mapping[Sizes, Rates]) -> dict[str, float]:
    """Return `hit_rate` and `hit_vs_infinite` at the middle size, and `hit_vs_lru` at the worst size."""
    single = sorted((sizes for sizes in rates if not sizes.host), key=lambda sizes: sizes.device)
    middle = rates[single[len(single) // 2]][OURS]
    return {
        "hit_rate": middle,
        "hit_vs_infinite": middle / infinite,
        "hit_vs_lru": min(found[OURS] / found["lru"] for found in rates.values()),
    }


def _replay(chains: Sequence[Chain], seed: int, job: Job) -> Replayed:
    return replay(chains, *job, seed=seed)


def _label(sizes: Sizes) -> str:
    tiers = [sizes.device, sizes.host, sizes.disk]
    return "+".join(str(blocks) for blocks in tiers if blocks)
