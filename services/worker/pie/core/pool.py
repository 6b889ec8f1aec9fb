"""A block pool that grows and shrinks while its blocks are in use. Pure.

Low ids are given out first, so that the high ones, which go when it shrinks, are seldom taken. A shrinking
pool first says which blocks are doomed (`doomed_blocks`, the last ones) and still gives them out, as plans on
their way count on them. It is drained when none of them is taken, released or moved to one that stays, and
only then they go (`cut`). Source: papers/004 §4.1.
"""

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush

from services.worker.kv.core.block_pool import BlockPool


class ElasticPool(BlockPool):
    """A `BlockPool` of ids 0 … total-1 whose total changes."""

    def __init__(self, total_blocks: int, block_tokens: int) -> None:
        super().__init__(total_blocks, block_tokens)
        heapify(self._free)
        self.on_moved: Callable[[Mapping[int, int]], None] | None = None
        """Who holds blocks is told that they are called otherwise from now on; None: none can be moved."""

    @property
    def lasting_blocks(self) -> int:
        return self.total_blocks - self.doomed_blocks

    @property
    def is_drained(self) -> bool:
        """No doomed block is taken."""
        return all(self._is_free[self.lasting_blocks :])

    @property
    def taken_blocks(self) -> int:
        return self.total_blocks - self.free_blocks

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
            if not 0 <= block < self.total_blocks or self._is_free[block]:
                raise ValueError(f"block {block} is not taken")
            self._is_free[block] = True
            heappush(self._free, block)

    def compact(self) -> dict[int, int]:
        """Doomed block → free block, for all doomed ones that are taken; none while they would not all fit.

        Holders have been told on return; the bytes are the caller's.
        """
        taken = self.taken()
        doomed = [block for block in taken if block >= self.lasting_blocks]
        if self.on_moved is None or not doomed or len(taken) > self.lasting_blocks:
            return {}
        moves = dict(zip(doomed, self.allocate(len(doomed)), strict=True))
        self.on_moved(moves)
        self.release(doomed)
        return moves

    def resize(self, total_blocks: int) -> None:
        """Grow, or doom the last blocks. Raises ValueError for a growth before a shrink is over."""
        if total_blocks < 1 or (total_blocks > self.total_blocks and self.doomed_blocks):
            raise ValueError(f"{total_blocks} blocks, while {self.doomed_blocks} are about to go")
        for block in range(self.total_blocks, total_blocks):
            self._is_free.append(True)
            heappush(self._free, block)
        self.doomed_blocks = max(0, self.total_blocks - total_blocks)

    def cut(self) -> None:
        """The doomed blocks go. Raises ValueError while one of them is taken."""
        if not self.is_drained:
            raise ValueError("a doomed block is still taken")
        del self._is_free[self.lasting_blocks :]
        self.doomed_blocks = 0
        self._free = [block for block in self._free if block < self.total_blocks]
        heapify(self._free)
