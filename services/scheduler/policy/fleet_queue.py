"""The fleet's queue of requests that wait for a worker, shared by the live scheduler and the simulator.

The order: the least served tenant (`policy/tenants.py`), the lower priority, the policy's `queue_key`. Only a
share of started work may pass older work. Only a few requests wait at each worker (`Feed`).

    a (100 s of work) came first, then b and c (1 s each); one place is free → b goes, c goes, until the work
    that has passed a exceeds the share of all started work; then a goes, before any d.
"""

import heapq
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf
from operator import attrgetter
from typing import Any

from msgspec import structs

from services.scheduler.policy.contract import QueueRule, Task, level_of, turn_at
from services.scheduler.policy.foreseen_wait import ForeseenWait
from services.scheduler.policy.lengths import LengthEstimates, WorkerSpeeds
from services.scheduler.policy.options import TwoQueueOptions
from services.scheduler.policy.tenants import TenantAccount, TenantTurns
from services.scheduler.policy.waiting_queue import Line, PassingBudget
from shared.average import averaged
from shared.errors import PolicyFailed
from shared.messages.commands import Crowd, LengthPrediction, WaitingAhead
from shared.messages.sequence import NOBODY, SequenceKey, Tenant
from shared.messages.values import as_count

FEED_SEQUENCES = 4
"""Number of requests that may wait at a worker without free memory, so that it never idles."""
MOST_ACCOUNTS = 4096
"""Maximum number of tenants; beyond it, the oldest idle one is forgotten."""
Rank = tuple[Any, ...]
NO_RANK: Rank = (inf,)
_RANK_PARTS = 4
"""Priority, the policy's key, arrival, name."""
_WEIGHT = 0.2
"""Weight of a new measurement of memory."""
_SHOWN = 8
"""Number of tenants that explain a turn."""
_Turn = tuple[int, float, SequenceKey]
"""Level, the tenant's counter before the charge, key."""


_arrival, _rank = attrgetter("task.order"), attrgetter("rank")


def _itself(one: Any) -> Any:
    return one


@dataclass(slots=True, eq=False)
class _Account(TenantAccount):
    """A tenant's account, its waiting requests and its passing budget."""

    budget: PassingBudget = field(kw_only=True)
    by_rank: "Line[_Waiting]" = field(default_factory=lambda: Line(_rank))
    by_arrival: "Line[_Waiting]" = field(default_factory=lambda: Line(_arrival))


@dataclass(slots=True, eq=False)
class _Waiting:
    """A waiting request and its rank."""

    account: _Account
    task: Task
    work_s: float
    rank: Rank


