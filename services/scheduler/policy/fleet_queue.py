"""The fleet's queue of requests that wait for a worker, shared by the live scheduler and the simulator.

The order, most significant first:

- Tenant: the least served tenant goes first (`policy/tenants.py`).
- Priority: within a tenant, the lower value goes first. At a worker, turns replace it if several tenants
  wait.
- Key: the policy's `queue_key` (`contract.QueueingPolicy`), or arrival.

A policy may limit passing with `passing_share` (`PassingBudget`): only that share of started work may pass
older work. After that, the oldest request is the only next. At equal throughput no request waits longer than
1 / (1 - share) times its wait in arrival order, plus one start at most. `policy/kvasir.py` uses the same
budget within a worker.

Only a few requests wait at each worker (`Feed`), enough to keep it busy; the rest wait here.

    a (100 s of work) came first, then b and c (1 s each); one place is free → b goes, c goes, until the work
    that has passed a exceeds the share of all started work; then a goes, before any d.
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
"""Number of requests that may wait at a worker without free memory, so that it never idles."""
Rank = tuple[Any, ...]
NO_RANK: Rank = (inf,)
_RANK_PARTS = 4
"""Priority, the policy's key, arrival, name."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A waiting request and its rank."""

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
    """The waiting requests of one tenant and their passing budget."""

    budget: PassingBudget
    by_rank: Line[_Waiting] = field(default_factory=lambda: Line(_rank))
    by_arrival: Line[_Waiting] = field(default_factory=lambda: Line(_arrival))


@dataclass(frozen=True, slots=True)
class _Charged:
    """The charge of a tenant for one started request."""

    tenant: Tenant
    task: Task
    service_s: float


@dataclass(frozen=True, slots=True)
class TurnTaken:
    """The tenant whose turn it was, and the values that decided it."""

    tenant: str
    served_s: tuple[tuple[str, float], ...]
    """Weighted service of each waiting tenant, in the order of turns."""
    costs_s: tuple[tuple[str, float], ...]
    """Seconds of a worker that each tenant's next request would take, and the others would wait."""


_SHOWN = 8
"""Number of tenants that explain a turn."""
_Turn = tuple[int, float, SequenceKey]
"""Level, the tenant's counter before the charge, key."""


