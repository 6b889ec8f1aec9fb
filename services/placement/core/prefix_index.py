"""Tracks the prefix cache of each worker from its events, to find how much of a prompt it holds. Pure.

Events are numbered. After a gap, or for a new worker, the missing part is requested, and later events wait.
Blocks of a prompt just placed count as stored for a while, so that similar prompts follow it. An error costs
a recomputation, never a wrong answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.blocks import HASH_BYTES, BlockHash
from shared.messages.prefixes import MOST_CHAIN_BLOCKS, FindPrefixes, PrefixChain, WorkerPrefixes

TIERS = 3
_MOST_WAITING_NEWS = 64
_MOST_EXPECTED_BLOCKS = 16_384
_MOST_STORED_BLOCKS = 262_144
"""Maximum stored blocks per worker; further ones are ignored."""

CachedTokens = tuple[int, int, int]
"""Cached tokens of a prompt's prefix, by tier, nearest first."""
NOTHING: CachedTokens = (0, 0, 0)


@dataclass
class KnownPrefixes:
    """Known prefix-cache content of one incarnation of a worker."""

    incarnation: int
    """0 before the first event."""
    seq: int = 0
    """Number of the last applied event; 0: nothing is known."""
    tiers: dict[BlockHash, int] = field(default_factory=dict)
    expected: dict[BlockHash, float] = field(default_factory=dict)
    """Blocks of prompts placed there, with the time until which they count; oldest first."""
    waiting: dict[int, WorkerPrefixes] = field(default_factory=dict)
    """Events after a gap, by number."""
    is_new: bool = False
    """Whether its content has never been received."""
    ask_s: float = 0.0
    """Earliest time of the next request for missing events."""


