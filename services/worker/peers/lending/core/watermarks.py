"""How many blocks a worker should borrow or return now, and whose blocks come home first. Pure.

Two marks with a gap between them prevent blocks from going back and forth. Below the low mark, the worker
borrows up to the middle; above the high mark, it returns unused borrowed blocks. Source: `algorithms.md` §4
(rManager, repayment), §7 (borrowing is one rung of the ladder).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from services.worker.peers.core.neighbours import Neighbours
from shared.messages.lending import KvTier
from shared.messages.reports import Capacity

_REPORTS_UNTIL_SEEN = 2
"""The next report may be older than a change."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks in blocks that a worker could allocate at once, borrowed ones included."""

    low_blocks: int
    high_blocks: int

    @property
    def middle_blocks(self) -> int:
        return (self.low_blocks + self.high_blocks + 1) // 2


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
        available = self.own_blocks + self._unused(handed_blocks, idle_blocks)
        if available >= self.marks.low_blocks + self.wanted_blocks:
            return 0
        return max(0, self.marks.middle_blocks + self.wanted_blocks - available)

    def spares(self, handed_blocks: int, idle_blocks: int, wanted_back_blocks: int) -> int:
        """Return how many unused borrowed blocks to return now: down to the low mark for creditors that are
        short."""
        unused = self._unused(handed_blocks, idle_blocks)
        available = self.own_blocks + unused - self.wanted_blocks
        spare = min(unused, max(0, available - self.marks.low_blocks))
        return min(spare, max(0, available - self.marks.high_blocks, wanted_back_blocks))

    def may_shrink(self) -> bool:
        """Return whether the report includes the last blocks that were given up."""
        return self._reports >= self._shrink_from

    def on_shrunk(self) -> None:
        """Record that borrowed blocks left the pool."""
        self._shrink_from = self._reports + _REPORTS_UNTIL_SEEN

    def _unused(self, handed_blocks: int, idle_blocks: int) -> int:
        unseen = max(0, handed_blocks - self.capacity.borrowed_blocks)  # Since the last report.
        return idle_blocks + self.capacity.borrowed_free_blocks + unseen


@dataclass(frozen=True, slots=True)
class CreditorPressure:
    """Memory pressure of a creditor, as far as its debtor knows."""

    short_blocks: int = 0
    """Device blocks that it wants back."""
    free_fraction: float = 1.0
    """Share of its own memory that is free."""
    distance: int = 0


def in_order(
    lenders: Iterable[tuple[str, KvTier]], pressures: Mapping[str, CreditorPressure]
) -> list[tuple[str, KvTier]]:
    """Return creditors' memory, by tier, in the order in which to bring it home.

    First the device memory that creditors lack, then host memory, which is slower to read, then by pressure;
    at equal pressure, distant creditors first, since their blocks cost more to read."""
    nothing = CreditorPressure()

    def rank(lender: tuple[str, KvTier]) -> tuple[int, bool, float, int, str]:
        creditor, tier = lender
        pressure = pressures.get(creditor, nothing)
        is_device = tier is KvTier.DEVICE
        short_blocks = pressure.short_blocks if is_device else 0
        return -short_blocks, is_device, pressure.free_fraction, -pressure.distance, creditor

    return sorted(lenders, key=rank)


def pressures(
    neighbours: Neighbours, own_host: str, wanted_back: Mapping[str, int]
) -> dict[str, CreditorPressure]:
    """Return the pressure by creditor, from heartbeats and the blocks that creditors want back."""
    found = {
        name: CreditorPressure(free_fraction=one.free_fraction, distance=int(one.host != own_host))
        for name, one in neighbours.known.items()
    }
    for name, blocks in wanted_back.items():
        found[name] = replace(found.get(name, CreditorPressure()), short_blocks=blocks)
    return found
