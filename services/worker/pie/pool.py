"""A block pool that grows and shrinks while its blocks are in use. Pure.

Low ids are given out first, so that the high ones, which go when it shrinks, are seldom taken. A shrinking
pool counts as small at once (nothing new is given out beyond the new size) and is drained when the last
doomed block is released. Source: papers/004 §4.1.
"""

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from services.worker.kv.pool import BlockPool


class ElasticPool(BlockPool):
    """Ids 0 … total-1, and while it drains those beyond that are still taken."""

    def __init__(self, total_blocks: int, block_tokens: int) -> None:
        super().__init__(total_blocks, block_tokens)
        heapify(self._free)
        self._doomed_taken = 0

    @property
    def is_drained(self) -> bool:
        """No block beyond `total_blocks` is taken."""
        return not self._doomed_taken

    def taken(self) -> list[int]:
        """Ids in use, ascending, doomed ones included."""
        return [block for block, is_free in enumerate(self._is_free) if not is_free]

    def allocate(self, blocks: int) -> list[int]:
        if blocks < 0 or not self.can_allocate(blocks):
            raise ValueError(f"{blocks} blocks asked for, {self.free_blocks} free")
        taken = [heappop(self._free) for _ in range(blocks)]
        for block in taken:
            self._is_free[block] = False
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not 0 <= block < len(self._is_free) or self._is_free[block]:
                raise ValueError(f"block {block} is not taken")
            self._is_free[block] = True
            if block < self.total_blocks:
                heappush(self._free, block)
            else:
                self._doomed_taken -= 1

    def resize(self, total_blocks: int) -> None:
        """Grow, or begin to shrink. Raises ValueError for a growth before a shrunk pool is drained."""
        if total_blocks < 1 or (total_blocks > self.total_blocks and not self.is_drained):
            raise ValueError(f"{self._doomed_taken} blocks beyond {self.total_blocks} are still taken")
        grown = range(self.total_blocks, total_blocks)
        self._is_free += [True] * (total_blocks - len(self._is_free))
        for block in grown:
            heappush(self._free, block)
        self.total_blocks = total_blocks
        if not grown:
            self._free = [block for block in self._free if block < total_blocks]
            heapify(self._free)
            self._doomed_taken = self._is_free[total_blocks:].count(False)

    def check_integrity(self, held: Iterable[int]) -> None:
        held = list(held)
        seen = [*held, *self._free]
        assert len(set(seen)) == len(seen), "a block is held twice"
        assert set(range(self.total_blocks)) <= set(seen), "a block is lost"
        assert all(block < self.total_blocks for block in self._free), "a doomed block is given out again"
        assert sum(block >= self.total_blocks for block in held) == self._doomed_taken
        assert sorted(held) == self.taken()