class FleetQueue:
    """The queue of one model's workers, whose speeds and memory are averaged."""

    def __init__(
        self, rule: QueueRule, budget: PassingBudget | None = None, feed: "Feed | None" = None
    ) -> None:
        """`budget`: template for each new tenant. `feed`: the requests that wait at workers."""
        self._rule = rule
        if feed is not None:
            feed.on_left = self._begin
        self._budget = budget or PassingBudget(rule.passing_share)
        self._lengths = LengthEstimates(TwoQueueOptions(pad=0.0), block_tokens=1)
        self._speeds = WorkerSpeeds()
        self._memory_tokens: float | None = None
        self._waiting: dict[SequenceKey, _Waiting] = {}
        self._lines: dict[str, _Lines] = {}
        """By tenant name."""
        self.turns = TenantTurns()
        self.foreseen = ForeseenWait()
        self._charged: dict[SequenceKey, _Charged] = {}
        self._fed: dict[SequenceKey, _Turn] = {}
        """Requests that went to a worker and have not started there."""
        self._by_turn: Line[_Turn] = Line(_itself)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._waiting

    def __iter__(self) -> Iterator[Task]:
        """Iterate over the waiting tasks by arrival."""
        lines = (lines.by_arrival for lines in self._lines.values())
        return (waiting.task for waiting in heapq.merge(*lines, key=_arrival))

    def add(self, task: Task, tenant: Tenant = NOBODY, known: Rank | None = None) -> None:
        """Add a waiting task. `known`: its previous rank, used if the policy's key fails.

        Raises ValueError if it waits already, PolicyFailed if the key fails; then nothing has changed.
        """
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
        """Remove a request that did not start. Raises KeyError if it does not wait."""
        self.turns.leave(self._take(key).tenant.name)
        self.foreseen.remove(key)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction) -> None:
        """Update a waiting request's place or a started one's charge; ignore an unknown key."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            self.remove(key)
            self.add(structs.replace(waiting.task, prediction=prediction), waiting.tenant, waiting.rank)
        elif key in self._charged:
            charged = self._charged[key]
            task = structs.replace(charged.task, prediction=prediction)
            self._recharge(key, replace(charged, task=task), self.work_s(task))

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, memory_tokens: int) -> None:
        """Record one worker's speeds (0: not measured) and KV memory; they apply to later requests."""
        self._speeds.on_measured(prefill_tokens_per_s, decode_step_s)
        if memory_tokens > 0:
            self._memory_tokens = averaged(self._memory_tokens, memory_tokens, _WEIGHT)

    def next(self, count: int) -> list[SequenceKey]:
        """Return up to `count` requests that would go next, in order. Changes nothing."""
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
        """Start a request at a worker, charge its tenant, and return its rank. Counts against the passing
        budget if an older request waits. Raises KeyError if it does not wait."""
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
        """Return why this tenant is next, or None if no other tenant waits. Call it before `start`."""
        standing = self.turns.standing(_SHOWN)
        if len(standing) < 2:
            return None
        name = self._waiting[key].tenant.name
        nexts = {other: _Reader(self._lines[other], ()).take().work_s for other, _ in standing}
        nexts[name] = self._waiting[key].work_s
        return TurnTaken(name, tuple(standing), tuple(nexts.items()))

    def end(self, key: SequenceKey, answer_tokens: int | None, cached_tokens: int = 0) -> None:
        """Close a request and charge its tenant for the actual work. `answer_tokens` None keeps the expected
        charge. `cached_tokens`: prompt tokens that were not computed. Ignores an unknown key."""
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
        """Cancel the charge of a request that must start again through no fault of its tenant."""
        if key in self._charged:
            self._recharge(key, self._charged[key], 0.0)
            self._close(key)

    def wait_s(self, task: Task, tenant: Tenant) -> float | None:
        """Return the expected wait of a request that is not queued, or None before speeds are measured."""
        if not self._speeds.are_measured:
            return None
        return self.foreseen.wait_s(tenant, task.priority, self.work_s(task))

    def _begin(self, key: SequenceKey) -> None:
        """Note that a request no longer waits at a worker."""
        self.foreseen.remove(key)
        turn = self._fed.pop(key, None)
        if turn is not None:
            self._by_turn.remove(turn)

    def _least_fed_s(self, level: int) -> float:
        """Return the least counter of the level's tenants with requests waiting at workers, or infinity."""
        first = next(self._by_turn.starting_at((level, -inf, ("", -1))), None)
        return inf if first is None or first[0] != level else first[1]

    def _close(self, key: SequenceKey) -> None:
        self._begin(key)
        charged = self._charged.pop(key, None)
        if charged is not None:
            self.turns.end(charged.tenant.name)

    def rank(self, key: SequenceKey) -> Rank:
        """Return the request's rank at a worker. Raises KeyError if it does not wait."""
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
        """Return the expected work in seconds of a whole worker."""
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
        """Return the tenant's lines. Idle tenants' lines are dropped at `MOST_ACCOUNTS`."""
        lines = self._lines.get(name)
        if lines is None:
            if len(self._lines) >= MOST_ACCOUNTS:
                idle = next((other for other, lines in self._lines.items() if not lines.by_rank), None)
                self._lines.pop(idle or "", None)
            lines = self._lines[name] = _Lines(self._budget.copy())
        return lines


_WEIGHT = 0.2


