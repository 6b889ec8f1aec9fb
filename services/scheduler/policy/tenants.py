"""Turns of tenants: the tenant with the least service for its weight is next.

Virtual counters (VTC, arXiv 2401.00588). Service is work in seconds of a whole worker: computed prompt
tokens, and KV held during decode. A tenant pays the expected cost when a sequence starts, and the difference
when it ends. A tenant that returns is lifted to the least waiting counter, so unused service is not saved.
Better classes go first. Sequences that wait at a worker are not served yet, so a returning tenant is not
lifted above them.

    a floods, b submits now and then → b starts at a's counter, and a's has risen by b's next request: b is
    next each time it submits, until it has had as much as a

For two tenants of one class that always wait, weighted charges differ by at most twice the largest charge.
Pure.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from services.scheduler.policy.contract import CLASS_LEVELS
from services.scheduler.policy.waiting_queue import Line
from shared.messages.sequence import ServiceClass, Tenant

MOST_ACCOUNTS = 4096
"""Maximum number of accounts; beyond it, the oldest idle account is dropped."""


@dataclass(slots=True, eq=False)
class TenantAccount:
    """Service account of one tenant."""

    tenant: Tenant
    counter_s: float = 0.0
    """Weighted service in seconds, lifted as described above."""
    waiting: int = 0
    running: int = 0
    """Number of sequences at workers."""
    started: int = 0
    """Number of the queue's start at which this tenant was last served."""

    @property
    def place(self) -> tuple[int, float, int, str]:
        """Sort key among waiting tenants; ties go to the one served longest ago."""
        tenant = self.tenant
        return (CLASS_LEVELS[tenant.service_class], self.counter_s, self.started, tenant.name)


def _place(account: TenantAccount) -> tuple[int, float, int, str]:
    return account.place


class TenantTurns:
    """Accounts of all tenants and the order of those that wait."""

    def __init__(self) -> None:
        self._accounts: dict[str, TenantAccount] = {}
        self._waiting: Line[TenantAccount] = Line(_place)
        self._present: set[str] = set()
        self._floors: dict[ServiceClass, float] = {}
        """Least waiting counter of each class, now or when one last waited."""
        self._starts = 0

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant is known, present or past."""
        return len(self._accounts) > 1

    def join(self, tenant: Tenant, unserved_s: float = float("inf")) -> None:
        """Add a waiting sequence. `unserved_s`: least counter at which an unstarted sequence went to a
        worker."""
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
        """Remove a waiting sequence. Raises KeyError if the tenant has none."""
        account = self._accounts[name]
        if not account.waiting:
            raise KeyError(name)
        if account.waiting == 1:
            self._waiting.remove(account)
            self._lift_floor(account)
        account.waiting -= 1
        self._note(account)

    def start(self, name: str, service_s: float) -> None:
        """Start a waiting sequence and charge `service_s`. Raises KeyError if the tenant has none."""
        self.leave(name)
        self._starts += 1
        account = self._accounts[name]
        account.running += 1
        self._note(account)
        self._charge(account, service_s, started=self._starts)

    def end(self, name: str) -> None:
        """Count the end of a started sequence."""
        account = self._accounts.get(name)
        if account is not None:
            account.running = max(0, account.running - 1)
            self._note(account)

    def correct(self, name: str, service_s: float) -> None:
        """Add to the tenant's charge; negative: a refund."""
        account = self._accounts.get(name)
        if account is not None:
            self._charge(account, service_s, started=account.started)

    def order(self, count: int) -> "Turns":
        """Return the order of the next turns, for at most `count` starts. Changes nothing."""
        return Turns(self._waiting, count, self._starts)

    def standing(self, count: int) -> list[tuple[str, float]]:
        """Return the first `count` waiting tenants by turn, with their counters."""
        return [(one.tenant.name, one.counter_s) for one in islice(self._waiting, count)]

    def counter_s(self, name: str) -> float:
        """Return a tenant's counter. Raises KeyError for an unknown tenant."""
        return self._accounts[name].counter_s

    def _note(self, account: TenantAccount) -> None:
        if account.waiting or account.running:
            self._present.add(account.tenant.name)
        else:
            self._present.discard(account.tenant.name)

    def charged_s(self) -> Iterator[tuple[str, float]]:
        """Return every tenant with its counter."""
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
        """Raise the class's floor to the least waiting counter, or to the account's own if none waits."""
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
    """A simulation of the turns to come."""

    def __init__(self, waiting: Line[TenantAccount], count: int, starts: int) -> None:
        """Only the first `count` waiting tenants can have one of `count` turns. `starts`: number of starts so
        far."""
        first = islice(waiting, count)
        self._heap = [(account.place, account.waiting, account.tenant) for account in first]
        self._starts = starts

    def next(self) -> str | None:
        """Return the tenant whose turn it is, or None if none waits."""
        return self._heap[0][0][3] if self._heap else None

    def start(self, service_s: float) -> None:
        """Charge the tenant whose turn it is for one start."""
        (level, counter_s, _, name), waiting, tenant = self._heap[0]
        self._starts += 1
        if waiting > 1:
            place = (level, counter_s + service_s / tenant.weight, self._starts, name)
            heapq.heapreplace(self._heap, (place, waiting - 1, tenant))
        else:
            heapq.heappop(self._heap)
