"""Waiting queues: a sorted line, and a queue by priority, slack class (time left) and rank.

The key of an item must not change while it is in a line; remove the item first. Source: papers/003 §3.3
(Ordering); algorithms.md §1 (migration, aging).
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf
from operator import attrgetter
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedDict, SortedKeyList

from services.scheduler.policy.batch_builder import Job, arrival_rank
from services.scheduler.policy.contract import PASSING_SHARE
from shared.average import averaged

T = TypeVar("T")


class Line(SortedKeyList, Generic[T]):  # type: ignore[misc]  # untyped
    """A list of items sorted by `key`, which must be unique per item."""

    def __init__(self, key: Callable[[T], Any], items: Iterable[T] = ()) -> None:
        super().__init__(items, key)

    def first(self) -> T | None:
        return self[0] if self else None

    def check_integrity(self) -> None:
        """Raises AssertionError when an item's key changed."""
        keys = [self.key(item) for item in self]
        assert keys == sorted(keys), "out of order"


_PASSING_STARTS = 8
"""Number of average jobs that may pass before the first start in order of arrival; no more than wait."""
_MEAN_WEIGHT = 1 / 64


class PassingBudget:
    """Limit on work that passes older work: no job waits longer than 1 / (1 - share) times its wait in order
    of arrival, plus a few starts. Share 0.35: each second started in order allows 0.54 s to pass."""

    def __init__(self, share: float = PASSING_SHARE) -> None:
        """`share`: at least 1 means no limit."""
        self._is_bounded = share < 1
        self._earned = share / (1 - share) if self._is_bounded else 0.0
        """Seconds that may pass per second of work started in order of arrival."""
        self._spent_s = self._mean_s = 0.0
        self._starts = 0

    def may_pass(self, waiting: int) -> bool:
        """Return whether a job may pass older ones where `waiting` jobs wait."""
        return not self._is_bounded or self._spent_s <= min(waiting, _PASSING_STARTS) * self._mean_s

    def start(self, work_s: float, *, passes: bool) -> None:
        """Count a start; `passes`: an older job waits."""
        self._starts += 1
        self._mean_s = averaged(self._mean_s, work_s, max(_MEAN_WEIGHT, 1 / self._starts))
        self._spent_s = max(0.0, self._spent_s + (work_s if passes else -self._earned * work_s))

    def copy(self) -> "PassingBudget":
        """Return a copy for a trial."""
        return copy(self)


QueueRank = Callable[[Job], tuple[Any, ...]]
_STALE = 64
_MOST_MOVES = 32