class PrefixIndex:
    """Known prefix caches of all workers, bounded per worker. Call `forget` when a worker is lost."""

    def __init__(self, *, retry_s: float = 0.5, expect_s: float = 5.0) -> None:
        self._retry_s = retry_s
        self._expect_s = expect_s
        self._shelves: dict[str, KnownPrefixes] = {}
        self._asking: dict[str, None] = {}
        """Workers that may have missing events."""
        self._expecting: dict[str, None] = {}
        """Workers with expected blocks."""

    def blocks(self, worker_id: str) -> int:
        """Return the number of blocks known to be stored on a worker."""
        shelf = self._shelves.get(worker_id)
        return 0 if shelf is None else len(shelf.tiers)

    def on_worker(self, worker_id: str, incarnation: int) -> None:
        """Register a worker that caches prefixes. Its content is requested unless it is known."""
        shelf = self._shelves.get(worker_id)
        if shelf is None or incarnation != shelf.incarnation:
            expected = shelf.expected if shelf is not None and shelf.incarnation == 0 else {}
            self._shelves[worker_id] = KnownPrefixes(incarnation, expected=expected, is_new=True)
            self._asking[worker_id] = None

    def on_news(self, news: WorkerPrefixes) -> None:
        """Apply an event. Older ones, and those of another incarnation than the heartbeats', are ignored."""
        shelf = self._shelves.get(news.worker_id)
        if shelf is None or shelf.incarnation == 0:
            self.on_worker(news.worker_id, news.incarnation)
            shelf = self._shelves[news.worker_id]
        if news.incarnation != shelf.incarnation or news.seq <= shelf.seq:
            return
        if news.full or news.seq == shelf.seq + 1:
            _apply(shelf, news)
        elif len(shelf.waiting) < _MOST_WAITING_NEWS:
            shelf.waiting[news.seq] = news
            self._asking[news.worker_id] = None

    def on_answer(self, news: WorkerPrefixes) -> None:
        """Apply the answer to a request of `questions`. It covers all events up to its number."""
        shelf = self._shelves.get(news.worker_id)
        if shelf is not None and news.incarnation == shelf.incarnation and news.seq >= shelf.seq:
            _apply(shelf, news)

    def questions(self, now_s: float) -> Iterator[tuple[str, FindPrefixes]]:
        """Yield (worker, request) for missing events. A request is repeated if no answer comes."""
        for worker_id in list(self._asking):
            shelf = self._shelves.get(worker_id)
            if shelf is None or not (shelf.waiting or shelf.is_new):
                del self._asking[worker_id]
            elif now_s >= shelf.ask_s:
                shelf.ask_s = now_s + self._retry_s
                yield worker_id, FindPrefixes(incarnation=shelf.incarnation, since_seq=shelf.seq)

    def forget(self, worker_id: str) -> None:
        self._shelves.pop(worker_id, None)

    def expect(self, worker_id: str, chains: Sequence[PrefixChain], now_s: float) -> None:
        """Count the blocks of a prompt placed on a worker as stored soon."""
        shelf = self._shelves.setdefault(worker_id, KnownPrefixes(0))
        for chain in chains:
            for name in names_of(chain):
                shelf.expected.pop(name, None)
                shelf.expected[name] = now_s + self._expect_s
        if shelf.expected:
            self._expecting[worker_id] = None
        while len(shelf.expected) > _MOST_EXPECTED_BLOCKS:
            del shelf.expected[next(iter(shelf.expected))]

    def on_tick(self, now_s: float) -> None:
        """Drop expected blocks that were not stored in time."""
        for worker_id in list(self._expecting):
            shelf = self._shelves.get(worker_id)
            expected = {} if shelf is None else shelf.expected
            while expected and expected[oldest := next(iter(expected))] <= now_s:
                del expected[oldest]
            if not expected:
                del self._expecting[worker_id]

    def cached(self, worker_id: str, chains: Sequence[PrefixChain], now_s: float) -> CachedTokens:
        """Return the cached tokens of a prompt's prefix on a worker, for its best chain."""
        shelf = self._shelves.get(worker_id)
        best = NOTHING
        if shelf is None:
            return best
        for chain in chains:
            found = [0, 0, 0]
            for name in names_of(chain):
                tier = shelf.tiers.get(name)
                if tier is None:
                    if shelf.expected.get(name, now_s) <= now_s:
                        break
                    tier = 0
                found[tier] += chain.block_tokens
            if sum(found) > sum(best):
                best = (found[0], found[1], found[2])
        return best

    def holders(self, chains: Sequence[PrefixChain]) -> list[str]:
        """Return the workers that may have the first block of a chain."""
        firsts = [chain.names[:HASH_BYTES] for chain in chains if chain.names]
        return [
            worker_id
            for worker_id, shelf in (self._shelves.items() if firsts else ())
            if any(first in shelf.tiers or first in shelf.expected for first in firsts)
        ]

    def check_integrity(self) -> None:
        """Raise AssertionError if a bound or an order is violated."""
        for shelf in self._shelves.values():
            assert len(shelf.tiers) <= _MOST_STORED_BLOCKS
            assert len(shelf.waiting) <= _MOST_WAITING_NEWS
            assert len(shelf.expected) <= _MOST_EXPECTED_BLOCKS
            assert all(seq > shelf.seq + 1 for seq in shelf.waiting), "news wait although nothing is missing"
            assert list(shelf.expected.values()) == sorted(shelf.expected.values())
            assert all(0 <= tier < TIERS for tier in shelf.tiers.values())
        asking = {name for name, shelf in self._shelves.items() if shelf.waiting or shelf.is_new}
        expecting = {name for name, shelf in self._shelves.items() if shelf.expected}
        assert asking <= self._asking.keys() and expecting <= self._expecting.keys()


def names_of(chain: PrefixChain) -> Iterator[BlockHash]:
    """Yield the block hashes of a chain, at most `MOST_CHAIN_BLOCKS`."""
    most = min(len(chain.names) // HASH_BYTES, MOST_CHAIN_BLOCKS) * HASH_BYTES
    for at in range(0, most, HASH_BYTES):
        yield chain.names[at : at + HASH_BYTES]


def _apply(shelf: KnownPrefixes, news: WorkerPrefixes) -> None:
    """Apply an event, and waiting ones that follow it."""
    if news.full:
        shelf.tiers.clear()
    for at in range(0, len(news.removed), HASH_BYTES):
        shelf.tiers.pop(news.removed[at : at + HASH_BYTES], None)
    for at, tier in enumerate(news.tiers):
        name = news.added[at * HASH_BYTES : (at + 1) * HASH_BYTES]
        if name in shelf.tiers or len(shelf.tiers) < _MOST_STORED_BLOCKS:
            shelf.tiers[name] = min(tier, TIERS - 1)
    shelf.seq, shelf.is_new = news.seq, False
    if shelf.waiting:
        shelf.waiting = {seq: one for seq, one in shelf.waiting.items() if seq > news.seq}
        if (following := shelf.waiting.pop(news.seq + 1, None)) is not None:
            _apply(shelf, following)