@dataclass(slots=True, eq=False)
class _Charged:
    """The charge of a tenant for one started request."""

    account: _Account
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
        self._accounts: dict[str, _Account] = {}
        """By tenant name."""
        self.turns: TenantTurns | None = None
        """None while only one tenant is known."""
        self.foreseen = ForeseenWait()
        self._charged: dict[SequenceKey, _Charged] = {}
        self._fed: dict[SequenceKey, _Turn] = {}
        """Requests that went to a worker and have not started there."""
        self._by_turn: Line[_Turn] = Line(_itself)
        """The same in order, once there are several tenants."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Task]:
        """Iterate over the waiting tasks by arrival."""
        lines = (account.by_arrival for account in self._accounts.values())
        return (waiting.task for waiting in heapq.merge(*lines, key=_arrival))

    def add(self, task: Task, tenant: Tenant = NOBODY, known: Rank | None = None) -> None:
        """Add a waiting task. `known`: its previous rank, used if the policy's key fails.

        Raises ValueError if it waits already, PolicyFailed if the key fails; then nothing has changed.
        """
        key = task.key
        if key in self._waiting:
            raise ValueError(f"{key} waits already")
        work_s = self.work_s(task)
        try:
            place = self._rule.place(task, work_s)
        except PolicyFailed:
            if known is None or len(known) < _RANK_PARTS:
                raise
            place = known[1]
        account = self._accounts.get(tenant.name) or self._open(tenant)
        rank = (task.priority, place, task.arrival_s, key)
        waiting = self._waiting[key] = _Waiting(account, task, work_s, rank)
        account.by_rank.add(waiting)
        account.by_arrival.add(waiting)
        self.foreseen.add(key, tenant, task.priority, work_s)
        account.waiting += 1
        if account.waiting == 1:
            account.tenant = tenant
            if self.turns is not None:
                self.turns.join(account, self._least_fed_s(level_of(task.priority)))

    def remove(self, key: SequenceKey) -> None:
        """Remove a request that did not start. Raises KeyError if it does not wait."""
        self._take(key)
        self.foreseen.remove(key)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction) -> None:
        """Update a waiting request's place or a started one's charge; ignore an unknown key."""
        waiting, charged = self._waiting.get(key), self._charged.get(key)
        if waiting is not None:
            tenant = waiting.account.tenant
            self.remove(key)
            self.add(structs.replace(waiting.task, prediction=prediction), tenant, waiting.rank)
        elif charged is not None:
            charged.task = structs.replace(charged.task, prediction=prediction)
            self._recharge(charged, self.work_s(charged.task))

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, memory_tokens: int) -> None:
        """Record one worker's speeds (0: not measured) and KV memory; they apply to later requests."""
        self._speeds.on_measured(prefill_tokens_per_s, decode_step_s)
        if memory_tokens > 0:
            self._memory_tokens = averaged(self._memory_tokens, memory_tokens, _WEIGHT)

    def next(self, count: int) -> list[SequenceKey]:
        """Return up to `count` requests that would go next, in order. Changes nothing."""
        chosen: dict[SequenceKey, None] = {}
        if self.turns is None:
            for account in self._accounts.values():
                reader = _Reader(account, chosen)
                for _ in range(min(count, account.waiting)):
                    chosen[reader.take().task.key] = None
            return list(chosen)
        readers: dict[str, _Reader] = {}

        def take(name: str) -> float:
            if name not in readers:
                readers[name] = _Reader(self._accounts[name], chosen)
            following = readers[name].take()
            chosen[following.task.key] = None
            return following.work_s

        self.turns.simulate(count, take)
        return list(chosen)

    def start(self, key: SequenceKey) -> Rank:
        """Start a request, charge its tenant, and return its rank. Raises KeyError if it does not wait."""
        rank, waiting = self.rank(key), self._waiting[key]
        account, task = waiting.account, waiting.task
        account.budget.start(waiting.work_s, passes=account.by_arrival[0] is not waiting)
        turn = self._fed[key] = (level_of(task.priority), account.counter_s, key)
        self._take(key)
        account.running += 1
        if self.turns is None:
            account.counter_s += waiting.work_s / account.tenant.weight
        else:
            self._by_turn.add(turn)
            self.turns.charge(account, waiting.work_s, starts=True)
        self._charged[key] = _Charged(account, task, waiting.work_s)
        return rank

    def explain(self, key: SequenceKey) -> TurnTaken | None:
        """Return why this tenant is next, or None if no other tenant waits. Call it before `start`."""
        standing = [] if self.turns is None else self.turns.standing(_SHOWN)
        if len(standing) < 2:
            return None
        nexts = {other: _Reader(self._accounts[other], ()).take().work_s for other, _ in standing}
        waiting = self._waiting[key]
        nexts[waiting.account.tenant.name] = waiting.work_s
        return TurnTaken(waiting.account.tenant.name, tuple(standing), tuple(nexts.items()))

    def end(self, key: SequenceKey, answer_tokens: int | None, cached_tokens: int = 0) -> None:
        """Close a request and charge its tenant for the actual work. `answer_tokens` None keeps the expected
        charge. `cached_tokens`: prompt tokens that were not computed. Ignores an unknown key."""
        charged = self._charged.get(key)
        if charged is None:
            self._begin(key)
            return
        self.foreseen.rate.end(charged.service_s)
        if answer_tokens is not None:
            task = charged.task
            computed_tokens = task.prompt_tokens + task.generated_tokens
            rest_tokens = max(0, answer_tokens - task.generated_tokens)
            cached_tokens = min(cached_tokens, computed_tokens)
            service_s = self._speeds.occupied_s(
                computed_tokens, rest_tokens, self._memory_tokens, cached_tokens
            )
            self._recharge(charged, service_s)
        self._close(key)

    def refund(self, key: SequenceKey) -> None:
        """Cancel the charge of a request that must start again through no fault of its tenant."""
        if key in self._charged:
            self._recharge(self._charged[key], 0.0)
            self._close(key)

    def wait_s(self, task: Task, tenant: Tenant) -> float | None:
        """Return the expected wait of a request that is not queued, or None before speeds are measured."""
        if not self._speeds.are_measured:
            return None
        return self.foreseen.wait_s(tenant, task.priority, self.work_s(task))

    def charged_s(self) -> Iterator[tuple[str, float]]:
        """Return every tenant with its counter."""
        return ((name, account.counter_s) for name, account in self._accounts.items())

    def rank(self, key: SequenceKey) -> Rank:
        """Return the request's rank at a worker. Raises KeyError if it does not wait."""
        waiting = self._waiting[key]
        if self.turns is None:
            return waiting.rank
        return (turn_at(waiting.rank[0], waiting.account.counter_s), *waiting.rank[1:])

    def work_s(self, task: Task) -> float:
        """Return the expected work in seconds of a whole worker."""
        rest = self._lengths.rest_tokens(task.prediction, task.generated_tokens, task.max_tokens)
        computed_tokens = task.prompt_tokens + task.generated_tokens
        return self._speeds.occupied_s(computed_tokens, rest, self._memory_tokens)

    def check_integrity(self) -> None:
        """Raises AssertionError when the accounts and the tables disagree."""
        accounts = list(self._accounts.values())
        self.foreseen.check_integrity()
        assert len(self.foreseen) == len(self._waiting) + len(self._fed)
        waiting = {id(one) for one in self._waiting.values()}
        for lines in ([one.by_rank for one in accounts], [one.by_arrival for one in accounts]):
            for account, line in zip(accounts, lines, strict=True):
                line.check_integrity()
                assert len(line) == account.waiting
            assert {id(one) for line in lines for one in line} == waiting
        assert not self._charged.keys() & self._waiting.keys(), "it waits, and has started"
        assert self._fed.keys() <= self._charged.keys()
        assert sum(account.running for account in accounts) == len(self._charged)
        if self.turns is not None:
            self.turns.check_integrity(accounts)
            assert set(self._by_turn) == set(self._fed.values())

    def _open(self, tenant: Tenant) -> _Account:
        """Open an account. With the second one, turns begin."""
        if len(self._accounts) >= MOST_ACCOUNTS:
            idle = (name for name, one in self._accounts.items() if not (one.waiting or one.running))
            self._accounts.pop(next(idle, ""), None)
        account = self._accounts[tenant.name] = _Account(tenant, budget=self._budget.copy())
        if self.turns is None and len(self._accounts) > 1:
            self.turns = TenantTurns(one for one in self._accounts.values() if one is not account)
            self._by_turn.update(self._fed.values())
        return account

    def _take(self, key: SequenceKey) -> None:
        waiting = self._waiting.pop(key)
        account = waiting.account
        account.by_rank.remove(waiting)
        account.by_arrival.remove(waiting)
        if account.waiting == 1 and self.turns is not None:
            self.turns.leave(account)
        account.waiting -= 1

    def _begin(self, key: SequenceKey) -> None:
        """Note that a request no longer waits at a worker."""
        self.foreseen.remove(key)
        turn = self._fed.pop(key, None)
        if turn is not None and self.turns is not None:
            self._by_turn.remove(turn)

    def _least_fed_s(self, level: int) -> float:
        """Return the least counter of the level's tenants with requests waiting at workers, or infinity."""
        first = next(self._by_turn.irange_key((level, -inf, ("", -1))), None)
        return inf if first is None or first[0] != level else first[1]

    def _recharge(self, charged: _Charged, service_s: float) -> None:
        more_s, charged.service_s = service_s - charged.service_s, service_s
        if self.turns is None:
            charged.account.counter_s += more_s / charged.account.tenant.weight
        else:
            self.turns.charge(charged.account, more_s)

    def _close(self, key: SequenceKey) -> None:
        self._begin(key)
        self._charged.pop(key).account.running -= 1


