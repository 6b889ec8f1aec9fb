"""Waiting queues: a sorted line, and a queue by priority, slack class (time left) and rank.

The clock moves jobs between slack classes at times known on entry, kept in a heap. Ranks do not change while
a job waits. An item's key must not change while it is in a line; remove the item first.

Source: papers/003 §3.3 (Ordering); algorithms.md §1 (migration, aging).
"""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from heapq import heapify, heappop, heappush
from itertools import chain
from math import inf
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedDict, SortedKeyList

from services.scheduler.policy.batch_builder import Job, arrival_rank
from services.scheduler.policy.contract import PASSING_SHARE
from services.scheduler.policy.options import TwoQueueOptions
from shared.average import averaged

T = TypeVar("T")


class Line(Generic[T]):
    """A collection sorted by `key`, which must be unique per item."""

    def __init__(self, key: Callable[[T], Any], items: Iterable[T] = ()) -> None:
        self._key = key
        self._items: Any = SortedKeyList(items, key=key)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._items

    def add(self, item: T) -> None:
        self._items.add(item)

    def remove(self, item: T) -> None:
        """Remove an item. Raises ValueError if it is not in the line under its present key."""
        self._items.remove(item)

    def discard(self, item: T) -> None:
        self._items.discard(item)

    def first(self) -> T | None:
        return self._items[0] if self._items else None

    def last(self) -> T | None:
        return self._items[-1] if self._items else None

    def starting_at(self, key: Any) -> Iterator[T]:
        """Iterate over items with a key of at least `key`, lowest first. The line must not change
        meanwhile."""
        return iter(self._items.irange_key(min_key=key))

    def downwards_from(self, key: Any) -> Iterator[T]:
        """Iterate over items with a key of at most `key`, highest first. The line must not change
        meanwhile."""
        return iter(self._items.irange_key(max_key=key, reverse=True))

    def check_integrity(self) -> None:
        """Raises AssertionError when an item's key changed."""
        keys = [self._key(item) for item in self._items]
        assert keys == sorted(keys), "out of order"


_PASSING_STARTS = 8
"""Number of average jobs that may pass before the first start in order of arrival."""
_MEAN_WEIGHT = 1 / 64


class PassingBudget:
    """Limit on work that passes older work, which bounds the cost of any order.

    Share 0.35: each second of work started in order of arrival allows 0.54 s to pass. Then no job waits
    longer than 1 / (1 - 0.35) times its wait in order of arrival, plus a few starts.
    """

    def __init__(self, share: float = PASSING_SHARE) -> None:
        """`share`: at least 1 means no limit."""
        self._is_bounded = share < 1
        self._earned = share / (1 - share) if self._is_bounded else 0.0
        """Seconds that may pass per second of work started in order of arrival."""
        self._spent_s = self._mean_s = 0.0
        self._starts = 0

    @property
    def may_pass(self) -> bool:
        return not self._is_bounded or self._spent_s <= _PASSING_STARTS * self._mean_s

    def start(self, work_s: float, *, passes: bool) -> None:
        """Count a start; `passes`: an older job waits."""
        self._starts += 1
        self._mean_s = averaged(self._mean_s, work_s, max(_MEAN_WEIGHT, 1 / self._starts))
        self._spent_s = max(0.0, self._spent_s + (work_s if passes else -self._earned * work_s))

    def copy(self) -> "PassingBudget":
        """Return a copy for a trial."""
        return copy(self)


_STARVING = 4


class AgingTurns:
    """Turns of one queue: by order, or, for a fixed share, the oldest overdue job.

    Share 0.25: one admission by age is due after three by order. Unused turns are not saved.
    """

    def __init__(self, options: TwoQueueOptions) -> None:
        self._aging_s = options.aging_s
        self._others = max(0.0, 1 / options.aging_share - 1)
        """Admissions by order per admission by age."""
        self._since = 0.0

    def count(self) -> None:
        """Count an admission by order."""
        self._since = min(self._since + 1, 2 * self._others)

    def is_due(self) -> bool:
        return self._since >= self._others

    def take(self) -> None:
        """Count an admission by age."""
        self._since = max(0.0, self._since - self._others)

    def is_starving(self, job: Job, now_s: float) -> bool:
        """Return whether the job is so late that no other may pass it."""
        return now_s > job.deadline_s + _STARVING * self._aging_s


