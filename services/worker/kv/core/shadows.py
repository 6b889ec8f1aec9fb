"""Copies on the host that are kept for other workers' running sequences, should those workers die.

They are ordinary named blocks, found by whoever wants them, but the first to leave: whatever else needs room
on the host takes theirs, and between themselves only a copy that nobody has renewed for a while gives way.
One that a sequence here has used is a shadow no more. Pure: no slot, no bytes, no clock.
"""

from collections.abc import Collection, Iterable
from itertools import takewhile
from typing import Any

from sortedcontainers import SortedDict

from services.worker.kv.core.radix_tree import Node, Tier
from shared.blocks import BlockHash

STALE_S = 20.0
"""Not renewed for so long: its sequence has ended, or has another keeper. Renewals come every few seconds."""


class Shadows:
    """Of one cache: which nodes they are, renewed longest ago first, and which of them may go. Who goes next
    is found without a look at the others, most of which have to wait for what hangs on them."""

    def __init__(self) -> None:
        self._renewed: dict[Node, tuple[float, int]] = {}
        """When each was renewed, and the number of that renewal."""
        self._renewals = 0
        self._loose: Any = SortedDict()
        """Those that may go, by the same."""

    def __len__(self) -> int:
        return len(self._renewed)

    def __contains__(self, node: Node) -> bool:
        return node in self._renewed

    def add(self, node: Node, now_s: float) -> None:
        """A new one."""
        node.is_shadow = True
        self._enter(node, now_s)

    def discard(self, node: Node) -> bool:
        """It is one no more; whether it was."""
        node.is_shadow = False
        return self._leave(node)

    def rank(self, node: Node) -> None:
        """One of them may go now, or may not any more: to be told of each change."""
        renewal = self._renewed[node]
        if node.is_loose(Tier.HOST):
            self._loose[renewal] = node
        else:
            self._loose.pop(renewal, None)

    def renew(self, nodes: Iterable[Node], now_s: float) -> None:
        """Consecutive blocks whose sequence still runs; others among them are not minded."""
        for node in reversed(list(nodes)):  # The deepest is the first that may go.
            if self._leave(node):
                self._enter(node, now_s)

    def stale_blocks(self, now_s: float) -> int:
        """Those that give way to new ones."""
        return sum(1 for _ in takewhile(lambda one: one[0] <= now_s - STALE_S, self._renewed.values()))

    def victim(
        self, kept: Collection[BlockHash] = (), *, renewed_before_s: float = float("inf")
    ) -> Node | None:
        """The first that may go, if it was last renewed before then. None: there is none."""
        for (renewed_s, _), node in self._loose.items():
            if renewed_s > renewed_before_s:
                return None
            if node.name not in kept:
                found: Node = node
                return found
        return None

    def check_integrity(self, tree: Iterable[Node]) -> None:
        """AssertionError unless these are the nodes that are marked so, each with a copy on the host and
        nowhere else, and those that may go are known."""
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
