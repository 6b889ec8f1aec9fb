"""One lower tier's slots and what may leave them. Pure bookkeeping, like `BlockPool`."""

from collections.abc import Collection

from services.worker.kv.eviction import EvictionOrder


class Shelf:
    """Slots 0 … total-1; `order` has the nodes whose copy here may go."""

    def __init__(self, total: int, order: EvictionOrder) -> None:
        if total < 0:
            raise ValueError(f"a tier cannot have {total} blocks")
        self.total = total
        self.order = order
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, or None."""
        return self._free.pop() if self._free else None

    def claim(self, places: Collection[int]) -> None:
        """Takes certain slots, each once. Raises ValueError, and takes none, unless all are free."""
        wanted = set(places)
        free = [place for place in self._free if place not in wanted]
        if len(wanted) != len(places) or len(free) + len(wanted) != len(self._free):
            raise ValueError("slots are claimed that are not free")
        self._free = free

    def give(self, place: int) -> None:
        """A slot is free again."""
        self._free.append(place)

    def check_integrity(self, used: list[int]) -> None:
        """Raises AssertionError unless `used` and the free slots are each slot once."""
        assert sorted([*used, *self._free]) == list(range(self.total)), "slots lost or used twice"
