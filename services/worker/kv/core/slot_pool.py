"""Slots of the own host tier and of the disk. Pure."""

from collections.abc import Collection

from services.worker.kv.core.block_pool import RowPool, RowShare
from services.worker.kv.core.eviction import EvictionOrder


class SlotPool(RowShare):
    """A tier's slots; `order` has the nodes whose copy here may go."""

    def __init__(self, total: int, order: EvictionOrder, rows: RowPool | None = None) -> None:
        """Without `rows` that others take from as well: of its own."""
        super().__init__(RowPool(max(0, total)) if rows is None else rows, total)
        self.order = order

    def claim(self, places: Collection[int]) -> None:
        """Takes certain slots, each once. Raises ValueError, and takes none, unless all are free."""
        self.rows.claim(places)
        self.used += len(places)

    def check_integrity(self, used: list[int]) -> None:
        """Raises AssertionError unless `used` are as many slots as were taken, each once."""
        assert len(used) == len(set(used)) == self.used, "slots lost or used twice"
