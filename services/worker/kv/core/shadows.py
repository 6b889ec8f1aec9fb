"""Shadows: host copies of blocks of sequences that run on other workers, in case those workers die. Pure.

Shadows are named blocks that any sequence may use, but they are evicted before all other host copies. A new
shadow replaces only one that was not renewed for a while. Its first use makes it an ordinary block.
"""

from collections.abc import Collection, Iterable
from itertools import takewhile
from typing import Any

from sortedcontainers import SortedDict

from services.worker.kv.core.radix_tree import Node, Tier
from shared.blocks import BlockHash

STALE_S = 20.0
"""Age since the last renewal at which a shadow is stale. Renewals come every few seconds."""


class Shadows:
    """The shadows of one cache, oldest renewal first. Evictable ones are indexed by their renewal."""

    def __init__(self) -> None:
        self._renewed: dict[Node, tuple[float, int]] = {}
        """Time and number of each shadow's renewal."""
        self._renewals = 0
        self._loose: Any = SortedDict()
        """Evictable shadows by renewal."""

    def __len__(self) -> int:
        return len(self._renewed)

    def __contains__(self, node: Node) -> bool:
        return node in self._renewed

    def add(self, node: Node, now_s: float) -> None:
        """Add a shadow."""
        node.is_shadow = True
        self._enter(node, now_s)

    def discard(self, node: Node) -> bool:
        """Make it an ordinary block; whether it was a shadow."""
        node.is_shadow = False
        return self._leave(node)

    def rank(self, node: Node) -> None:
        """Update whether a shadow is evictable; call this on each change."""
        renewal = self._renewed[node]
        if node.is_loose(Tier.HOST):
            self._loose[renewal] = node
        else:
            self._loose.pop(renewal, None)

    def renew(self, nodes: Iterable[Node], now_s: float) -> None:
        """Renew shadows among consecutive blocks of a running sequence."""
        for node in reversed(list(nodes)):  # The deepest is the first that may go.
            if self._leave(node):
                self._enter(node, now_s)

    def stale_blocks(self, now_s: float) -> int:
        """Return the number of stale shadows."""
        return sum(1 for _ in takewhile(lambda one: one[0] <= now_s - STALE_S, self._renewed.values()))

    def victim(
        self, kept: Collection[BlockHash] = (), *, renewed_before_s: float = float("inf")
    ) -> Node | None:
        """Return the first evictable shadow that was renewed before then; None: there is none."""
        for (renewed_s, _), node in self._loose.items():
            if renewed_s > renewed_before_s:
                return None
            if node.name not in kept:
                found: Node = node
                return found
        return None

    def check_integrity(self, tree: Iterable[Node]) -> None:
        """Raise AssertionError unless these are the marked nodes, each only on the host, and correctly
        indexed."""
        assert {node for node in tree if node.is_shadow} == set(self._renewed)
        for node in self._renewed:
            places = node.places
            assert places[Tier.HOST] is not None and places[Tier.DEVICE] is None, "a shadow is elsewhere"
        renewals = list(self._renewed.values())
        assert renewals == sorted(renewals), "shadows are out of order"
        loose = [node for node in self._renewed if node.is_loose(Tier.HOST)]
        assert list(self._loose.values()) == loose, "who may go is not known"

    def _enter(self, node: Node, now_s: float) -> None:
        self._renewals += 1
        self._renewed[node] = (now_s, self._renewals)
        self.rank(node)

    def _leave(self, node: Node) -> bool:
        renewal = self._renewed.pop(node, None)
        if renewal is None:
            return False
        self._loose.pop(renewal, None)
        return True
