"""What placement is told of a prefix cache: which named blocks came, moved or went since it was told last.

Events are numbered from 1. Of the last ones the names are kept, so that a reader who missed some can be told
what has become of just those; one who missed more is told everything. Pure; used on the cache's own thread.
"""

from collections import deque
from collections.abc import Iterable

from services.worker.kv.core.radix_tree import NEAREST_FIRST, Node, PrefixTree
from shared.blocks import BlockHash
from shared.messages.prefixes import MOST_NEWS_BLOCKS, FindPrefixes, WorkerPrefixes

_KEPT_EVENTS = 64


class PrefixNews:
    """Of one incarnation of one worker. `note` is called for every block that gets or loses a place."""

    def __init__(
        self, tree: PrefixTree, worker_id: str, incarnation: int, *, interval_s: float = 0.2
    ) -> None:
        self._tree = tree
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._interval_s = interval_s
        self._seq = 0
        self._told_s = float("-inf")
        self._changed: dict[BlockHash, None] = {}
        self._overflowed = False
        self._events: deque[tuple[BlockHash, ...]] = deque(maxlen=_KEPT_EVENTS)
        """Names in the last events; the last one is that of `_seq`."""

    def note(self, name: BlockHash) -> None:
        """Something about this block is different."""
        if len(self._changed) < MOST_NEWS_BLOCKS:
            self._changed[name] = None
        elif name not in self._changed:
            self._overflowed = True

    def take(self, now_s: float) -> WorkerPrefixes | None:
        """The next event, when something changed and the last one is `interval_s` ago."""
        if not self._changed or now_s - self._told_s < self._interval_s:
            return None
        names, overflowed = tuple(self._changed), self._overflowed
        self._changed, self._overflowed = {}, False
        self._seq += 1
        self._told_s = now_s
        if overflowed:
            self._events.clear()
            return self._everything()
        self._events.append(names)
        return self._state_of(names)

    def answer(self, question: FindPrefixes) -> WorkerPrefixes:
        """What changed since then, or everything. An answer to another incarnation's reader is everything."""
        missed = self._seq - question.since_seq
        if question.incarnation != self._incarnation or not 0 <= missed <= len(self._events):
            return self._everything()
        names = dict.fromkeys(
            name for event in list(self._events)[len(self._events) - missed :] for name in event
        )
        return self._everything() if len(names) > MOST_NEWS_BLOCKS else self._state_of(names)

    def _state_of(self, names: Iterable[BlockHash]) -> WorkerPrefixes:
        nodes = [(name, self._tree.find(name)) for name in names]
        stored = [node for _, node in nodes if node is not None and node.stored]
        gone = b"".join(name for name, node in nodes if node is None or not node.stored)
        return self._message(stored, removed=gone)

    def _everything(self) -> WorkerPrefixes:
        """The nearest tier first, and of each what was stored first: no block without its beginning."""
        stored: list[Node] = []
        for tier in NEAREST_FIRST:
            stored += [node for node in self._tree if node.stored and node.nearest is tier]
        return self._message(stored[:MOST_NEWS_BLOCKS], full=True)

    def _message(self, stored: list[Node], *, removed: bytes = b"", full: bool = False) -> WorkerPrefixes:
        return WorkerPrefixes(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            seq=self._seq,
            added=b"".join(node.name for node in stored),
            tiers=bytes(node.nearest for node in stored),
            removed=removed,
            full=full,
        )
