"""How much a worker should borrow or give back now. Pure: looks at counts only.

Two marks with a gap between them, so that nothing is borrowed and returned in turn: below the lower one it
borrows up to the middle, above the upper one it returns what it borrowed and does not use.
Source: `algorithms.md` §4 (rManager), §7 (borrowing is one rung of the ladder).
"""

from dataclasses import dataclass

from shared.messages.reports import Capacity


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
    """How many blocks of a worker are free, and how many it wants."""

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


_REPORTS_UNTIL_SEEN = 2
"""The next report may have been made before."""


class Balance:
    """What one worker lacks or could return, by its own latest report and by what a sequence needs."""

    def __init__(self, marks: Marks, capacity: Capacity) -> None:
        self.marks = marks
        self.capacity = capacity
        self.needed_blocks = 0
        """By one sequence, all in all; 0: none is too long for this worker."""
        self.wanted_blocks = 0
        """Of those, what was not there at the last report."""
        self.may_borrow_ahead = True
        """Of need: where little is free, for no sequence that is too long."""
        self._reports = self._shrink_from = 0

    @property
    def own_blocks(self) -> int:
        """Free or evictable, not borrowed."""
        return self.capacity.plannable_blocks - self.capacity.borrowed_free_blocks

    @property
    def keep_blocks(self) -> int:
        """Of its own free memory, not to be used to bring KV home."""
        return max(self.marks.middle_blocks, self.marks.low_blocks + self.wanted_blocks)

    @property
    def short_blocks(self) -> int:
        """What it would like back from its own debtors."""
        return max(0, self.marks.low_blocks + self.wanted_blocks - self.capacity.plannable_blocks)

    def on_report(self, capacity: Capacity) -> None:
        """As the pool is now."""
        self.capacity, self._reports = capacity, self._reports + 1
        available = capacity.plannable_blocks
        lacking = self.needed_blocks - capacity.total_blocks  # what is used already is not wanted again
        wanted = lacking + available - self.marks.low_blocks
        self.wanted_blocks = max(0, wanted) if self.needed_blocks else 0

    def lacks(self, handed_blocks: int, idle_blocks: int) -> int:
        """To be borrowed now, ahead of need only where the own memory cannot grow; of what is borrowed
        `handed_blocks` are the pool's, `idle_blocks` nobody's."""
        may_wait = not self.may_borrow_ahead or self.capacity.growable_blocks > 0
        if may_wait and not self.wanted_blocks:
            return 0
        return blocks_to_borrow(self._memory(handed_blocks, idle_blocks), self.marks)

    def spares(self, handed_blocks: int, idle_blocks: int, wanted_back_blocks: int) -> int:
        """To be returned now, of what is borrowed and not used."""
        return blocks_to_return(self._memory(handed_blocks, idle_blocks), self.marks, wanted_back_blocks)

    def may_shrink(self) -> bool:
        """What was given up before is in the report."""
        return self._reports >= self._shrink_from

    def on_shrunk(self) -> None:
        """Borrowed blocks have left the pool."""
        self._shrink_from = self._reports + _REPORTS_UNTIL_SEEN

    def _memory(self, handed_blocks: int, idle_blocks: int) -> Memory:
        unseen = max(0, handed_blocks - self.capacity.borrowed_blocks)  # since the last report
        unused = idle_blocks + self.capacity.borrowed_free_blocks + unseen
        return Memory(self.own_blocks, unused, self.wanted_blocks)
