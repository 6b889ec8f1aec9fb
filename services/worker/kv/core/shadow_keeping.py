"""Room on the host for copies of other workers' running sequences, within a share of it: who asks gets slots,
fills them and gives them names, or gives them back. Pure.

    places = keeping.room(2)          two slots, the asker's own until `fill`
    keeping.fill(places, names, parent, now_s)      as many as have arrived are found by their names now
"""

from collections.abc import Sequence

from services.worker.kv.core.block_manager import Inventory
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.shadows import STALE_S
from shared.blocks import BlockHash


class ShadowKeeping:
    """Of one cache. One thread: the one that owns it."""

    def __init__(self, books: Inventory, most_blocks: int) -> None:
        """`most_blocks` of the host's at a time, those that are being filled included."""
        self._books = books
        self.most_blocks = min(most_blocks, books.host.total)
        self.open_places: dict[int, None] = {}
        """Slots that are being filled."""
        self.kept_in_all = 0
        """Blocks, since the start."""

    @property
    def blocks(self) -> int:
        """That are kept now."""
        return len(self._books.shadows)

    def room_blocks(self, now_s: float) -> int:
        """More that could be kept; those count whose sequence nobody has named for a while."""
        used = len(self._books.shadows) + len(self.open_places)
        return max(0, self.most_blocks - used + self._books.shadows.stale_blocks(now_s))

    def known(self, names: Sequence[BlockHash], now_s: float) -> int:
        """How many of these, from the first on, are stored anywhere here. Their sequence still runs."""
        found = self._books.tree.match(names)
        self._books.shadows.renew(found, now_s)
        return len(found)

    def room(self, blocks: int, now_s: float, kept: Sequence[BlockHash] = ()) -> list[int]:
        """Up to so many slots of the host, to be given to `fill` in any case; none of those that hold `kept`.
        Shadows that are stale leave for it, and within their share cached copies that have waited longest."""
        places: list[int] = []
        shadows, spared = self._books.shadows, set(kept)
        while len(places) < blocks:
            if len(shadows) + len(self.open_places) >= self.most_blocks:
                stale = shadows.victim(spared, renewed_before_s=now_s - STALE_S)
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
        """The first `len(names)` of these slots have the blocks so called, which follow `parent`; the rest is
        given back, and what cannot be found because its beginning is gone. How many of `names` are stored
        here now, from the first on."""
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
        """Whether the block is stored, there or elsewhere. The slot is free again unless it is there."""
        books = self._books
        before = None if parent is None else books.tree.find(parent)
        node = books.tree.find(name)
        is_reachable = parent is None or (before is not None and before.stored)
        if node is not None or not is_reachable:
            books.host.give(place)
            return node is not None and node.stored
        books.shadow(books.tree.add(name, before), place, now_s)
        self.kept_in_all += 1
        return True
