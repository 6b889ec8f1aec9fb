"""The fleet's one queue: who waits for a worker, in the order of the batching policy, and who goes next.

First comes whose turn it is (`policy/tenants.py`): the tenant that was served least. What follows is the
order within a tenant; where all are one tenant's, it is the order of all.

The policy's `queue_key` is the order (`contract.QueueingPolicy`); by arrival where it has none. A policy may
bound what its order costs the others (`passing_share`): of the work that starts while somebody older waits,
only a share may pass them (`PassingBudget`). Once that is used up the oldest goes next, and nobody else. So
nobody waits more than 1 / (1 - share) times as long as if all went by arrival, at the same throughput; a
start more, at most. The same budget bounds the order within a worker (`policy/kvasir.py`).

Within a tenant a request's priority counts before all that: the lower goes first, and who is oldest is the
oldest of the lowest. At a worker, where several tenants have any, it is turns that count.

Only so much of the order is given away as workers need to be fed: a few wait at each (`Feed`), the rest here.

    a (100 s of work) came first, then b and c (1 s each); one place is free → b goes, c goes, until what has
    passed a is more than the share of all that has started; then a goes, before any d.

Pure: the live scheduler's backlog and the simulator run this very object.
"""

import heapq
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import inf
from typing import Any

from msgspec import structs

from services.scheduler.policy.contract import QueueRule, Task, level_of, turn_at
from services.scheduler.policy.foreseen_wait import ForeseenWait
from services.scheduler.policy.lengths import LengthEstimates, WorkerSpeeds
from services.scheduler.policy.options import TwoQueueOptions
from services.scheduler.policy.tenants import MOST_ACCOUNTS, TenantTurns
from services.scheduler.policy.waiting_queue import Line, PassingBudget
from shared.average import averaged
from shared.errors import PolicyFailed
from shared.messages.commands import Crowd, LengthPrediction, WaitingAhead
from shared.messages.sequence import NOBODY, SequenceKey, Tenant
from shared.messages.values import as_count

FEED_SEQUENCES = 4
"""So many may wait at a worker that has no memory for them yet, so that it never runs dry."""
Rank = tuple[Any, ...]
NO_RANK: Rank = (inf,)
_RANK_PARTS = 4
"""Priority, the policy's key, arrival, name."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """One that waits, and its place by order."""

    task: Task
    tenant: Tenant
    work_s: float
    rank: Rank


def _arrival(waiting: _Waiting) -> Rank:
    return waiting.task.order


def _rank(waiting: _Waiting) -> Rank:
    return waiting.rank


@dataclass(slots=True, eq=False)
class _Lines:
    """Those of one tenant, and what may pass the oldest of them."""

    budget: PassingBudget
    by_rank: Line[_Waiting] = field(default_factory=lambda: Line(_rank))
    by_arrival: Line[_Waiting] = field(default_factory=lambda: Line(_arrival))


@dataclass(frozen=True, slots=True)
class _Charged:
    """What a tenant was charged for one that started."""

    tenant: Tenant
    task: Task
    service_s: float


@dataclass(frozen=True, slots=True)
class TurnTaken:
    """Whose turn it was, and what the others' would have been."""

    tenant: str
    served_s: tuple[tuple[str, float], ...]
    """Of those that wait, what each was served by its weight, in the order of their turns."""
    costs_s: tuple[tuple[str, float], ...]
    """What each one's next would take of a worker, for so long all others would wait."""


_SHOWN = 8
"""Tenants that a turn is explained by."""
_Turn = tuple[int, float, SequenceKey]
"""Level, the tenant's counter before it was charged, whose."""


