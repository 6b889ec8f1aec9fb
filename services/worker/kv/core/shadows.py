"""Copies on the host that are kept for other workers' running sequences, should those workers die.

They are ordinary named blocks, found by whoever wants them, but the first to leave: whatever else needs room
on the host takes theirs, and between themselves only a copy that nobody has renewed for a while gives way.
One that a sequence here has used is a shadow no more. Pure: no slot, no bytes, no clock.
"""

from collections.abc import Collection, Iterable
from itertools import takewhile

from services.worker.kv.core.radix_tree import Node, Tier
from shared.blocks import BlockHash

STALE_S = 20.0
"""Not renewed for so long: its sequence has ended, or has another keeper. Renewals come every few seconds."""


class Shadows:
    """Of one cache: which nodes they are, renewed longest ago first."""

    def __init__(self) -> None:
        self._renewed_s: dict[Node, float] = {}

    def __len__(self) -> int:
        return len(self._renewed_s)

    def __contains__(self, node: Node) -> bool:
        return node in self._renewed_s

    def add(self, node: Node, now_s: float) -> None:
        """A new one."""
        node.is_shadow = True
        self._renewed_s[node] = now_s

    def discard(self, node: Node) -> bool:
        """It is one no more; whether it was."""
        node.is_shadow = False
        return self._renewed_s.pop(node, None) is not None

    def renew(self, nodes: Iterable[Node], now_s: float) -> None:
        """Consecutive blocks whose sequence still runs; others among them are not minded."""
        for node in reversed(list(nodes)):  # The deepest is the first that may go.
            if self._renewed_s.pop(node, None) is not None:
                self._renewed_s[node] = now_s

    def stale_blocks(self, now_s: float) -> int:
        """Those that give way to new ones."""
        return sum(1 for _ in takewhile(lambda at_s: at_s <= now_s - STALE_S, self._renewed_s.values()))

    def victim(
        self, kept: Collection[BlockHash] = (), *, renewed_before_s: float = float("inf")
    ) -> Node | None:
        """The first that may go, if it was last renewed before then. None: there is none."""
        for node, renewed_s in self._renewed_s.items():
            if renewed_s > renewed_before_s:
                return None
            if node.is_loose(Tier.HOST) and node.name not in kept:
                return node
        return None

    def check_integrity(self, tree: Iterable[Node]) -> None:
        """AssertionError unless these are the nodes that are marked so, each with a copy on the host and
        nowhere else."""
        assert {node for node in tree if node.is_shadow} == set(self._renewed_s)
        for node in self._renewed_s:
            places = node.places
            assert places[Tier.HOST] is not None and places[Tier.DEVICE] is None, "a shadow is elsewhere"
        times = list(self._renewed_s.values())
        assert times == sorted(times), "shadows are out of order"
