"""The fleet's queue of requests that wait for a worker, shared by the live scheduler and the simulator.

The order: the least served tenant (`policy/tenants.py`), the lower priority, the policy's `queue_key`. Only a
share of started work may pass older work. Only a few requests wait at each worker (`core/backlog.py:Feed`).

    a (100 s of work) came first, then b and c (1 s each); one place is free → b goes, c goes, until the work
    that has passed a exceeds the share of all started work; then a goes, before any d.
"""

import heapq
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Any

from msgspec import structs

from services.scheduler.policy.contract import CLASS_LEVELS, QueueRule, Task, level_of, turn_at
from services.scheduler.policy.estimates import DrainRate, LengthEstimates, WorkerSpeeds
from services.scheduler.policy.options import TwoQueueOptions
from services.scheduler.policy.tenants import TenantAccount, TenantTurns
from services.scheduler.policy.waiting_queue import Line, PassingBudget
from shared.average import averaged
from shared.errors import PolicyFailed
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import NOBODY, SequenceKey, Tenant


@dataclass(slots=True, eq=False)
class _WaitingWork:
    """Waiting work of one tenant: seconds and number by priority."""

    tenant: Tenant
    work_s: dict[int, float] = field(default_factory=dict)
    count: Counter[int] = field(default_factory=Counter)

    def all_s(self) -> float:
        return sum(self.work_s.values())


class ForeseenWait:
    """Expected wait of a new request: the work that goes before it, divided by the rate of completed work.

    Before it goes its own tenant's waiting work up to its priority, that of better classes, and of other
    tenants a share by weight. Work waits in the queue, or unstarted at workers. Source: generalized processor
    sharing (Parekh and Gallager 1993).

        two workers, 40 s of work wait, all of one tenant → its next request waits 20 s; another's first one,
        of 2 s, waits for no more than 2 s of that work: 1 s
    """

    def __init__(self) -> None:
        self.rate = DrainRate()
        self._workers = 0
        self._waiting: dict[str, _WaitingWork] = {}
        """By tenant with waiting requests."""
        self._entries: dict[SequenceKey, tuple[str, int, float]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: SequenceKey, tenant: Tenant, priority: int, work_s: float) -> None:
        """Add a waiting request."""
        known = self._waiting.setdefault(tenant.name, _WaitingWork(tenant))
        known.tenant = tenant
        known.work_s[priority] = known.work_s.get(priority, 0.0) + work_s
        known.count[priority] += 1
        self._entries[key] = (tenant.name, priority, work_s)

    def remove(self, key: SequenceKey) -> None:
        """Remove a request; ignore an unknown key."""
        name, priority, work_s = self._entries.pop(key, ("", 0, None))
        if work_s is None:
            return
        known = self._waiting[name]
        known.count[priority] -= 1
        known.work_s[priority] -= work_s
        if not known.count[priority]:  # the last one also removes rounding errors
            del known.count[priority], known.work_s[priority]
        if not known.count:
            del self._waiting[name]

    def on_tick(self, now_s: float, workers: int) -> None:
        """Advance time; call often. `workers`: number of workers that take work."""
        self._workers = workers
        self.rate.on_tick(now_s, workers, is_waited=bool(self._entries))

    def wait_s(self, tenant: Tenant, priority: int, work_s: float, behind_s: float = 0.0) -> float | None:
        """Return the expected wait of a new request, None without workers. It passes `behind_s` of work."""
        if not self._entries:
            return 0.0
        if not self._workers:
            return None
        own = self._waiting.get(tenant.name, _WaitingWork(tenant))
        before_s = sum([own_s for level, own_s in own.work_s.items() if level <= priority], -behind_s)
        share_s = (before_s + work_s) / tenant.weight
        level = CLASS_LEVELS[tenant.service_class]
        for name, other in self._waiting.items():
            their_level = CLASS_LEVELS[other.tenant.service_class]
            if name != tenant.name and their_level <= level:
                turn_s = share_s * other.tenant.weight
                before_s += other.all_s() if their_level < level else min(other.all_s(), turn_s)
        return max(0.0, before_s) / (self.rate.per_worker * self._workers)

    def longest_s(self) -> float:
        """Return the expected wait behind all waiting requests, 0 without workers."""
        before_s = sum(known.all_s() for known in self._waiting.values())
        return before_s / (self.rate.per_worker * self._workers) if self._workers else 0.0

    def check_integrity(self) -> None:
        counts = Counter((name, priority) for name, priority, _ in self._entries.values())
        found = {
            (name, priority): count
            for name, known in self._waiting.items()
            for priority, count in known.count.items()
        }
        assert found == dict(counts)
        whole_s = sum(work_s for _, _, work_s in self._entries.values())
        summed_s = sum(known.all_s() for known in self._waiting.values())
        assert abs(whole_s - summed_s) <= 1e-6 * (1 + whole_s)


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


