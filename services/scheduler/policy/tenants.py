"""Whose turn it is: what each tenant was served is counted; who was served least, for its weight, is next.

Virtual counters (VTC, arXiv 2401.00588). Service is work in seconds of a whole worker: prompt tokens
computed, and KV held while answers are written. A tenant is charged what is expected when one of its
sequences starts, and the difference when that is over. One that nobody waited for is lifted, when somebody
does again, to the least counter of those that wait: what it did not use is not saved up. Better classes go
first.

What waits at a worker has not been served yet: who comes is lifted no further than that, and so passes it.

    a floods, b asks now and then → b's counter is a's when it comes, and a's has risen when it comes again: b
    is next each time it asks, until it has had as much as a

Between two tenants of one class that both wait all the time, what they were charged for their weights never
differs by more than twice the largest charge. Pure.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from services.scheduler.policy.contract import CLASS_LEVELS
from services.scheduler.policy.waiting_queue import Line
from shared.messages.sequence import ServiceClass, Tenant

MOST_ACCOUNTS = 4096
"""Of tenants that nobody waits for, and that nothing is owed to: of more, those begun first are forgotten."""


@dataclass(slots=True, eq=False)
class TenantAccount:
    """One tenant's."""

    tenant: Tenant
    counter_s: float = 0.0
    """What it was served, by its weight, lifted as above."""
    waiting: int = 0
    running: int = 0
    """Sequences at workers."""
    started: int = 0
    """When one of its sequences last went to a worker, on the queue's count of starts."""

    @property
    def place(self) -> tuple[int, float, int, str]:
        """Among those that wait; of equals the one served longest ago."""
        tenant = self.tenant
        return (CLASS_LEVELS[tenant.service_class], self.counter_s, self.started, tenant.name)


def _place(account: TenantAccount) -> tuple[int, float, int, str]:
    return account.place


class TenantTurns:
    """See above."""

    def __init__(self) -> None:
        self._accounts: dict[str, TenantAccount] = {}
        self._waiting: Line[TenantAccount] = Line(_place)
        self._present: set[str] = set()
        self._floors: dict[ServiceClass, float] = {}
        """The least counter of those that wait or waited last, by class."""
        self._starts = 0

    @property
    def are_several(self) -> bool:
        """Whether there is more than one to be fair to: that had anything, be it long ago."""
        return len(self._accounts) > 1

    def join(self, tenant: Tenant, unserved_s: float = float("inf")) -> None:
        """One more of its sequences waits. `unserved_s`: the least counter at which one went to a worker that
        has not been begun there."""
        account = self._accounts.get(tenant.name)
        if account is None:
            self._forget_oldest()
            account = self._accounts[tenant.name] = TenantAccount(tenant)
        if account.waiting:
            account.waiting += 1
            return
        account.tenant = tenant
        floor_s = min(self._floors.get(tenant.service_class, 0.0), unserved_s)
        account.counter_s = max(account.counter_s, floor_s)
        account.waiting = 1
        self._note(account)
        self._waiting.add(account)

    def leave(self, name: str) -> None:
        """One less waits. Raises KeyError where none did."""
        account = self._accounts[name]
        if not account.waiting:
            raise KeyError(name)
        if account.waiting == 1:
            self._waiting.remove(account)
            self._lift_floor(account)
        account.waiting -= 1
        self._note(account)

    def start(self, name: str, service_s: float) -> None:
        """One of those that wait goes to a worker, and is charged so much. Raises KeyError where none did."""
        self.leave(name)
        self._starts += 1
        account = self._accounts[name]
        account.running += 1
        self._note(account)
        self._charge(account, service_s, started=self._starts)

    def end(self, name: str) -> None:
        """One of those that went to a worker is over."""
        account = self._accounts.get(name)
        if account is not None:
            account.running = max(0, account.running - 1)
            self._note(account)

    def correct(self, name: str, service_s: float) -> None:
        """It was charged so much too little; negative: too much."""
        account = self._accounts.get(name)
        if account is not None:
            self._charge(account, service_s, started=account.started)

    def order(self, count: int) -> "Turns":
        """Whose turns come next, for at most so many starts. Nothing changes by asking."""
        return Turns(self._waiting, count, self._starts)

    def standing(self, count: int) -> list[tuple[str, float]]:
        """Of those that wait, the first so many to have a turn, and what each one's counter stands at."""
        return [(one.tenant.name, one.counter_s) for one in islice(self._waiting, count)]

    def counter_s(self, name: str) -> float:
        """Raises KeyError for one that is not known."""
        return self._accounts[name].counter_s

    def _note(self, account: TenantAccount) -> None:
        if account.waiting or account.running:
            self._present.add(account.tenant.name)
        else:
            self._present.discard(account.tenant.name)

    def charged_s(self) -> Iterator[tuple[str, float]]:
        """Each tenant, and what its counter stands at."""
        return ((name, account.counter_s) for name, account in self._accounts.items())

    def _charge(self, account: TenantAccount, service_s: float, *, started: int) -> None:
        if account.waiting:
            self._waiting.remove(account)
        account.counter_s += service_s / account.tenant.weight
        account.started = started
        if account.waiting:
            self._waiting.add(account)
            self._lift_floor(account)

    def _lift_floor(self, account: TenantAccount) -> None:
        """To the least counter of those of its class that wait; if none does, to its own."""
        service_class = account.tenant.service_class
        level = CLASS_LEVELS[service_class]
        first = next(self._waiting.starting_at((level, float("-inf"), 0, "")), account)
        least = first if first.tenant.service_class is service_class else account
        self._floors[service_class] = max(self._floors.get(service_class, 0.0), least.counter_s)

    def _forget_oldest(self) -> None:
        if len(self._accounts) >= MOST_ACCOUNTS:
            idle = next((name for name in self._accounts if name not in self._present), None)
            if idle is not None:
                del self._accounts[idle]

    def check_integrity(self) -> None:
        """Raises AssertionError when the line and the accounts disagree."""
        self._waiting.check_integrity()
        waiting = [account for account in self._accounts.values() if account.waiting]
        assert {id(account) for account in waiting} == {id(account) for account in self._waiting}
        present = {name for name, account in self._accounts.items() if account.waiting or account.running}
        assert present == self._present
        assert all(account.tenant.name == name for name, account in self._accounts.items())


class Turns:
    """The turns to come, one after the other."""

    def __init__(self, waiting: Line[TenantAccount], count: int, starts: int) -> None:
        """Of `count` turns nobody has one but the first `count` of those that wait. `starts`: until now."""
        first = islice(waiting, count)
        self._heap = [(account.place, account.waiting, account.tenant) for account in first]
        self._starts = starts

    def next(self) -> str | None:
        """Whose turn it is; None where nobody waits."""
        return self._heap[0][0][3] if self._heap else None

    def start(self, service_s: float) -> None:
        """Whose turn it is starts one, and is charged so much."""
        (level, counter_s, _, name), waiting, tenant = self._heap[0]
        self._starts += 1
        if waiting > 1:
            place = (level, counter_s + service_s / tenant.weight, self._starts, name)
            heapq.heapreplace(self._heap, (place, waiting - 1, tenant))
        else:
            heapq.heappop(self._heap)
