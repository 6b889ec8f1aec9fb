"""Turns of several tenants: the tenant with the least service for its weight is next. Pure.

Virtual counters (VTC, arXiv 2401.00588). Service is work in seconds of a whole worker. A tenant pays the
expected cost when a sequence starts, and the difference when it ends. One that returns is lifted to the least
waiting counter, so unused service is not saved, but not above sequences that have not started at a worker.

    a floods, b submits now and then → b starts at a's counter, and a's has risen by b's next request: b is
    next each time it submits, until it has had as much as a
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from math import inf

from services.scheduler.policy.contract import CLASS_LEVELS
from services.scheduler.policy.waiting_queue import Line
from shared.messages.sequence import ServiceClass, Tenant

_Place = tuple[int, float, int, str]


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


def _place(account: TenantAccount) -> _Place:
    """Return the sort key among waiting tenants; ties go to the one served longest ago."""
    tenant = account.tenant
    return (CLASS_LEVELS[tenant.service_class], account.counter_s, account.started, tenant.name)


class TenantTurns:
    """The order of waiting tenants. `join` and `leave`: for the first and the last that waits."""

    def __init__(self, accounts: Iterable[TenantAccount]) -> None:
        self._waiting: Line[TenantAccount] = Line(_place)
        self._floors: dict[ServiceClass, float] = {}
        """Least waiting counter of each class, now or when one last waited."""
        self._starts = 0
        for account in accounts:
            self._floors[account.tenant.service_class] = account.counter_s
            if account.waiting:
                self._waiting.add(account)

    def join(self, account: TenantAccount, unserved_s: float = inf) -> None:
        """Add a tenant that waits again. `unserved_s`: least counter of requests unstarted at workers."""
        floor_s = min(self._floors.get(account.tenant.service_class, 0.0), unserved_s)
        account.counter_s = max(account.counter_s, floor_s)
        self._waiting.add(account)

    def leave(self, account: TenantAccount) -> None:
        """Remove a tenant that waits no more."""
        self._waiting.remove(account)
        self._lift_floor(account)

    def charge(self, account: TenantAccount, service_s: float, *, starts: bool = False) -> None:
        """Add to a tenant's counter; negative: a refund. `starts`: it was its turn."""
        if account.waiting:
            self._waiting.remove(account)
        account.counter_s += service_s / account.tenant.weight
        if starts:
            self._starts += 1
            account.started = self._starts
        if account.waiting:
            self._waiting.add(account)
            self._lift_floor(account)

    def standing(self, count: int) -> list[tuple[str, float]]:
        """Return the first `count` waiting tenants by turn, with their counters."""
        return [(one.tenant.name, one.counter_s) for one in islice(self._waiting, count)]

    def simulate(self, count: int, start: Callable[[str], float]) -> None:
        """Simulate up to `count` turns. `start` is called with each tenant and returns its charge."""
        heap = [(_place(one), one.waiting, one.tenant) for one in islice(self._waiting, count)]
        for number in range(self._starts + 1, self._starts + 1 + count):
            if not heap:
                return
            (level, counter_s, _, name), waiting, tenant = heap[0]
            place = (level, counter_s + start(name) / tenant.weight, number, name)
            if waiting > 1:
                heapq.heapreplace(heap, (place, waiting - 1, tenant))
            else:
                heapq.heappop(heap)

    def _lift_floor(self, account: TenantAccount) -> None:
        """Raise the class's floor to the least waiting counter, or to the account's own if none waits."""
        service_class = account.tenant.service_class
        first = next(self._waiting.irange_key((CLASS_LEVELS[service_class], -inf, 0, "")), account)
        least = first if first.tenant.service_class is service_class else account
        self._floors[service_class] = max(self._floors.get(service_class, 0.0), least.counter_s)

    def check_integrity(self, accounts: Iterable[TenantAccount]) -> None:
        """Raises AssertionError when the line and the accounts disagree."""
        self._waiting.check_integrity()
        assert {id(one) for one in accounts if one.waiting} == {id(one) for one in self._waiting}