class FleetQueue:
    """See above. Of one model's workers, whose speeds and memory are averaged."""

    def __init__(
        self, rule: QueueRule, budget: PassingBudget | None = None, feed: "Feed | None" = None
    ) -> None:
        """`budget`: as each tenant's is when it is new. `feed`: who waits at workers."""
        self._rule = rule
        if feed is not None:
            feed.on_left = self._begin
        self._budget = budget or PassingBudget(rule.passing_share)
        self._lengths = LengthEstimates(TwoQueueOptions(pad=0.0), block_tokens=1)
        self._speeds = WorkerSpeeds()
        self._memory_tokens: float | None = None
        self._waiting: dict[SequenceKey, _Waiting] = {}
        self._lines: dict[str, _Lines] = {}
        """By tenant."""
        self.turns = TenantTurns()
        self.foreseen = ForeseenWait()
        self._charged: dict[SequenceKey, _Charged] = {}
        self._fed: dict[SequenceKey, _Turn] = {}
        """Of those that went to a worker and have not been begun there."""
        self._by_turn: Line[_Turn] = Line(_itself)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._waiting

    def __iter__(self) -> Iterator[Task]:
        """By arrival."""
        lines = (lines.by_arrival for lines in self._lines.values())
        return (waiting.task for waiting in heapq.merge(*lines, key=_arrival))

    def add(self, task: Task, tenant: Tenant = NOBODY, known: Rank | None = None) -> None:
        """`known`: its rank before, which holds where the policy's key fails. Raises ValueError for one that
        waits already, and PolicyFailed where the key fails; then nothing has changed."""
        if task.key in self._waiting:
            raise ValueError(f"{task.key} waits already")
        work_s = self.work_s(task)
        try:
            place = self._rule.place(task, work_s)
        except PolicyFailed:
            if known is None or len(known) < _RANK_PARTS:
                raise
            place = known[1]
        rank = (task.priority, place, *task.order[1:])
        waiting = self._waiting[task.key] = _Waiting(task, tenant, work_s, rank)
        lines = self._lines_of(tenant.name)
        lines.by_rank.add(waiting)
        lines.by_arrival.add(waiting)
        self.foreseen.add(task.key, tenant, task.priority, work_s)
        self.turns.join(tenant, self._least_fed_s(level_of(task.priority)))

    def remove(self, key: SequenceKey) -> None:
        """It left without a start. Raises KeyError when it does not wait."""
        self.turns.leave(self._take(key).tenant.name)
        self.foreseen.remove(key)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction) -> None:
        """Its place changes, or what it is expected to cost if it has started; nothing for one that is not
        known."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            self.remove(key)
            self.add(structs.replace(waiting.task, prediction=prediction), waiting.tenant, waiting.rank)
        elif key in self._charged:
            charged = self._charged[key]
            task = structs.replace(charged.task, prediction=prediction)
            self._recharge(key, replace(charged, task=task), self.work_s(task))

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, memory_tokens: int) -> None:
        """One worker's measured speeds (0: not measured), and its KV. They hold for those that come."""
        self._speeds.on_measured(prefill_tokens_per_s, decode_step_s)
        if memory_tokens > 0:
            self._memory_tokens = averaged(self._memory_tokens, memory_tokens, _WEIGHT)

    def next(self, count: int) -> list[SequenceKey]:
        """Who would go next, and after that, at most `count`. Nothing has changed by asking."""
        chosen: dict[SequenceKey, None] = {}
        readers: dict[str, _Reader] = {}
        turns = self.turns.order(count)
        while len(chosen) < count and (name := turns.next()) is not None:
            reader = readers.get(name)
            if reader is None:
                reader = readers[name] = _Reader(self._lines[name], chosen)
            following = reader.take()
            chosen[following.task.key] = None
            turns.start(following.work_s)
        return list(chosen)

    def start(self, key: SequenceKey) -> Rank:
        """It goes to a worker, and its tenant is charged for it; it counts against the tenant's budget if it
        passes somebody. Returns its place by order. Raises KeyError when it does not wait."""
        rank = self.rank(key)
        waiting = self._waiting[key]
        lines, name = self._lines[waiting.tenant.name], waiting.tenant.name
        lines.budget.start(waiting.work_s, passes=lines.by_arrival.first() is not waiting)
        self._take(key)
        turn = self._fed[key] = (level_of(waiting.task.priority), self.turns.counter_s(name), key)
        self._by_turn.add(turn)
        self.turns.start(name, waiting.work_s)
        self._charged[key] = _Charged(waiting.tenant, waiting.task, waiting.work_s)
        return rank

    def explain(self, key: SequenceKey) -> TurnTaken | None:
        """Why it is the turn of its tenant; None where no other waits. To be asked before it starts."""
        standing = self.turns.standing(_SHOWN)
        if len(standing) < 2:
            return None
        name = self._waiting[key].tenant.name
        nexts = {other: _Reader(self._lines[other], ()).take().work_s for other, _ in standing}
        nexts[name] = self._waiting[key].work_s
        return TurnTaken(name, tuple(standing), tuple(nexts.items()))

    def end(self, key: SequenceKey, answer_tokens: int | None, cached_tokens: int = 0) -> None:
        """It is over, with so many tokens of answer and so many of its prompt not computed: its tenant is
        charged for what it was. None: what was expected is kept. Nothing for one that did not start here."""
        charged = self._charged.get(key)
        if charged is not None:
            self.foreseen.rate.end(charged.service_s)
        if charged is not None and answer_tokens is not None:
            task = charged.task
            computed_tokens = task.prompt_tokens + task.generated_tokens
            rest_tokens = max(0, answer_tokens - task.generated_tokens)
            service_s = self._speeds.occupied_s(
                computed_tokens, rest_tokens, self._memory_tokens, min(cached_tokens, computed_tokens)
            )
            self._recharge(key, charged, service_s)
        self._close(key)

    def refund(self, key: SequenceKey) -> None:
        """It has to be started again, and that is not its tenant's fault."""
        if key in self._charged:
            self._recharge(key, self._charged[key], 0.0)
            self._close(key)

    def wait_s(self, task: Task, tenant: Tenant) -> float | None:
        """That is foreseen for this one, which does not wait here; None: nobody can say yet."""
        if not self._speeds.are_measured:
            return None
        return self.foreseen.wait_s(tenant, task.priority, self.work_s(task))

    def _begin(self, key: SequenceKey) -> None:
        """It waits at a worker no more."""
        self.foreseen.remove(key)
        turn = self._fed.pop(key, None)
        if turn is not None:
            self._by_turn.remove(turn)

    def _least_fed_s(self, level: int) -> float:
        """The least counter of a tenant, of a class of that level, when one of these went; infinity where
        there are none."""
        first = next(self._by_turn.starting_at((level, -inf, ("", -1))), None)
        return inf if first is None or first[0] != level else first[1]

    def _close(self, key: SequenceKey) -> None:
        self._begin(key)
        charged = self._charged.pop(key, None)
        if charged is not None:
            self.turns.end(charged.tenant.name)

    def rank(self, key: SequenceKey) -> Rank:
        """Its place by order, at a worker. Raises KeyError when it does not wait."""
        waiting = self._waiting[key]
        rank = waiting.rank
        if not self.turns.are_several:
            return rank
        return (turn_at(rank[0], self.turns.counter_s(waiting.tenant.name)), *rank[1:])

    def check_integrity(self) -> None:
        """Raises AssertionError when the lines and the table disagree."""
        self.turns.check_integrity()
        self.foreseen.check_integrity()
        assert len(self.foreseen) == len(self._waiting) + len(self._fed)
        for kind in ("by_rank", "by_arrival"):
            lines: list[Line[_Waiting]] = [getattr(lines, kind) for lines in self._lines.values()]
            for line in lines:
                line.check_integrity()
            assert {id(one) for line in lines for one in line} == {id(one) for one in self._waiting.values()}
        assert not self._charged.keys() & self._waiting.keys(), "it waits, and has started"
        assert self._fed.keys() <= self._charged.keys()
        assert set(self._by_turn) == set(self._fed.values())

    def work_s(self, task: Task) -> float:
        """What it is expected to take, in seconds of a whole worker."""
        rest = self._lengths.rest_tokens(task.prediction, task.generated_tokens, task.max_tokens)
        computed_tokens = task.prompt_tokens + task.generated_tokens
        return self._speeds.occupied_s(computed_tokens, rest, self._memory_tokens)

    def _recharge(self, key: SequenceKey, charged: _Charged, service_s: float) -> None:
        self.turns.correct(charged.tenant.name, service_s - charged.service_s)
        self._charged[key] = replace(charged, service_s=service_s)

    def _take(self, key: SequenceKey) -> _Waiting:
        waiting = self._waiting.pop(key)
        lines = self._lines[waiting.tenant.name]
        lines.by_rank.remove(waiting)
        lines.by_arrival.remove(waiting)
        return waiting

    def _lines_of(self, name: str) -> _Lines:
        """Of one that nobody waits for they may be forgotten: it begins anew, like one that comes first."""
        lines = self._lines.get(name)
        if lines is None:
            if len(self._lines) >= MOST_ACCOUNTS:
                idle = next((other for other, lines in self._lines.items() if not lines.by_rank), None)
                self._lines.pop(idle or "", None)
            lines = self._lines[name] = _Lines(self._budget.copy())
        return lines


