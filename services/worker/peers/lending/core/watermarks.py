"""How many blocks a worker should borrow or return now. Pure: looks at counts only.

Two marks with a gap between them prevent blocks from going back and forth. Below the low mark, the worker
borrows up to the middle; above the high mark, it returns unused borrowed blocks. Source: `algorithms.md` §4
(rManager), §7 (borrowing is one rung of the ladder).
"""

from dataclasses import dataclass

from shared.messages.reports import Capacity


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks in blocks that a worker could allocate at once, borrowed ones included."""

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
    """Free and wanted blocks of a worker."""

    own_free: int
    """Own blocks that are free or evictable."""
    borrowed_free: int = 0
    wanted: int = 0
    """Blocks beyond the low mark that a known request needs."""


def blocks_to_borrow(memory: Memory, marks: Marks) -> int:
    """Return how many blocks to borrow; 0 when there are enough."""
    available = memory.own_free + memory.borrowed_free
    if available >= marks.low_blocks + memory.wanted:
        return 0
    return max(0, marks.middle_blocks + memory.wanted - available)


def blocks_to_return(memory: Memory, marks: Marks, wanted_back_blocks: int = 0) -> int:
    """Return how many free borrowed blocks to return: down to the low mark for creditors that are short."""
    available = memory.own_free + memory.borrowed_free
    keep = marks.low_blocks + memory.wanted
    spare = min(memory.borrowed_free, max(0, available - keep))
    beyond = max(0, available - marks.high_blocks - memory.wanted)
    return min(spare, max(beyond, wanted_back_blocks))


_REPORTS_UNTIL_SEEN = 2
"""The next report may be older than a change."""


class Balance:
    """Blocks that a worker lacks or can return, by its latest report and its sequences' needs."""

    def __init__(self, marks: Marks, capacity: Capacity) -> None:
        self.marks = marks
        self.capacity = capacity
        self.needed_blocks = 0
        """Total need of a sequence that is too long for this worker; 0: there is none."""
        self.wanted_blocks = 0
        """Part of this need that was missing at the last report."""
        self.may_borrow_ahead = True
        """Borrow at the low mark, without a sequence that is too long."""
        self._reports = self._shrink_from = 0

    @property
    def own_blocks(self) -> int:
        """Own blocks that are free or evictable."""
        return self.capacity.plannable_blocks - self.capacity.borrowed_free_blocks

    @property
    def keep_blocks(self) -> int:
        """Own free blocks not to be used for recalls."""
        return max(self.marks.middle_blocks, self.marks.low_blocks + self.wanted_blocks)

    @property
    def short_blocks(self) -> int:
        """Blocks that it wants back from its debtors."""
        return max(0, self.marks.low_blocks + self.wanted_blocks - self.capacity.plannable_blocks)

    def on_report(self, capacity: Capacity) -> None:
        """Take in the present state of the pool."""
        self.capacity, self._reports = capacity, self._reports + 1
        available = capacity.plannable_blocks
        lacking = self.needed_blocks - capacity.total_blocks  # Used blocks are not wanted again.
        wanted = lacking + available - self.marks.low_blocks
        self.wanted_blocks = max(0, wanted) if self.needed_blocks else 0

    def lacks(self, handed_blocks: int, idle_blocks: int) -> int:
        """Return how many blocks to borrow now; ahead of need only if own memory cannot grow.

        `handed_blocks` are borrowed and in the pool, `idle_blocks` borrowed and unused."""
        may_wait = not self.may_borrow_ahead or self.capacity.growable_blocks > 0
        if may_wait and not self.wanted_blocks:
            return 0
        return blocks_to_borrow(self._memory(handed_blocks, idle_blocks), self.marks)

    def spares(self, handed_blocks: int, idle_blocks: int, wanted_back_blocks: int) -> int:
        """Return how many unused borrowed blocks to return now."""
        return blocks_to_return(self._memory(handed_blocks, idle_blocks), self.marks, wanted_back_blocks)

    def may_shrink(self) -> bool:
        """Return whether the report includes the last blocks that were given up."""
        return self._reports >= self._shrink_from

    def on_shrunk(self) -> None:
        """Record that borrowed blocks left the pool."""
        self._shrink_from = self._reports + _REPORTS_UNTIL_SEEN

    def _memory(self, handed_blocks: int, idle_blocks: int) -> Memory:
        unseen = max(0, handed_blocks - self.capacity.borrowed_blocks)  # Since the last report.
        unused = idle_blocks + self.capacity.borrowed_free_blocks + unseen
        return Memory(self.own_blocks, unused, self.wanted_blocks)
