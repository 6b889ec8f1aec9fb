"""Which blocks of prompts each simulated worker keeps: the least recently used leave, and placement is told.

A prompt's blocks are there once it is computed; a prefix is found as far as all of its blocks are. Placement
knows what its live index knows (`services/placement/core/prefix_index.py`): what workers have said, and what
was placed a moment ago. Knows nothing of time but what it is given.
"""

from collections import OrderedDict
from collections.abc import Sequence

from services.placement.core.prefix_index import CachedTokens, PrefixIndex
from shared.blocks import BlockHash
from shared.messages.prefixes import PrefixChain, WorkerPrefixes


class SimPrefixes:
    """Of all workers, each with room for `most_blocks` blocks of `block_tokens` tokens."""

    def __init__(self, workers: Sequence[str], most_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.index = PrefixIndex()
        self._most_blocks = most_blocks
        self._kept: dict[str, OrderedDict[BlockHash, None]] = {name: OrderedDict() for name in workers}
        self._said = dict.fromkeys(workers, 0)
        for name in workers:
            self.index.on_worker(name, 1)
            self._say(name, (), ())

    def expected(self, worker: str, names: Sequence[BlockHash], now_s: float) -> CachedTokens:
        """As placement sees it."""
        return self.index.cached(worker, self._chains(names), now_s)

    def expect(self, worker: str, names: Sequence[BlockHash], now_s: float) -> None:
        """A prompt was placed there."""
        self.index.expect(worker, self._chains(names), now_s)
        self.index.on_tick(now_s)

    def find(self, worker: str, names: Sequence[BlockHash]) -> int:
        """Tokens of the prompt that are there; they are used now."""
        kept, count = self._kept[worker], 0
        for name in names:
            if name not in kept:
                break
            count += 1
        for name in reversed(names[:count]):
            kept.move_to_end(name)
        return count * self.block_tokens

    def keep(self, worker: str, names: Sequence[BlockHash]) -> None:
        """A prompt was computed there; its beginning is the last to leave."""
        kept = self._kept[worker]
        added = [name for name in names if name not in kept]
        for name in reversed(names):
            kept[name] = None
            kept.move_to_end(name)
        removed = []
        while len(kept) > self._most_blocks:
            removed.append(kept.popitem(last=False)[0])
        self._say(worker, added, removed)

    def _chains(self, names: Sequence[BlockHash]) -> tuple[PrefixChain, ...]:
        return (PrefixChain(block_tokens=self.block_tokens, names=b"".join(names)),)

    def _say(self, worker: str, added: Sequence[BlockHash], removed: Sequence[BlockHash]) -> None:
        """The next news of that worker."""
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
