"""The fleet's one queue: who waits for a worker, in the order of the batching policy, and who goes next.

By arrival it is first come, first served. By work the one goes first that will take least of a worker, with a
bound on what that costs the others: of the work that starts while somebody older waits, only a share may pass
him (`PassingBudget`). Once that is used up the oldest goes next, and nobody else. So nobody waits more than
1 / (1 - share) times as long as if all went by arrival, at the same throughput; a start more, at most. The
same budget bounds the order within a worker (`policy/kvasir.py`).

Only so much of the order is given away as workers need to be fed: a few wait at each (`Feed`), the rest here.

    a (100 s of work) came first, then b and c (1 s each); one place is free → b goes, c goes, until what has
    passed a is more than the share of all that has started; then a goes, before any d.

Pure: the live scheduler's backlog and the simulator run this very object.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
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
        rank = task.order if self._order is QueueOrder.ARRIVAL else (work_s, *task.order)
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


class Feed:
    """Who waits at each worker, in its policy, without having started. Where nobody does, there are as many
    places as there may be."""

    def __init__(self, places: int = FEED_SEQUENCES) -> None:
        self.places = places
        self._at: dict[str, dict[SequenceKey, tuple[Rank, int]]] = {}
        self._has_freed = False

    def add(self, worker_id: str, key: SequenceKey, rank: Rank, tokens: int) -> None:
        """It waits there from now."""
        self._at.setdefault(worker_id, {})[key] = (rank, tokens)

    def discard(self, worker_id: str, key: SequenceKey) -> bool:
        """It started, or it is gone. Whether it waited there."""
        crowd = self._at.get(worker_id)
        if crowd is None or crowd.pop(key, None) is None:
            return False
        if not crowd:
            del self._at[worker_id]
        self._has_freed = True
        return True

    def has_freed(self) -> bool:
        """Whether a place has become free since this was asked last."""
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    def clear(self, worker_id: str) -> None:
        """Nobody waits there any more."""
        self._at.pop(worker_id, None)

    def ahead(self, head: Rank = NO_RANK) -> WaitingAhead:
        """For the question where the queue, whose head is `head`, goes on. The head has a place wherever it
        comes before all that wait there: it would start before them."""
        crowds = tuple(self._crowd(worker_id, crowd, head) for worker_id, crowd in self._at.items())
        return WaitingAhead(places=self.places, crowds=crowds)

    def _crowd(self, worker_id: str, crowd: dict[SequenceKey, tuple[Rank, int]], head: Rank) -> Crowd:
        places = max(0, self.places - len(crowd))
        if not places and len(crowd) < _MOST * self.places and head < min(rank for rank, _ in crowd.values()):
            places = 1
        tokens = as_count(sum(tokens for _, tokens in crowd.values()))
        return Crowd(worker_id=worker_id, places=places, tokens=tokens)

    def waiting(self, worker_id: str) -> frozenset[SequenceKey]:
        """Those that wait there."""
        return frozenset(self._at.get(worker_id, ()))


_MOST = 4
"""Times the places: however many come before all that wait."""
