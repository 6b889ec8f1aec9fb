"""Which blocks of the device's KV are free, and which rows of host memory. Pure bookkeeping of ids: no
tensor, no sequence, no tier.

A block is `block_tokens` consecutive tokens of one sequence over all layers; a row has room for one.
"""

from collections.abc import Collection, Iterable


class RowPool:
    """Rows 0 … total-1 of a worker's host memory, each free or somebody's."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free row, or None."""
        return self._free.pop() if self._free else None

    def claim(self, rows: Collection[int]) -> None:
        """Takes certain rows, each once. Raises ValueError, and takes none, unless all are free."""
        wanted = set(rows)
        free = [row for row in self._free if row not in wanted]
        if len(wanted) != len(rows) or len(free) + len(wanted) != len(self._free):
            raise ValueError("rows are claimed that are not free")
        self._free = free

    def give(self, row: int) -> None:
        """It is free again."""
        self._free.append(row)

    def check_integrity(self, used: Iterable[int]) -> None:
        """AssertionError unless `used` and the free ones are each row once."""
        assert sorted([*used, *self._free]) == list(range(self.total)), "rows lost or used twice"


class RowShare:
    """What one owner has of `rows`: `total` at most, wherever they are."""

    def __init__(self, rows: RowPool, total: int) -> None:
        """Raises ValueError for a total that cannot be."""
        if total < 0:
            raise ValueError(f"{total} rows of host memory")
        self.rows = rows
        self.total = total
        self.used = 0

    @property
    def free(self) -> int:
        return self.total - self.used

    def take(self) -> int | None:
        """A free row, or None."""
        row = self.rows.take() if self.free > 0 else None
        self.used += row is not None
        return row

    def give(self, row: int) -> None:
        """It is free again."""
        self.used -= 1
        self.rows.give(row)


class BlockPool:
    """Block ids 0 … total-1, each free or taken. The block freed last is taken first (its memory is warm)."""

    def __init__(self, total_blocks: int, block_tokens: int) -> None:
        if total_blocks < 1 or block_tokens < 1:
            raise ValueError(f"a pool needs blocks and tokens in them, got {total_blocks} of {block_tokens}")
        self.block_tokens = block_tokens
        self.growable_blocks = 0
        """More, that there could be."""
        self.doomed_blocks = 0
        """Of `total_blocks`, those that are about to go."""
        self._free = list(range(total_blocks - 1, -1, -1))
        self._is_free = [True] * total_blocks
        self._withdrawn: set[int] = set()

    @property
    def ids(self) -> int:
        """All ids are below this, how many blocks there are at the moment or not."""
        return len(self._is_free)

    @property
    def total_blocks(self) -> int:
        """Those withdrawn are not counted."""
        return len(self._is_free) - len(self._withdrawn)

    @property
    def withdrawn_blocks(self) -> int:
        """Lent to another worker."""
        return len(self._withdrawn)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def evictable_blocks(self) -> int:
        """None: what is taken here is taken until it is given back."""
        return 0

    def can_allocate(self, blocks: int) -> bool:
        return blocks <= len(self._free)

    def allocate(self, blocks: int) -> list[int]:
        """Ids of that many blocks. Raises ValueError, and takes none, when there are fewer."""
        if blocks < 0 or not self.can_allocate(blocks):
            raise ValueError(f"{blocks} blocks asked for, {self.free_blocks} free")
        taken = [self._free.pop() for _ in range(blocks)]
        for block in taken:
            self._is_free[block] = False
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Raises ValueError on one that is free already or was never there."""
        for block in blocks:
            if not 0 <= block < len(self._is_free) or self._is_free[block] or block in self._withdrawn:
                raise ValueError(f"block {block} is not taken")
            self._is_free[block] = True
            self._free.append(block)

    @property
    def lendable_blocks(self) -> int:
        """More that could be withdrawn, whether they are free or not."""
        return self.total_blocks

    @property
    def rows(self) -> RowPool | None:
        """Of host memory, where blocks may lie while they are in use; None: they never do."""
        return None

    def is_outside(self, block: int) -> bool:
        """Whether a taken block lies in a row, and not on the device."""
        return False

    def saved_row(self, block: int) -> int | None:
        """The row that has what the block has, unless it is shared."""
        return None

    def share(self, block: int, row: int) -> None:
        """That row has what the block has, and is the cache's."""

    def unshare(self, block: int) -> bool:
        """The cache wants the row that it shares with the block no more. True: the block keeps it."""
        return False

    def withdraw(self, blocks: Iterable[int]) -> list[int]:
        """These, taken before, leave the pool; where they are in the engine's memory, to stay there. Raises
        ValueError on one that is free, or has left."""
        blocks = list(blocks)
        for block in blocks:
            if not 0 <= block < len(self._is_free) or self._is_free[block] or block in self._withdrawn:
                raise ValueError(f"block {block} is not taken")
            self._withdrawn.add(block)
        return blocks

    def readmit(self, places: Iterable[int]) -> None:
        """What is there comes back, free. Raises ValueError on one that had not left."""
        for block in places:
            if block not in self._withdrawn:
                raise ValueError(f"block {block} was not withdrawn")
            self._withdrawn.discard(block)
            self.release([block])

    def rejoin(self, places: Iterable[int]) -> list[int]:
        """What is there comes back, taken: its ids. Raises ValueError on one that had not left."""
        blocks = list(places)
        for block in blocks:
            if block not in self._withdrawn:
                raise ValueError(f"block {block} was not withdrawn")
            self._withdrawn.discard(block)
        return blocks

    def check_rows(self, shared: Iterable[int]) -> None:
        """AssertionError unless those the cache has, those that blocks have for themselves, and the free ones
        are each row once."""

    def check_integrity(self, held: Iterable[int]) -> None:
        """AssertionError unless `held` (all that anybody holds) and the free ones are each block once."""
        seen = sorted([*held, *self._free, *self._withdrawn])
        assert seen == list(range(len(self._is_free))), f"blocks lost or held twice: {seen}"
        assert all(self._is_free[block] for block in self._free), "a free block is marked as taken"