class WaitingQueue:
    """Jobs of one kind. Without edges each level has one class, and no job is ever overdue."""

    def __init__(self, rank: QueueRank, edges_s: tuple[float, ...] = (), *, aging_s: float = inf) -> None:
        """`edges_s`, ascending: class 0, the most urgent, has less than edges_s[0] left."""
        self.by_arrival: Line[Job] = Line(arrival_rank)
        self._rank = rank
        self._edges_s = edges_s
        self._aging_s = aging_s
        self.levels: Any = SortedDict()
        """By priority, lowest first: a line for each slack class, the most urgent first."""
        self._overdue: Line[Job] = Line(arrival_rank)
        self._clocked: list[tuple[float, int, Job]] = []
        self._jobs: dict[int, Job] = {}
        self._stays = 0
        self._now_s = -inf

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: Job) -> bool:
        return self._jobs.get(job.queued_as) is job

    def __iter__(self) -> Iterator[Job]:
        """Iterate in order. The queue must not change meanwhile."""
        return chain.from_iterable(self.classes())

    def classes(self) -> Iterator[Line[Job]]:
        """Yield all classes in order. Jobs may leave meanwhile, none may join."""
        return chain.from_iterable(list(self.levels.values()))

    def first(self) -> Job | None:
        if self._jobs:
            for line in self.levels.peekitem(0)[1]:
                if line:
                    return line[0]  # type: ignore[no-any-return]
        return None

    def oldest_overdue(self) -> Job | None:
        """Return the oldest job overdue by more than `aging_s`, unless a lower priority waits."""
        job, oldest = self._overdue.first(), self.by_arrival.first()
        is_next = job is not None and oldest is not None and job.task.priority == oldest.task.priority
        return job if is_next else None

    def class_of(self, due_s: float) -> int:
        return bisect_right(self._edges_s, due_s - self._now_s)

    def add(self, job: Job, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        self._stays += 1
        job.queued_as = self._stays
        job.rank = self._rank(job)
        job.slack_class = self.class_of(job.due_s)
        self._jobs[job.queued_as] = job
        self._classes_of(job)[job.slack_class].add(job)
        self.by_arrival.add(job)
        self._wind(job)

    def _classes_of(self, job: Job) -> tuple[Line[Job], ...]:
        """Return the classes of the job's priority."""
        priority = job.task.priority
        if priority not in self.levels:
            self.levels[priority] = tuple([Line(attrgetter("rank")) for _ in range(len(self._edges_s) + 1)])
        level: tuple[Line[Job], ...] = self.levels[priority]
        return level

    def remove(self, job: Job) -> None:
        """Remove a job. Raises KeyError if it does not wait here."""
        del self._jobs[job.queued_as]
        level = self._classes_of(job)
        level[job.slack_class].remove(job)
        if not any(map(len, level)):
            del self.levels[job.task.priority]
        self._overdue.discard(job)
        self.by_arrival.remove(job)
        if len(self._clocked) > 2 * len(self._jobs) + _STALE:
            self._clocked = [item for item in self._clocked if item[1] in self._jobs]
            heapify(self._clocked)

    def advance(self, now_s: float) -> None:
        """Advance the clock, which never goes back. Moves beyond a limit are left to later calls."""
        self._now_s = max(self._now_s, now_s)
        moves = 0
        while self._clocked and self._clocked[0][0] <= self._now_s and moves < _MOST_MOVES:
            _, stay, job = heappop(self._clocked)
            if self._jobs.get(stay) is job:
                moves += 1
                level = self._classes_of(job)
                level[job.slack_class].remove(job)
                job.slack_class = self.class_of(job.due_s)
                level[job.slack_class].add(job)
                self._wind(job)

    def _wind(self, job: Job) -> None:
        """Schedule the next time at which the job's class changes."""
        if job.due_s == inf or (not self._edges_s and self._aging_s == inf):
            return
        if job.slack_class > 0:
            when_s = job.due_s - self._edges_s[job.slack_class - 1]
            if when_s <= self._now_s:  # rounding must not stop the clock
                when_s = self._now_s + max(1e-9, abs(self._now_s) * 1e-12)
        elif job.due_s + self._aging_s > self._now_s:
            when_s = job.due_s + self._aging_s
        else:
            if job not in self._overdue:
                self._overdue.add(job)
            return
        if when_s < inf:
            heappush(self._clocked, (when_s, job.queued_as, job))

    def check_integrity(self) -> None:
        """Raises AssertionError when a job is not in exactly one class, or in the wrong place."""
        assert sum(len(line) for line in self.classes()) == len(self._jobs)
        assert all(any(map(len, level)) for level in self.levels.values()), "a level where nobody waits"
        wound = {stay for _, stay, _ in self._clocked}
        for stay, job in self._jobs.items():
            assert job.queued_as == stay and job in self.levels[job.task.priority][job.slack_class]
            if self._edges_s and job.due_s < inf and job not in self._overdue and self._aging_s < inf:
                assert stay in wound, "a job that the clock has lost"
        for line in self.classes():
            line.check_integrity()
        self._overdue.check_integrity()
        self.by_arrival.check_integrity()
        assert len(self.by_arrival) == len(self._jobs)
        assert len(self._clocked) <= 2 * len(self._jobs) + _STALE + 1
