"""Whose turn it is: a share of all admissions goes to those that are overdue, oldest first.

Counted over plans, not within one, so that one admission a plan leaves nobody out. An overdue request that
does not fit lets others pass, until it has been overdue for four times as long as made it so.

Source: algorithms.md §1 (aging): nobody starves, and overload does not turn the order into FIFO.
"""

from services.scheduler.policy.ecoserve.jobs import Job
from services.scheduler.policy.ecoserve.options import EcoOptions

_STARVING = 4


class AgingTurns:
    """One queue's."""

    def __init__(self, options: EcoOptions) -> None:
        self._aging_s = options.aging_s
        self._others = max(0.0, 1 / options.aging_share - 1)
        """Admissions by order for each one by age."""
        self._since = 0.0

    def count(self) -> None:
        """One was admitted by order."""
        self._since = min(self._since + 1, 2 * self._others)

    def is_due(self) -> bool:
        return self._since >= self._others

    def take(self) -> None:
        """One was admitted by age."""
        self._since = max(0.0, self._since - self._others)

    def is_starving(self, job: Job, now_s: float) -> bool:
        """Nobody may pass it any more."""
        return now_s > job.deadline_s + _STARVING * self._aging_s
