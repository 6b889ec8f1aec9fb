"""A pool with more blocks than the device holds: how many may be in use changes, ids do not. Pure.

What is over lies in the worker's own host memory (`residency`). A shrinking pool first says how many blocks
are doomed, and still gives them out, as plans on their way count on them; they go (`cut`) once no more are
taken than stay. Source: papers/004 §4.1.
"""

from collections.abc import Callable, Iterable

from services.worker.kv.core.block_pool import BlockPool, RowPool
from services.worker.kv.core.residency import Residency


class GrownPool(BlockPool):
    """Ids 0 … `residency.ids` - 1, of which `total_blocks` may be taken at once."""

    def __init__(self, total_blocks: int, block_tokens: int, residency: Residency) -> None:
        super().__init__(residency.ids, block_tokens)
        self._residency = residency
        self._limit = total_blocks

    @property
    def total_blocks(self) -> int:
        return self._limit - self.withdrawn_blocks

    @property
    def lasting_blocks(self) -> int:
        return self.total_blocks - self.doomed_blocks

    @property
    def taken_blocks(self) -> int:
        """Those withdrawn are not counted."""
        return len(self._is_free) - len(self._free) - self.withdrawn_blocks

    @property
    def free_blocks(self) -> int:
        return self.total_blocks - self.taken_blocks

    def can_allocate(self, blocks: int) -> bool:
        return blocks <= self.free_blocks

    def allocate(self, blocks: int) -> list[int]:
        taken = super().allocate(blocks)
        self._residency.take(taken)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        blocks = list(blocks)
        super().release(blocks)
        self._residency.give(blocks)

    @property
    def lendable_blocks(self) -> int:
        """Half of the device stays for what steps write to."""
        residency = self._residency
        device_blocks = residency.device_blocks - residency.spare_blocks
        return max(0, device_blocks // 2 - residency.pinned_blocks)

    def withdraw(self, blocks: Iterable[int]) -> list[int]:
        return self._residency.pin(super().withdraw(blocks))

    def readmit(self, places: Iterable[int]) -> None:
        super().readmit(self._residency.unpin(places))

    def rejoin(self, places: Iterable[int]) -> list[int]:
        return super().rejoin(self._residency.unpin(places))

    @property
    def rows(self) -> RowPool:
        return self._residency.rows

    def is_outside(self, block: int) -> bool:
        return self._residency.is_outside(block)

    def saved_row(self, block: int) -> int | None:
        return self._residency.saved_row(block)

    def share(self, block: int, row: int) -> None:
        self._residency.share(block, row)

    def unshare(self, block: int) -> bool:
        return self._residency.unshare(block)

    @property
    def cache_rows(self) -> int:
        """Of `rows`, those that a prefix cache may have."""
        return self._residency.cache_rows

    def check_rows(self, shared: Iterable[int]) -> None:
        self._residency.check_rows(shared)

    def watch(self, on_moved: Callable[[int], None], is_intact: Callable[[int], bool]) -> None:
        """See `Residency.on_moved` and `is_intact`."""
        self._residency.on_moved, self._residency.is_intact = on_moved, is_intact

    def resize(self, total_blocks: int) -> None:
        """So many may be taken from now on; fewer are doomed first. Raises ValueError for a growth before a
        shrink is over."""
        if total_blocks < 1 or total_blocks > len(self._is_free):
            raise ValueError(f"{total_blocks} blocks of {len(self._is_free)}")
        if total_blocks > self._limit and self.doomed_blocks:
            raise ValueError(f"{total_blocks} blocks, while {self.doomed_blocks} are about to go")
        self.doomed_blocks = max(0, self._limit - total_blocks)
        self._limit = max(self._limit, total_blocks)

    @property
    def excess_blocks(self) -> int:
        """Taken, and more than stay."""
        return max(0, self.taken_blocks - self.lasting_blocks)

    def cut(self) -> None:
        """The doomed blocks go. Raises ValueError while more are taken than stay."""
        if self.excess_blocks:
            raise ValueError("a doomed block is still taken")
        self._limit -= self.doomed_blocks
        self.doomed_blocks = 0
