"""The fleet's one queue: who waits for a worker, in the order of the batching policy, and who goes next.

By arrival it is first come, first served. By work the one goes first that will take least of a worker, with a
bound on what that costs the others: of the work that starts while somebody older waits, only a share may pass
him (`PassingBudget`). Once that is used up the oldest goes next, and nobody else. So nobody waits more than
1 / (1 - share) times as long as if all went by arrival, at the same throughput; a start more, at most. The
same budget bounds the order within a worker (`policy/kvasir.py`).

Before all that counts a request's priority: the lower goes first, and who is oldest is the oldest of the
lowest.

Only so much of the order is given away as workers need to be fed: a few wait at each (`Feed`), the rest here.

    a (100 s of work) came first, then b and c (1 s each); one place is free → b goes, c goes, until what has
    passed a is more than the share of all that has started; then a goes, before any d.

Pure: the live scheduler's backlog and the simulator run this very object.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from typing import Any

from msgspec import structs

from services.scheduler.policy.contract import QueueOrder, Task
from services.scheduler.policy.lengths import LengthEstimates, WorkerSpeeds
from services.scheduler.policy.options import TwoQueueOptions
from services.scheduler.policy.waiting_queue import Line, PassingBudget
from shared.average import averaged
from shared.messages.commands import Crowd, LengthPrediction, WaitingAhead
from shared.messages.sequence import SequenceKey
from shared.messages.values import as_count

FEED_SEQUENCES = 4
"""So many may wait at a worker that has no memory for them yet, so that it never runs dry."""
Rank = tuple[Any, ...]
NO_RANK: Rank = (inf,)


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """One that waits, and its place by order."""

    task: Task
    work_s: float
    rank: Rank


def _arrival(waiting: Waiting) -> Rank:
    return waiting.task.order


def _rank(waiting: Waiting) -> Rank:
    return waiting.rank


class FleetQueue:
    """See above. Of one model's workers, whose speeds and memory are averaged."""

    def __init__(self, order: QueueOrder, budget: PassingBudget | None = None) -> None:
        self._order = order
        self._budget = budget or PassingBudget()
        self._lengths = LengthEstimates(TwoQueueOptions(pad=0.0), block_tokens=1)
        self._speeds = WorkerSpeeds()
        self._memory_tokens: float | None = None
        self._waiting: dict[SequenceKey, Waiting] = {}
        self._by_rank: Line[Waiting] = Line(_rank)
        self._by_arrival: Line[Waiting] = Line(_arrival)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._waiting

    def __iter__(self) -> Iterator[Task]:
        """By arrival."""
        return (waiting.task for waiting in self._by_arrival)

    def add(self, task: Task) -> None:
        """Raises ValueError for one that waits already."""
        if task.key in self._waiting:
            raise ValueError(f"{task.key} waits already")
        rest = self._lengths.rest_tokens(task.prediction, task.generated_tokens, task.max_tokens)
        work_s = self._speeds.occupied_s(
            task.prompt_tokens + task.generated_tokens, rest, self._memory_tokens
        )
        by_work = self._order is QueueOrder.WORK
        rank = (task.priority, work_s, *task.order[1:]) if by_work else task.order
        waiting = self._waiting[task.key] = Waiting(task, work_s, rank)
        self._by_rank.add(waiting)
        self._by_arrival.add(waiting)

    def remove(self, key: SequenceKey) -> None:
        """It left without a start. Raises KeyError when it does not wait."""
        waiting = self._waiting.pop(key)
        self._by_rank.remove(waiting)
        self._by_arrival.remove(waiting)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction) -> None:
        """Its place changes; nothing for one that does not wait."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            self.remove(key)
            self.add(structs.replace(waiting.task, prediction=prediction))

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, memory_tokens: int) -> None:
        """One worker's measured speeds (0: not measured), and its KV. They hold for those that come."""
        self._speeds.on_measured(prefill_tokens_per_s, decode_step_s)
        if memory_tokens > 0:
            self._memory_tokens = averaged(self._memory_tokens, memory_tokens, _WEIGHT)

    def next(self, count: int) -> list[SequenceKey]:
        """Who would go next, and after that, at most `count`. Nothing has changed by asking."""
        budget, chosen = self._budget.copy(), dict[SequenceKey, None]()
        by_rank, by_arrival = _Reader(self._by_rank, chosen), _Reader(self._by_arrival, chosen)
        while len(chosen) < min(count, len(self._waiting)):
            oldest = by_arrival.first()
            following = by_rank.first() if budget.may_pass else oldest
            chosen[following.task.key] = None
            budget.start(following.work_s, passes=following is not oldest)
        return list(chosen)

    def start(self, key: SequenceKey) -> Rank:
        """It goes to a worker, and counts against the budget if it passes somebody. Returns its place by
        order. Raises KeyError when it does not wait."""
        waiting = self._waiting[key]
        self._budget.start(waiting.work_s, passes=self._by_arrival.first() is not waiting)
        self.remove(key)
        return waiting.rank

    def rank(self, key: SequenceKey) -> Rank:
        """Its place by order. Raises KeyError when it does not wait."""
        return self._waiting[key].rank

    def check_integrity(self) -> None:
        """Raises AssertionError when the lines and the table disagree."""
        self._by_rank.check_integrity()
        self._by_arrival.check_integrity()
        assert {id(one) for one in self._by_rank} == {id(one) for one in self._waiting.values()}
        assert {id(one) for one in self._by_arrival} == {id(one) for one in self._waiting.values()}