@dataclass(slots=True, eq=False)
class _Account(TenantAccount):
    """A tenant's account, its waiting requests and its passing budget."""

    budget: PassingBudget = field(kw_only=True)
    by_rank: "Line[_Waiting]" = field(default_factory=lambda: Line(_rank))
    by_arrival: "Line[_Waiting]" = field(default_factory=lambda: Line(_arrival))


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that waits with its rank, or has started."""

    account: _Account
    task: Task
    work_s: float
    """Expected work; of a started request what its tenant is charged."""
    rank: Rank


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

    def __init__(self, rule: QueueRule, budget: PassingBudget | None = None) -> None:
        """`budget`: template for each new tenant."""
        self._rule = rule
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
        self._charged: dict[SequenceKey, _Waiting] = {}
        """Started requests."""
        self._fed: dict[SequenceKey, _Turn] = {}
        """Requests that went to a worker and have not started there."""
        self._by_turn: Line[_Turn] = Line(lambda turn: turn)
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
        self._charged[key] = waiting
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
            self.begin(key)
            return
        self.foreseen.rate.end(charged.work_s)
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
        """Return the expected wait of a request that does not wait yet, None without measured speeds. Raises
        PolicyFailed if the key fails."""
        if not self._speeds.are_measured:
            return None
        work_s, account = self.work_s(task), self._accounts.get(tenant.name)
        rank = (task.priority, self._rule.place(task, work_s), task.arrival_s, task.key)
        behind = account.by_rank.irange_key(rank) if account else ()
        behind_s = sum(one.work_s for one in behind if one.task.priority == task.priority)
        return self.foreseen.wait_s(tenant, task.priority, work_s, behind_s)

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

    def begin(self, key: SequenceKey) -> None:
        """Note that a request no longer waits at a worker: it starts there, or leaves."""
        self.foreseen.remove(key)
        turn = self._fed.pop(key, None)
        if turn is not None and self.turns is not None:
            self._by_turn.remove(turn)

    def _least_fed_s(self, level: int) -> float:
        """Return the least counter of the level's tenants with requests waiting at workers, or infinity."""
        first = next(self._by_turn.irange_key((level, -inf, ("", -1))), None)
        return inf if first is None or first[0] != level else first[1]

    def _recharge(self, charged: _Waiting, service_s: float) -> None:
        more_s, charged.work_s = service_s - charged.work_s, service_s
        if self.turns is None:
            charged.account.counter_s += more_s / charged.account.tenant.weight
        else:
            self.turns.charge(charged.account, more_s)

    def _close(self, key: SequenceKey) -> None:
        self.begin(key)
        self._charged.pop(key).account.running -= 1


class _Reader:
    """Reads one tenant's requests in order, skipping those in `chosen`, which may grow meanwhile."""

    def __init__(self, account: _Account, chosen: Container[SequenceKey]) -> None:
        self._lines = iter(account.by_rank), iter(account.by_arrival)
        self._firsts: list[_Waiting | None] = [None, None]
        self._budget, self._count, self._chosen = account.budget.copy(), account.waiting, chosen

    def take(self) -> _Waiting:
        """Return the tenant's next request; one must exist."""
        for at, line in enumerate(self._lines):
            first = self._firsts[at]
            while first is None or first.task.key in self._chosen:
                first = self._firsts[at] = next(line)
        best, oldest = self._firsts
        following = best if self._budget.may_pass(self._count) else oldest
        assert following is not None
        self._budget.start(following.work_s, passes=following is not oldest)
        self._count -= 1
        return following
