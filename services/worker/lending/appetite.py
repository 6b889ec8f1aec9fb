"""How much a worker should borrow or give back now. Pure: looks at counts only.

Two marks with a gap between them, so that nothing is borrowed and returned in turn: below the lower one it
borrows up to the middle, above the upper one it returns what it borrowed and does not use.
Source: `algorithms.md` §4 (rManager), §7 (borrowing is one rung of the ladder).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Marks:
    """In blocks that a worker could allocate at once, borrowed ones included."""

    low_blocks: int
    high_blocks: int

    def __post_init__(self) -> None:
        if not 0 <= self.low_blocks <= self.high_blocks:
            raise ValueError(f"the low mark {self.low_blocks} is above the high mark {self.high_blocks}")

    @property
    def middle_blocks(self) -> int:
        return (self.low_blocks + self.high_blocks + 1) // 2


@dataclass(frozen=True, slots=True)
class Memory:
    """A worker's, in blocks."""

    own_free: int
    """Free or evictable, of its own."""
    borrowed_free: int = 0
    wanted: int = 0
    """Beyond the low mark: for a request that is known to need them."""


def blocks_to_borrow(memory: Memory, marks: Marks) -> int:
    """0 where there is enough."""
    available = memory.own_free + memory.borrowed_free
    if available >= marks.low_blocks + memory.wanted:
        return 0
    return max(0, marks.middle_blocks + memory.wanted - available)


def blocks_to_return(memory: Memory, marks: Marks, wanted_back_blocks: int = 0) -> int:
    """Of the borrowed ones that are not used. A creditor that is short gets back what can be spared down to
    the low mark."""
    available = memory.own_free + memory.borrowed_free
    keep = marks.low_blocks + memory.wanted
    spare = min(memory.borrowed_free, max(0, available - keep))
    beyond = max(0, available - marks.high_blocks - memory.wanted)
    return min(spare, max(beyond, wanted_back_blocks))