_WEIGHT = 0.2


class _Reader:
    """A line, read from its beginning; those in `chosen` are left out, be it that they come to it later."""

    def __init__(self, line: Line[Waiting], chosen: Container[SequenceKey]) -> None:
        self._rest, self._chosen = iter(line), chosen
        self._first: Waiting | None = None

    def first(self) -> Waiting:
        """The first that is not chosen; there is one."""
        while self._first is None or self._first.task.key in self._chosen:
            self._first = next(self._rest)
        return self._first


_LISTED = 64
"""Workers that one question names, of each kind."""
_MOST = 4
"""Times the places: so many may come before all that wait at one worker, and join them."""


class Feed:
    """Who waits at each worker that is in step, in its policy, without having started. What an event costs
    does not grow with the workers."""

    def __init__(self, places: int = FEED_SEQUENCES) -> None:
        """0 places: as many wait as were placed where memory was free, and no others."""
        self._places = places
        self._at: dict[str, dict[SequenceKey, tuple[Rank, int]]] = {}
        self._empty: dict[str, None] = {}
        self._begun: dict[str, None] = {}
        """Workers where some wait, and more may."""
        self._full: Line[tuple[Rank, str]] = Line(_itself)
        """By the best that waits there, each once."""
        self._best: dict[str, Rank] = {}
        """Of full workers."""
        self._has_freed = False

    def join(self, worker_id: str) -> None:
        """It is in step, and nobody waits there yet."""
        self.leave(worker_id)
        self._at[worker_id] = {}
        self._file(worker_id)

    def leave(self, worker_id: str) -> None:
        """It is not in step any more, or gone."""
        if self._at.pop(worker_id, None) is not None:
            self._unfile(worker_id)

    def add(self, worker_id: str, key: SequenceKey, rank: Rank, tokens: int) -> None:
        """It waits there from now. Nothing where the worker is not in step."""
        if worker_id in self._at:
            self._at[worker_id][key] = (rank, tokens)
            self._file(worker_id)

    def discard(self, worker_id: str, key: SequenceKey) -> None:
        """It started, or it is gone."""
        crowd = self._at.get(worker_id)
        if crowd is not None and crowd.pop(key, None) is not None:
            self._file(worker_id)
            self._has_freed = True

    def has_freed(self) -> bool:
        """Whether a place has become free since this was asked last."""
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    def ahead(self, head: Rank = NO_RANK) -> WaitingAhead | None:
        """For the question where the queue, whose head is `head`, goes on; None: nowhere. Where as many wait
        as may, nobody has a place but the head, if it comes before all of them: it would start first."""
        passed = [worker_id for _, worker_id in self._outranked(head)]
        if not (self._empty or self._begun or passed):
            return None
        named = [*islice(self._begun, _LISTED), *passed]
        only: list[str] = []
        closed: list[str] = []
        if len(self._full) <= _LISTED:
            closed = [worker_id for _, worker_id in self._full if worker_id not in passed]
        else:
            only = [*passed, *islice(chain(self._empty, self._begun), _LISTED)]
        crowds = tuple(self._crowd(worker_id) for worker_id in named)
        return WaitingAhead(places=self._places, crowds=crowds, only=tuple(only), closed=tuple(closed))

    def waiting(self, worker_id: str) -> frozenset[SequenceKey]:
        """Those that wait there."""
        return frozenset(self._at.get(worker_id, ()))

    def _outranked(self, head: Rank) -> list[tuple[Rank, str]]:
        """Full workers at which the head comes before all that wait, the worst off first."""
        found = islice(self._full.downwards_from((NO_RANK, "")), _LISTED)
        return [one for one in found if head < one[0] and len(self._at[one[1]]) < _MOST * self._places]

    def _crowd(self, worker_id: str) -> Crowd:
        crowd = self._at[worker_id]
        tokens = as_count(sum(tokens for _, tokens in crowd.values()))
        places = max(min(1, self._places), self._places - len(crowd))
        return Crowd(worker_id=worker_id, places=places, tokens=tokens)

    def _file(self, worker_id: str) -> None:
        self._unfile(worker_id)
        crowd = self._at[worker_id]
        if not crowd:
            self._empty[worker_id] = None
        elif len(crowd) < self._places or not self._places:
            self._begun[worker_id] = None
        else:
            best = self._best[worker_id] = min(rank for rank, _ in crowd.values())
            self._full.add((best, worker_id))

    def _unfile(self, worker_id: str) -> None:
        self._empty.pop(worker_id, None)
        self._begun.pop(worker_id, None)
        best = self._best.pop(worker_id, None)
        if best is not None:
            self._full.remove((best, worker_id))

    def check_integrity(self) -> None:
        """Raises AssertionError when a worker is in no kind, or two."""
        self._full.check_integrity()
        kinds = [*self._empty, *self._begun, *(worker_id for _, worker_id in self._full)]
        assert sorted(kinds) == sorted(self._at), "a worker in no kind, or two"
        assert {worker_id for _, worker_id in self._full} == self._best.keys()


def _itself(one: tuple[Rank, str]) -> tuple[Rank, str]:
    return one
