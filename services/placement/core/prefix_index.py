"""Which worker holds how much of a prompt: each worker's prefix cache, as its news tell it.

News are numbered. After a gap, or from a worker that is new here, what was missed is asked for; until the
answer is there, later news wait. A prompt that was just placed counts as stored for a while, so that those
with the same beginning follow it before it is computed. All of it is a guess: a wrong one costs a
recomputation, never a wrong answer. Pure. Source: `algorithms.md` §5, for several workers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shared.blocks import HASH_BYTES, BlockHash
from shared.messages.prefixes import MOST_CHAIN_BLOCKS, FindPrefixes, PrefixChain, WorkerPrefixes

TIERS = 3
_MOST_WAITING_NEWS = 64
_MOST_EXPECTED_BLOCKS = 16_384
_MOST_STORED_BLOCKS = 262_144
"""Of one worker; what comes on top is not looked at."""

CachedTokens = tuple[int, int, int]
"""Of a prompt's beginning, by the nearest tier they lie in."""
NOTHING: CachedTokens = (0, 0, 0)


@dataclass
class KnownPrefixes:
    """What is known of one worker's prefix cache, for one incarnation of it."""

    incarnation: int
    """0: no news yet."""
    seq: int = 0
    """Of the last news taken in; 0: nothing is known."""
    tiers: dict[BlockHash, int] = field(default_factory=dict)
    expected: dict[BlockHash, float] = field(default_factory=dict)
    """Blocks of prompts that were placed there, until when they count; the oldest first."""
    waiting: dict[int, WorkerPrefixes] = field(default_factory=dict)
    """News after a gap, by number."""
    is_new: bool = False
    """Heard of, and nothing known of what it has."""
    ask_s: float = 0.0
    """When to ask (again) for what is missing."""


class PrefixIndex:
    """Every worker's prefix cache, as far as it is known; bounded for each.

    Whoever sees a worker go calls `forget`.
    """

    def __init__(self, *, retry_s: float = 0.5, expect_s: float = 5.0) -> None:
        self._retry_s = retry_s
        self._expect_s = expect_s
        self._shelves: dict[str, KnownPrefixes] = {}

    def __len__(self) -> int:
        return len(self._shelves)

    def blocks(self, worker_id: str) -> int:
        """Known to be stored there."""
        shelf = self._shelves.get(worker_id)
        return 0 if shelf is None else len(shelf.tiers)

    def on_worker(self, worker_id: str, incarnation: int) -> None:
        """It shares blocks; unless it is known, what it has is asked for."""
        shelf = self._shelves.get(worker_id)
        if shelf is None or incarnation != shelf.incarnation:
            expected = shelf.expected if shelf is not None and shelf.incarnation == 0 else {}
            self._shelves[worker_id] = KnownPrefixes(incarnation, expected=expected, is_new=True)

    def on_news(self, news: WorkerPrefixes) -> None:
        """An event. What is older than known is ignored, and what comes from another start of the worker than
        its heartbeats."""
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
        _catch_up(shelf)

    def on_answer(self, news: WorkerPrefixes) -> None:
        """What `questions` asked for: it covers everything up to its number."""
        shelf = self._shelves.get(news.worker_id)
        if shelf is not None and news.incarnation == shelf.incarnation and news.seq >= shelf.seq:
            _apply(shelf, news)
            _catch_up(shelf)

    def questions(self, now_s: float) -> Iterator[tuple[str, FindPrefixes]]:
        """What to ask whom now; asked again after a while if no answer comes."""
        for worker_id, shelf in self._shelves.items():
            if (shelf.waiting or shelf.is_new) and now_s >= shelf.ask_s:
                shelf.ask_s = now_s + self._retry_s
                yield worker_id, FindPrefixes(incarnation=shelf.incarnation, since_seq=shelf.seq)

    def forget(self, worker_id: str) -> None:
        self._shelves.pop(worker_id, None)

    def expect(self, worker_id: str, chains: Sequence[PrefixChain], now_s: float) -> None:
        """A prompt was placed there: its blocks will be stored soon."""
        shelf = self._shelves.setdefault(worker_id, KnownPrefixes(0))
        for chain in chains:
            for name in names_of(chain):
                shelf.expected.pop(name, None)
                shelf.expected[name] = now_s + self._expect_s
        while len(shelf.expected) > _MOST_EXPECTED_BLOCKS:
            del shelf.expected[next(iter(shelf.expected))]

    def on_tick(self, now_s: float) -> None:
        """Forgets what was expected and did not come."""
        for shelf in self._shelves.values():
            while shelf.expected:
                oldest = next(iter(shelf.expected))
                if shelf.expected[oldest] > now_s:
                    break
                del shelf.expected[oldest]

    def cached(self, worker_id: str, chains: Sequence[PrefixChain], now_s: float) -> CachedTokens:
        """How much of the prompt that is so called begins there already."""
        shelf = self._shelves.get(worker_id)
        if shelf is None:
            return NOTHING
        return max((_match(shelf, chain, now_s) for chain in chains), key=sum, default=NOTHING)

    def check_integrity(self) -> None:
        """Raises AssertionError when a bound or an order is broken."""
        for shelf in self._shelves.values():
            assert len(shelf.tiers) <= _MOST_STORED_BLOCKS
            assert len(shelf.waiting) <= _MOST_WAITING_NEWS
            assert len(shelf.expected) <= _MOST_EXPECTED_BLOCKS
            assert all(seq > shelf.seq + 1 for seq in shelf.waiting), "news wait although nothing is missing"
            assert list(shelf.expected.values()) == sorted(shelf.expected.values())
            assert all(0 <= tier < TIERS for tier in shelf.tiers.values())


def names_of(chain: PrefixChain) -> Iterator[BlockHash]:
    """One by one, no more than are allowed."""
    most = min(len(chain.names) // HASH_BYTES, MOST_CHAIN_BLOCKS) * HASH_BYTES
    return (chain.names[at : at + HASH_BYTES] for at in range(0, most, HASH_BYTES))


def _match(shelf: KnownPrefixes, chain: PrefixChain, now_s: float) -> CachedTokens:
    found = [0, 0, 0]
    for name in names_of(chain):
        tier = shelf.tiers.get(name)
        if tier is None:
            if shelf.expected.get(name, now_s) <= now_s:
                break
            tier = 0
        found[tier] += chain.block_tokens
    return (found[0], found[1], found[2])


def _apply(shelf: KnownPrefixes, news: WorkerPrefixes) -> None:
    if news.full:
        shelf.tiers.clear()
    for at in range(0, len(news.removed), HASH_BYTES):
        shelf.tiers.pop(news.removed[at : at + HASH_BYTES], None)
    for at, tier in enumerate(news.tiers):
        name = news.added[at * HASH_BYTES : (at + 1) * HASH_BYTES]
        if name in shelf.tiers or len(shelf.tiers) < _MOST_STORED_BLOCKS:
            shelf.tiers[name] = min(tier, TIERS - 1)
    shelf.seq, shelf.is_new = news.seq, False


def _catch_up(shelf: KnownPrefixes) -> None:
    """Takes in what waited and is next now."""
    for seq in sorted(shelf.waiting):
        if seq > shelf.seq + 1:
            return
        news = shelf.waiting.pop(seq)
        if seq == shelf.seq + 1:
            _apply(shelf, news)
