"""Shadows: host copies of blocks of sequences that run on other workers, in case those workers die. Pure.

Shadows are named blocks that any sequence may use, but they are evicted before all other host copies. A new
shadow replaces only one that was not renewed for a while. Its first use makes it an ordinary block.

places = shadows.room(2, now_s)                       two host slots, reserved until `fill`
shadows.fill(places, names, parent, now_s)            filled slots are named, the others are free again
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedDict

from services.worker.kv.core.eviction import NEVER
from services.worker.kv.core.radix_tree import Node, Tier
from shared.blocks import BlockHash

if TYPE_CHECKING:
    from services.worker.kv.core.block_manager import Inventory

STALE_S = 20.0
"""Age since the last renewal at which a shadow is stale. Renewals come every few seconds."""


class Shadows:
    """The shadows of one cache, oldest renewal first. Evictable ones are indexed by their renewal."""

    def __init__(self, books: "Inventory", most_blocks: int) -> None:
        """`most_blocks`: maximum number of host blocks, those being filled included."""
        self._books = books
        self.most_blocks = most_blocks
        self.open_places: dict[int, None] = {}
        """Slots that are being filled."""
        self.kept_in_all = 0
        """Number of shadow blocks stored since the start."""
        self._renewed: dict[Node, tuple[float, int]] = {}
        """Time and number of each shadow's renewal."""
        self._renewals = 0
        self._loose: Any = SortedDict()
        """Evictable shadows by renewal."""

    def __len__(self) -> int:
        return len(self._renewed)

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

    def room_blocks(self, now_s: float) -> int:
        """Return the number of further blocks that could be kept, stale ones replaced."""
        stale = takewhile(lambda one: one[0] <= now_s - STALE_S, self._renewed.values())
        return max(0, self.most_blocks - len(self) - len(self.open_places) + sum(1 for _ in stale))

    def known(self, names: Sequence[BlockHash], now_s: float) -> int:
        """Return the number of leading `names` stored here, and renew them."""
        found = self._books.tree.match(names)
        for node in reversed(found):  # The deepest is the first that may go.
            if self._leave(node):
                self._enter(node, now_s)
        return len(found)

    def room(self, blocks: int, now_s: float, kept: Sequence[BlockHash] = ()) -> list[int]:
        """Reserve up to so many host slots, which must be passed to `fill`; no slot of `kept` is taken. Stale
        shadows are evicted for it and, within the share, the oldest cached copies."""
        places: list[int] = []
        spared = set(kept)
        while len(places) < blocks:
            if len(self) + len(self.open_places) >= self.most_blocks:
                stale = self.victim(spared, renewed_before_s=now_s - STALE_S)
                if stale is None:
                    break
                self._books.remove(stale, Tier.HOST)
            place = self._books.slot(Tier.HOST, spared, for_shadow=True)
            if place is None:
                break
            self.open_places[place] = None
            places.append(place)
        return places

    def fill(
        self, places: Sequence[int], names: Sequence[BlockHash], parent: BlockHash | None, now_s: float
    ) -> int:
        """Name the first `len(names)` slots, whose blocks follow `parent`, and free the others; return the
        number of leading `names` stored here now. Slots of blocks without their parent are freed too."""
        before, stored = parent, 0
        for at, place in enumerate(places):
            del self.open_places[place]
            if at == stored and at < len(names):
                if self._put(place, names[at], before, now_s):
                    before, stored = names[at], stored + 1
            else:
                self._books.host.give(place)
        return stored

    def _put(self, place: int, name: BlockHash, parent: BlockHash | None, now_s: float) -> bool:
        """Store a block in its slot, unless it is stored already or unreachable; whether it is stored."""
        books = self._books
        before = None if parent is None else books.tree.find(parent)
        node = books.tree.find(name)
        is_reachable = parent is None or (before is not None and before.stored)
        if node is not None or not is_reachable:
            books.host.give(place)
            return node is not None and node.stored
        node = books.tree.add(name, before)
        node.is_shadow, node.used = True, NEVER
        self._enter(node, now_s)
        books.put(node, Tier.HOST, place)
        self.kept_in_all += 1
        return True

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
        assert list(self._loose.values()) == loose, "the index of evictable shadows is wrong"

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
