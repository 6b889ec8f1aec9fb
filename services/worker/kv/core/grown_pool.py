"""A block pool with more ids than the device has blocks; how many may be in use at once changes. Pure.

Blocks beyond the device lie in the worker's own host memory (`residency`). A pool that shrinks first reports
doomed blocks, which it still gives out because plans count on them. `cut` removes them once few enough blocks
are taken. Source: papers/004 §4.1."""

from collections.abc import Iterable

from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.residency import Residency


class GrownPool(BlockPool):
    """Ids 0 … `residency.ids` - 1, of which `total_blocks` may be taken at once."""

    def __init__(self, total_blocks: int, block_tokens: int, residency: Residency) -> None:
        super().__init__(total_blocks, block_tokens, residency.ids)
        self.residency = residency
        self.on_taken.append(residency.take)
        self.on_freed.append(residency.give)

    @property
    def lasting_blocks(self) -> int:
        """Blocks that remain after `cut`."""
        return self.total_blocks - self.doomed_blocks

    @property
    def taken_blocks(self) -> int:
        """Taken blocks, without withdrawn ones."""
        return self.total_blocks - self.free_blocks

    @property
    def lendable_blocks(self) -> int:
        """Half of the device stays for what steps write to."""
        residency = self.residency
        device_blocks = residency.device_blocks - residency.spare_blocks
        return max(0, device_blocks // 2 - residency.pinned_blocks)

    def withdraw(self, blocks: Iterable[int]) -> list[int]:
        return self.residency.pin(super().withdraw(blocks))

    def readmit(self, places: Iterable[int]) -> None:
        super().readmit(self.residency.unpin(places))

    def rejoin(self, places: Iterable[int]) -> list[int]:
        return super().rejoin(self.residency.unpin(places))

    def resize(self, total_blocks: int) -> None:
        """Let `total_blocks` be taken at once; a smaller number dooms blocks first. Raises ValueError for a
        size that is out of range, or a growth before a shrink is over."""
        limit = self.ids - self._barred
        if total_blocks < 1 or total_blocks > self.ids:
            raise ValueError(f"{total_blocks} blocks of {self.ids}")
        if total_blocks > limit and self.doomed_blocks:
            raise ValueError(f"cannot grow to {total_blocks} blocks before {self.doomed_blocks} are cut")
        self.doomed_blocks = max(0, limit - total_blocks)
        self._barred = self.ids - max(limit, total_blocks)

    @property
    def excess_blocks(self) -> int:
        """Taken blocks beyond those that remain after `cut`."""
        return max(0, self.taken_blocks - self.lasting_blocks)

    def cut(self) -> None:
        """Remove the doomed blocks. Raises ValueError while too many blocks are taken."""
        if self.excess_blocks:
            raise ValueError("a doomed block is still taken")
        self._barred += self.doomed_blocks
        self.doomed_blocks = 0
