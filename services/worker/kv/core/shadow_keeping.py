"""Host slots for shadows of other workers' running sequences, within a share of the host. Pure.

places = keeping.room(2)                        two slots, reserved until `fill`
keeping.fill(places, names, parent, now_s)      filled slots are named, the others are free again
"""

from collections.abc import Sequence

from services.worker.kv.core.block_manager import Inventory
from services.worker.kv.core.radix_tree import Tier
from services.worker.kv.core.shadows import STALE_S
from shared.blocks import BlockHash


class ShadowKeeping:
    """The shadow slots of one cache, for the thread that owns it."""

    def __init__(self, books: Inventory, most_blocks: int) -> None:
        """`most_blocks`: maximum number of host blocks, those being filled included."""
        self._books = books
        self.most_blocks = min(most_blocks, books.host.total)
        self.open_places: dict[int, None] = {}
        """Slots that are being filled."""
        self.kept_in_all = 0
        """Number of shadow blocks stored since the start."""

    @property
    def blocks(self) -> int:
        """Number of shadow blocks now."""
        return len(self._books.shadows)

    def room_blocks(self, now_s: float) -> int:
        """Return the number of further blocks that could be kept, stale ones replaced."""
        used = len(self._books.shadows) + len(self.open_places)
        return max(0, self.most_blocks - used + self._books.shadows.stale_blocks(now_s))

    def known(self, names: Sequence[BlockHash], now_s: float) -> int:
        """Return the number of leading `names` stored here, and renew them."""
        found = self._books.tree.match(names)
        self._books.shadows.renew(found, now_s)
        return len(found)

    def room(self, blocks: int, now_s: float, kept: Sequence[BlockHash] = ()) -> list[int]:
        """Reserve up to so many host slots, which must be passed to `fill`; no slot of `kept` is taken.

        Stale shadows are evicted for it and, within the share, the oldest cached copies."""
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
        """Name the first `len(names)` slots, whose blocks follow `parent`, and free the others; return the
        number of leading `names` stored here now.

        Slots of blocks without their parent are freed too."""
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
        books.shadow(books.tree.add(name, before), place, now_s)
        self.kept_in_all += 1
        return True