_WEIGHT = 0.2


class _Reader:
    """One tenant's lines, read from their beginnings; those in `chosen` are left out, be it that they come to
    it later."""

    def __init__(self, lines: _Lines, chosen: Container[SequenceKey]) -> None:
        self._by_rank, self._by_arrival = _Unread(lines.by_rank, chosen), _Unread(lines.by_arrival, chosen)
        self._budget = lines.budget.copy()

    def take(self) -> _Waiting:
        """The tenant's next; there is one."""
        oldest = self._by_arrival.first()
        following = self._by_rank.first() if self._budget.may_pass else oldest
        self._budget.start(following.work_s, passes=following is not oldest)
        return following


class _Unread:
    """A line, read from its beginning."""

    def __init__(self, line: Line[_Waiting], chosen: Container[SequenceKey]) -> None:
        self._rest, self._chosen = iter(line), chosen
        self._first: _Waiting | None = None

    def first(self) -> _Waiting:
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
        self.on_left: Callable[[SequenceKey], None] = lambda key: None
        """Called with each that waits no more: it was begun, or is gone."""

    def join(self, worker_id: str) -> None:
        """It is in step, and nobody waits there yet."""
        self.leave(worker_id)
        self._at[worker_id] = {}
        self._file(worker_id)

    def leave(self, worker_id: str) -> None:
        """It is not in step any more, or gone."""
        crowd = self._at.pop(worker_id, None)
        if crowd is not None:
            for key in crowd:
                self.on_left(key)
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
            self.on_left(key)
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
        return [one for one in found if head < one[0] and len(self._at[one[1]]) < self._most(head, one[0])]

    def _most(self, head: Rank, best: Rank) -> int:
        """So many may wait where the best has that rank: twice as many where it is the head's turn, or its
        class is better, so that one tenant's cannot close a worker to another's."""
        return _MOST * self._places * (2 if head[0] < best[0] else 1)

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


def _itself(one: Any) -> Any:
    return one
