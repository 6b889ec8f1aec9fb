"""Free and taken ids: blocks of the device's KV, and rows of host memory; tables of blocks. Pure.

A block holds `block_tokens` consecutive tokens of one sequence over all layers; a row has room for one block.
A block table has a sequence's block ids in order, as an array of int32: a step copies tables as bytes."""

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

BlockTable: TypeAlias = "array[int]"
"""An array of int32, which must not grow while a view of its memory exists."""


def block_table(blocks: Iterable[int] = ()) -> BlockTable:
    """Return a new table. Raises OverflowError for an id beyond int32."""
    return array("i", blocks)


def first_borrowed(table: BlockTable, own_blocks: int) -> int:
    """Return the index of the first borrowed block; the table's length when there is none."""
    borrowed = np.flatnonzero(np.frombuffer(bytes(table), dtype=np.int32) >= own_blocks)
    return int(borrowed[0]) if len(borrowed) else len(table)


def joined(tables: Iterable[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Return a concatenated copy of tables; fast for a `BlockTable`."""
    flat = bytearray().join([each if isinstance(each, array) else block_table(each) for each in tables])
    return np.frombuffer(flat, dtype=np.int32)


def starts(lengths: npt.NDArray[np.int32] | npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Return the offsets `[parts + 1]` of consecutive parts, and the end of the last one."""
    found = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=found[1:])
    return found


class BlockPool:
    """Block ids 0 … total-1, each free or taken. The block freed last is taken first: its memory is warm.
    `on_taken` and `on_freed` are called with the blocks, `on_low` when few blocks are left."""

    def __init__(self, total_blocks: int, block_tokens: int, ids: int | None = None) -> None:
        """With more `ids` than blocks, `total_blocks` of them may be taken at once."""
        if total_blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, got {total_blocks} of {block_tokens}")
        self.block_tokens = block_tokens
        self.base = self
        """The pool of the device's blocks, in which a cache gives blocks names and another extends it."""
        self.evictable_blocks = 0
        """Always 0: a taken block stays taken until it is released."""
        self.growable_blocks = 0
        """Number of blocks by which the pool could grow."""
        self.doomed_blocks = 0
        """Number of `total_blocks` that are about to be removed."""
        self.ids = total_blocks if ids is None else ids
        """All ids are below this."""
        self._barred = self.ids - total_blocks
        """Number of free ids that may not be taken now."""
        self._free = list(range(self.ids - 1, -1, -1))
        self._is_free = [True] * self.ids
        self._withdrawn: set[int] = set()
        self.on_taken: list[Callable[[list[int]], None]] = []
        self.on_freed: list[Callable[[list[int]], None]] = []
        self.low_blocks = -1
        """`on_low` is called when no more blocks than these are free after an allocation."""
        self.on_low: list[Callable[[], None]] = []

    @property
    def total_blocks(self) -> int:
        """Blocks that may be taken, without withdrawn ones."""
        return self.ids - self._barred - len(self._withdrawn)

    @property
    def withdrawn_blocks(self) -> int:
        """Blocks lent to other workers."""
        return len(self._withdrawn)

    @property
    def free_blocks(self) -> int:
        return len(self._free) - self._barred

    def can_allocate(self, blocks: int) -> bool:
        return blocks <= len(self._free) - self._barred

    def allocate(self, blocks: int) -> list[int]:
        """Take that many blocks; return their ids. Raises ValueError, and takes none, if there are fewer."""
        if blocks < 0 or not self.can_allocate(blocks):
            raise ValueError(f"{blocks} blocks asked for, {self.free_blocks} free")
        taken: list[int] = []
        for _ in range(blocks):
            block = self._free.pop()
            self._is_free[block] = False
            taken.append(block)
        for hear in self.on_taken:
            hear(taken)
        if len(self._free) - self._barred <= self.low_blocks:
            for warn in self.on_low:
                warn()
        return taken

    def claim(self, blocks: Collection[int]) -> None:
        """Take certain blocks, each once. Raises ValueError, and takes none, unless all are free."""
        wanted = set(blocks)
        free = [block for block in self._free if block not in wanted]
        if len(wanted) != len(blocks) or len(free) + len(wanted) != len(self._free):
            raise ValueError("blocks are claimed that are not free")
        self._free = free
        for block in wanted:
            self._is_free[block] = False

    def release(self, blocks: Iterable[int]) -> None:
        """Free blocks. Raises ValueError on one that is free already or out of range."""
        blocks = list(blocks)
        for block in blocks:
            if not 0 <= block < self.ids or self._is_free[block] or block in self._withdrawn:
                raise ValueError(f"block {block} is not taken")
            self._is_free[block] = True
            self._free.append(block)
        for hear in self.on_freed:
            hear(blocks)

    @property
    def lendable_blocks(self) -> int:
        """Number of further blocks that could be withdrawn, free or not."""
        return self.total_blocks

    def withdraw(self, blocks: Iterable[int]) -> list[int]:
        """Remove taken blocks from the pool; return their fixed places in the engine's memory. Raises
        ValueError on a block that is free or withdrawn."""
        blocks = list(blocks)
        for block in blocks:
            if not 0 <= block < self.ids or self._is_free[block] or block in self._withdrawn:
                raise ValueError(f"block {block} is not taken")
            self._withdrawn.add(block)
        return blocks

    def readmit(self, places: Iterable[int]) -> None:
        """Put withdrawn blocks back, free. Raises ValueError on one that was not withdrawn."""
        self.release(BlockPool.rejoin(self, places))

    def rejoin(self, places: Iterable[int]) -> list[int]:
        """Put withdrawn blocks back, taken; return their ids. Raises ValueError on one that was not
        withdrawn."""
        blocks = list(places)
        for block in blocks:
            if block not in self._withdrawn:
                raise ValueError(f"block {block} was not withdrawn")
            self._withdrawn.discard(block)
        return blocks

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless each block is either free, withdrawn or in `held`, once."""
        seen = sorted([*held, *self._free, *self._withdrawn])
        assert seen == list(range(self.ids)), f"blocks lost or held twice: {seen}"
        assert all(self._is_free[block] for block in self._free), "a free block is marked as taken"


class RowShare:
    """One owner's part of `rows` of host memory: at most `total` of them, wherever they are."""

    def __init__(self, rows: BlockPool, total: int) -> None:
        """Raises ValueError for a negative total."""
        if total < 0:
            raise ValueError(f"{total} rows of host memory")
        self.rows = rows
        self.total = total
        self.used = 0

    @property
    def free(self) -> int:
        return self.total - self.used

    def take(self) -> int | None:
        """Take a free row; None when there is none."""
        if self.free <= 0 or not self.rows.free_blocks:
            return None
        self.used += 1
        return self.rows.allocate(1)[0]

    def give(self, row: int) -> None:
        """Free a row."""
        self.used -= 1
        self.rows.release([row])