def _rank_of(job: Job) -> tuple[Any, ...]:
    return job.rank


QueueRank = Callable[[Job], tuple[Any, ...]]
_STALE = 64
_MOST_MOVES = 32


class WaitingQueue:
    """Jobs of one kind. Without edges each level has one class, and no job is ever overdue."""

    def __init__(self, rank: QueueRank, edges_s: tuple[float, ...] = (), *, aging_s: float = inf) -> None:
        """`edges_s`, ascending: class 0, the most urgent, has less than edges_s[0] left."""
        self._by_arrival: Line[Job] = Line(arrival_rank)
        self._rank = rank
        self._edges_s = edges_s
        self._aging_s = aging_s
        self._levels: Any = SortedDict()
        """By priority: a line for each slack class."""
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
        for line in self.classes():
            yield from line

    def levels(self) -> Iterator[tuple[Line[Job], ...]]:
        """Yield the slack classes of each priority, lowest first, most urgent first. The queue must not
        change meanwhile."""
        return iter(self._levels.values())

    def classes(self) -> Iterator[Line[Job]]:
        """Yield all classes in order. Jobs may leave meanwhile, none may join."""
        return chain.from_iterable(list(self._levels.values()))

    def first(self) -> Job | None:
        if not self._jobs:
            return None
        level: tuple[Line[Job], ...] = self._levels.peekitem(0)[1]
        return next(line.first() for line in level if len(line))

    def oldest(self) -> Job | None:
        """Return the job that arrived first."""
        return self._by_arrival.first()

    def oldest_overdue(self) -> Job | None:
        """Return the oldest job overdue by more than `aging_s`, unless a lower priority waits."""
        job, oldest = self._overdue.first(), self.oldest()
        is_next = job is not None and oldest is not None and job.task.priority == oldest.task.priority
        return job if is_next else None

    def class_of(self, due_s: float) -> int:
        left_s = due_s - self._now_s
        return sum(left_s >= edge for edge in self._edges_s)

    def add(self, job: Job, now_s: float) -> None:
        self._now_s = max(self._now_s, now_s)
        self._stays += 1
        job.queued_as = self._stays
        job.rank = self._rank(job)
        job.slack_class = self.class_of(job.due_s)
        self._jobs[job.queued_as] = job
        self._classes_of(job)[job.slack_class].add(job)
        self._by_arrival.add(job)
        self._wind(job)

    def _classes_of(self, job: Job) -> tuple[Line[Job], ...]:
        """Return the classes of the job's priority."""
        priority = job.task.priority
        if priority not in self._levels:
            self._levels[priority] = tuple(Line(_rank_of) for _ in range(len(self._edges_s) + 1))
        level: tuple[Line[Job], ...] = self._levels[priority]
        return level

    def remove(self, job: Job) -> None:
        """Remove a job. Raises KeyError if it does not wait here."""
        del self._jobs[job.queued_as]
        level = self._classes_of(job)
        level[job.slack_class].remove(job)
        if not any(map(len, level)):
            del self._levels[job.task.priority]
        self._overdue.discard(job)
        self._by_arrival.remove(job)
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
            when_s = when_s if when_s > self._now_s else _after(self._now_s)
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
        assert all(any(map(len, level)) for level in self.levels()), "a level where nobody waits"
        wound = {stay for _, stay, _ in self._clocked}
        for stay, job in self._jobs.items():
            assert job.queued_as == stay and job in self._levels[job.task.priority][job.slack_class]
            if self._edges_s and job.due_s < inf and job not in self._overdue and self._aging_s < inf:
                assert stay in wound, "a job that the clock has lost"
        for line in self.classes():
            line.check_integrity()
        self._overdue.check_integrity()
        self._by_arrival.check_integrity()
        assert len(self._by_arrival) == len(self._jobs)
        assert len(self._clocked) <= 2 * len(self._jobs) + _STALE + 1


def _after(now_s: float) -> float:
    """Return a slightly later time, so that rounding cannot stop the clock."""
    return now_s + max(1e-9, abs(now_s) * 1e-12)