class _Reader:
    """Reads one tenant's requests in order, skipping those in `chosen`, which may grow meanwhile."""

    def __init__(self, account: _Account, chosen: Container[SequenceKey]) -> None:
        self._lines = iter(account.by_rank), iter(account.by_arrival)
        self._firsts: list[_Waiting | None] = [None, None]
        self._budget, self._chosen = account.budget.copy(), chosen

    def take(self) -> _Waiting:
        """Return the tenant's next request; one must exist."""
        for at, line in enumerate(self._lines):
            first = self._firsts[at]
            while first is None or first.task.key in self._chosen:
                first = self._firsts[at] = next(line)
        best, oldest = self._firsts
        following = best if self._budget.may_pass else oldest
        assert following is not None
        self._budget.start(following.work_s, passes=following is not oldest)
        return following


_LISTED = 64
"""Maximum workers of each kind that one question names."""
_MOST = 4
"""Number of requests, as a multiple of the places, up to which a higher-ranked one may join a full worker."""


class Feed:
    """Requests that wait at in-step workers. An event's cost does not grow with the fleet."""

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
        self.has_freed = False
        """Whether a place became free; the reader clears it."""
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
            self.has_freed = True

    def ahead(self, head: Rank = NO_RANK) -> WaitingAhead | None:
        """Return the places for the next question, or None. A full worker's is for a better `head` only."""
        passed = self._outranked(head) if self._full else []
        if not (self._empty or self._begun or passed):
            return None
        named = [*islice(self._begun, _LISTED), *passed]
        only: list[str] = []
        closed: list[str] = []
        if len(self._full) > _LISTED:
            only = [*passed, *islice(chain(self._empty, self._begun), _LISTED)]
        elif self._full:
            closed = [worker_id for _, worker_id in self._full if worker_id not in passed]
        crowds = tuple(map(self._crowd, named))
        return WaitingAhead(places=self._places, crowds=crowds, only=tuple(only), closed=tuple(closed))

    def waiting(self, worker_id: str) -> frozenset[SequenceKey]:
        """Return the keys that wait at the worker."""
        return frozenset(self._at.get(worker_id, ()))

    def _outranked(self, head: Rank) -> list[str]:
        """Return full workers at which the head outranks all waiting requests, worst rank first."""
        found = islice(self._full.irange_key(max_key=(NO_RANK, ""), reverse=True), _LISTED)
        return [name for best, name in found if head < best and len(self._at[name]) < self._most(head, best)]

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
