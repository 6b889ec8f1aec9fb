"""Blocks out of a worker's pool for a debtor, and back. Pure: ids only, cached prefixes are evicted first."""

from collections.abc import Iterable
from typing import Protocol


class LendablePool(Protocol):
    """What is asked of a pool, or of a prefix cache over one."""

    @property
    def free_blocks(self) -> int: ...

    @property
    def evictable_blocks(self) -> int: ...

    @property
    def withdrawn_blocks(self) -> int: ...

    def allocate(self, blocks: int) -> list[int]: ...

    def withdraw(self, blocks: Iterable[int]) -> None: ...

    def readmit(self, blocks: Iterable[int]) -> None: ...


def spare_blocks(pool: LendablePool, keep_blocks: int) -> int:
    """Free or evictable, beyond what is kept."""
    return max(0, pool.free_blocks + pool.evictable_blocks - keep_blocks)


def lend(pool: LendablePool, most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
    """Up to `most_blocks` leave the pool, none where fewer than `least_blocks` could; `keep_blocks` stay."""
    blocks = min(most_blocks, spare_blocks(pool, keep_blocks))
    if blocks < max(1, least_blocks):
        return []
    taken = pool.allocate(blocks)
    pool.withdraw(taken)
    return taken
