"""Numbered events that tell placement which named blocks a prefix cache gained or lost.

Events are numbered from 1. The names of the latest events are kept: a reader that missed some of them gets
the present state of those blocks, and one that missed more gets everything. Pure; used on the cache's thread.
"""

from collections import deque
from collections.abc import Iterable

from services.worker.kv.core.radix_tree import NEAREST_FIRST, Node, PrefixTree
from shared.blocks import BlockHash
from shared.messages.prefixes import MOST_NEWS_BLOCKS, FindPrefixes, WorkerPrefixes

_KEPT_EVENTS = 64


class PrefixNews:
    """The events of one incarnation of one worker, read from the journal of its tree."""

    def __init__(
        self, tree: PrefixTree, worker_id: str, incarnation: int, *, interval_s: float = 0.2
    ) -> None:
        self._tree = tree
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._interval_s = interval_s
        self._seq = 0
        self._told_s = float("-inf")
        self._seen_moves = 0
        self._events: deque[tuple[BlockHash, ...]] = deque(maxlen=_KEPT_EVENTS)
        """Names in the latest events, the last of which is number `_seq`."""

    @property
    def has_some(self) -> bool:
        """Whether something changed since the last event. Any thread may ask."""
        return self._tree.moves != self._seen_moves

    def take(self, now_s: float) -> WorkerPrefixes | None:
        """Return the next event if something changed and the last event is `interval_s` old."""
        if self._tree.moves == self._seen_moves or now_s - self._told_s < self._interval_s:
            return None
        names = self._tree.moved_since(self._seen_moves)
        self._seen_moves = self._tree.moves
        self._seq += 1
        self._told_s = now_s
        if names is None or len(names) > MOST_NEWS_BLOCKS:
            self._events.clear()
            return self._everything()
        self._events.append(tuple(names))
        return self._state_of(names)

    def answer(self, question: FindPrefixes) -> WorkerPrefixes:
        """Return what changed since that event; everything to a reader of another incarnation."""
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
        """The nearest tier first, and older blocks before newer ones: a block follows its parent."""
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