class _Reader:
    """Reads one tenant's lines in order, skipping requests in `chosen`, which may grow meanwhile."""

    def __init__(self, lines: _Lines, chosen: Container[SequenceKey]) -> None:
        self._by_rank, self._by_arrival = _Unread(lines.by_rank, chosen), _Unread(lines.by_arrival, chosen)
        self._budget = lines.budget.copy()

    def take(self) -> _Waiting:
        """Return the tenant's next request; one must exist."""
        oldest = self._by_arrival.first()
        following = self._by_rank.first() if self._budget.may_pass else oldest
        self._budget.start(following.work_s, passes=following is not oldest)
        return following


class _Unread:
    """Reads a line from its beginning."""

    def __init__(self, line: Line[_Waiting], chosen: Container[SequenceKey]) -> None:
        self._rest, self._chosen = iter(line), chosen
        self._first: _Waiting | None = None

    def first(self) -> _Waiting:
        """Return the first request that is not chosen; one must exist."""
        while self._first is None or self._first.task.key in self._chosen:
            self._first = next(self._rest)
        return self._first


_LISTED = 64
"""Maximum workers of each kind that one question names."""
_MOST = 4
"""Number of requests, as a multiple of the places, up to which a higher-ranked one may join a full worker."""


class Feed:
    """Requests that wait at in-step workers and have not started. An event's cost does not grow with the
    fleet."""

    def __init__(self, places: int = FEED_SEQUENCES) -> None:
        """`places` 0: only requests placed into free memory wait."""
        self._places = places
        self._at: dict[str, dict[SequenceKey, tuple[Rank, int]]] = {}
        self._empty: dict[str, None] = {}
        self._begun: dict[str, None] = {}
        """Workers with waiting requests and free places."""
        self._full: Line[tuple[Rank, str]] = Line(_itself)
        """Full workers, each by its best rank."""
        self._best: dict[str, Rank] = {}
        """Best rank of each full worker."""
        self._has_freed = False
        self.on_left: Callable[[SequenceKey], None] = lambda key: None
        """Called with each key that starts or leaves."""

    def join(self, worker_id: str) -> None:
        """Add an in-step worker with nothing waiting."""
        self.leave(worker_id)
        self._at[worker_id] = {}
        self._file(worker_id)

    def leave(self, worker_id: str) -> None:
        """Remove a worker that is gone or out of step."""
        crowd = self._at.pop(worker_id, None)
        if crowd is not None:
            for key in crowd:
                self.on_left(key)
            self._unfile(worker_id)

    def add(self, worker_id: str, key: SequenceKey, rank: Rank, tokens: int) -> None:
        """Add a request that waits at the worker; ignore a worker that is not in step."""
        if worker_id in self._at:
            self._at[worker_id][key] = (rank, tokens)
            self._file(worker_id)

    def discard(self, worker_id: str, key: SequenceKey) -> None:
        """Remove a request that started or left."""
        crowd = self._at.get(worker_id)
        if crowd is not None and crowd.pop(key, None) is not None:
            self.on_left(key)
            self._file(worker_id)
            self._has_freed = True

    def has_freed(self) -> bool:
        """Return whether a place became free since the last call."""
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    def ahead(self, head: Rank = NO_RANK) -> WaitingAhead | None:
        """Return the places for the queue's next question, or None if there is none. A full worker has a
        place only for a `head` that outranks every request there."""
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
        """Return the keys that wait at the worker."""
        return frozenset(self._at.get(worker_id, ()))

    def _outranked(self, head: Rank) -> list[tuple[Rank, str]]:
        """Return full workers at which the head outranks all waiting requests, worst rank first."""
        found = islice(self._full.downwards_from((NO_RANK, "")), _LISTED)
        return [one for one in found if head < one[0] and len(self._at[one[1]]) < self._most(head, one[0])]

    def _most(self, head: Rank, best: Rank) -> int:
        """Return the number of waiting requests that closes a worker to a higher-ranked one. It doubles for a
        better class or turn, so that one tenant cannot close a worker to another."""
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
