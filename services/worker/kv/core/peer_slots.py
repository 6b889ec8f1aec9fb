"""Slots in host memory that other workers lend to this one's prefix cache. Pure.

They come with grants and go with leases, whoever uses them by then, and no number is used twice: what was
lost cannot be taken for what came later. Whose memory a slot is, and under which grant, is not known here.
"""

from collections.abc import Collection, Iterable

from services.worker.kv.core.eviction import EvictionOrder
from services.worker.kv.core.radix_tree import Node


class PeerSlots:
    """At most `most` at a time; `order` has the nodes whose copy here may go."""

    def __init__(self, most: int, order: EvictionOrder) -> None:
        self.most = max(0, most)
        self.order = order
        self._free: dict[int, None] = {}
        self._used: set[int] = set()
        self.at: dict[int, Node] = {}
        """Whose bytes are there; not those that are on their way."""
        self.is_refused = False
        """The last search for more brought nothing: what is there has to do."""

    def __contains__(self, place: object) -> bool:
        return place in self._used or place in self._free

    @property
    def total(self) -> int:
        """That are lent now."""
        return len(self._free) + len(self._used)

    @property
    def free(self) -> int:
        return len(self._free)

    def admit(self, places: Iterable[int]) -> None:
        """These are lent from now on."""
        self._free.update(dict.fromkeys(places))

    def take(self) -> int | None:
        """A free one, or None."""
        if not self._free:
            return None
        place = next(iter(self._free))
        del self._free[place]
        self._used.add(place)
        return place

    def give(self, place: int) -> None:
        """It is free again, unless it was lost meanwhile."""
        if place in self._used:
            self._used.remove(place)
            self._free[place] = None

    def drop(self, places: Collection[int]) -> list[Node]:
        """These are lent no more: the nodes whose bytes were there."""
        for place in places:
            self._free.pop(place, None)
            self._used.discard(place)
        return [self.at[place] for place in places if place in self.at]

    def retire(self) -> list[int]:
        """The free ones, which are given up."""
        retired, self._free = list(self._free), {}
        return retired

    def check_integrity(self, used: Collection[int]) -> None:
        """AssertionError unless `used` are the slots that were taken and are still lent, each once."""
        assert len(used) == len(set(used)) and set(used) == self._used, "slots of peers lost or used twice"
        assert not self._used.intersection(self._free), "a slot is free and used"
        assert self.at.keys() <= self._used, "a block lies where nothing is lent"
