"""Expected wait of a new request: the work that goes before it, divided by the rate of completed work. Pure.

Before it goes its own tenant's waiting work up to its priority, that of better classes, and of other tenants
a share by weight. Source: generalized processor sharing (Parekh and Gallager 1993).

    two workers, 40 s of work wait, all of one tenant → its next request waits 20 s; another's first one, of
    2 s, waits for no more than 2 s of that work: 1 s
"""

from collections import Counter
from dataclasses import dataclass, field
from math import exp

from services.scheduler.policy.contract import CLASS_LEVELS
from shared.messages.sequence import SequenceKey, Tenant

_PRIOR_S = 1.0
"""Worker seconds that the initial rate counts for."""
_MEMORY_S = 30.0
"""Time constant of forgetting, in seconds of full workers."""
_LEAST = 1e-6
_FULL_AFTER_S = 1.0
"""Seconds of waiting after which workers count as full."""
_LONGEST_TICK_S = 1.0
"""Longest time that one tick counts."""


class DrainRate:
    """Measures the seconds of work that one worker completes per second while requests wait."""

    def __init__(self) -> None:
        self._done_s = self._full_s = _PRIOR_S
        """Weighted completed work and full worker time."""
        self._counted_s = _PRIOR_S
        """Full worker time at the last end."""
        self._ended_s = 0.0
        """Work that ended since the last tick."""
        self._quiet_s = 0.0
        """Time since the last end; nothing is forgotten meanwhile, because long answers may end together."""
        self._since_s: float | None = None
        """Start of the present wait."""
        self._is_open = False
        """Whether a sequence has ended since the workers are full; measurement starts there."""
        self._ticked_s: float | None = None

    @property
    def per_worker(self) -> float:
        """Completed work per second, above 0."""
        return max(_LEAST, self._done_s / self._full_s)

    def end(self, work_s: float) -> None:
        """Count the end of a sequence whose expected work was `work_s`."""
        self._ended_s += max(0.0, work_s)

    def on_tick(self, now_s: float, workers: int, *, is_waited: bool) -> None:
        """Advance time; call often. `is_waited`: requests wait now."""
        passed_s = 0.0 if self._ticked_s is None else min(now_s - self._ticked_s, _LONGEST_TICK_S)
        self._ticked_s = now_s
        ended_s, self._ended_s = self._ended_s, 0.0
        if not is_waited or workers == 0:
            self._since_s, self._is_open = None, False
            self._forget(passed_s)
            return
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < _FULL_AFTER_S:
            return
        if not self._is_open:
            self._is_open = ended_s > 0
            return
        self._full_s += passed_s * workers
        self._quiet_s += passed_s
        if ended_s > 0:
            kept = exp(-self._quiet_s / _MEMORY_S)
            added_s = self._full_s - self._counted_s
            self._full_s = self._counted_s = self._counted_s * kept + added_s
            self._done_s = self._done_s * kept + ended_s
            self._quiet_s = 0.0

    def _forget(self, passed_s: float) -> None:
        """Return slowly to the initial rate while nothing waits."""
        kept = exp(-passed_s / _MEMORY_S)
        self._done_s = _PRIOR_S + (self._done_s - _PRIOR_S) * kept
        self._full_s = _PRIOR_S + (self._full_s - _PRIOR_S) * kept
        self._counted_s = _PRIOR_S + (self._counted_s - _PRIOR_S) * kept


@dataclass(slots=True, eq=False)
class _Waiting:
    """Waiting work of one tenant: seconds and number by priority."""

    tenant: Tenant
    work_s: dict[int, float] = field(default_factory=dict)
    count: Counter[int] = field(default_factory=Counter)

    def all_s(self) -> float:
        return sum(self.work_s.values())


class ForeseenWait:
    """Waiting requests, in the queue or unstarted at workers, and the expected wait of a new one."""

    def __init__(self) -> None:
        self.rate = DrainRate()
        self._workers = 0
        self._waiting: dict[str, _Waiting] = {}
        """By tenant with waiting requests."""
        self._entries: dict[SequenceKey, tuple[str, int, float]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: SequenceKey, tenant: Tenant, priority: int, work_s: float) -> None:
        """Add a waiting request."""
        known = self._waiting.setdefault(tenant.name, _Waiting(tenant))
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

    def wait_s(self, tenant: Tenant, priority: int, work_s: float) -> float | None:
        """Return the expected wait of a new request with `work_s` of work, None without workers."""
        if not self._entries:
            return 0.0
        if not self._workers:
            return None
        own = self._waiting.get(tenant.name, _Waiting(tenant))
        before_s = sum([own_s for level, own_s in own.work_s.items() if level <= priority], 0.0)
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
        """Raises AssertionError when sums and entries disagree."""
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
