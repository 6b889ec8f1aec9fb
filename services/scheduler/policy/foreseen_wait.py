"""How long one that comes now would wait for a worker: the work that goes before it, over the rate at which
work gets done.

Both are counted in the queue's own seconds of a whole worker, from predicted lengths and measured speeds. So
what all predictions are wrong by is in both, and cancels.

- Before it go: of its own tenant all that wait, but for those with a higher priority number; of the other
  tenants of its class as much as turns give them meanwhile, by weight, and no more than they have; of better
  classes all; of worse ones nothing. Who floods sees a long wait, and the others do not.
- The rate is what ended, for each second in which somebody waited, by worker. Of a fleet that was never full
  nothing was measured: then a worker does a second's work in a second. While nobody waits, what was measured
  is forgotten: a stall of an hour ago refuses nobody now.

    two workers, 40 s of work wait, all of one tenant → its next one waits 20 s; another's first one, of 2 s,
    waits for no more than 2 s of that work: 1 s

Source: generalized processor sharing (Parekh and Gallager 1993), which turns by service come close to. Pure.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import exp

from services.scheduler.policy.contract import CLASS_LEVELS
from shared.messages.sequence import SequenceKey, Tenant

_PRIOR_S = 1.0
"""Of one worker's time, for which a rate that nobody has measured counts at first."""
_MEMORY_S = 30.0
"""Of full workers' time: what was measured longer ago counts for less than 1/e."""
_LEAST = 1e-6
_FULL_AFTER_S = 1.0
"""Somebody has waited all that time: then the workers are full."""
_LONGEST_TICK_S = 1.0
"""More is a time in which nobody looked."""


class DrainRate:
    """Seconds of work that one worker gets done in a second, while somebody waits all the time."""

    def __init__(self) -> None:
        self._done_s = self._full_s = _PRIOR_S
        """Work, and full workers' time, that count."""
        self._counted_s = _PRIOR_S
        """The latter, as of the last end."""
        self._ended_s = 0.0
        """Work that ended since the last tick."""
        self._quiet_s = 0.0
        """Since something ended: until then nothing is forgotten, as long answers may end together."""
        self._since_s: float | None = None
        """When the wait began that goes on."""
        self._is_open = False
        """Something has ended since the workers are full: before, work was begun and could not have ended."""
        self._ticked_s: float | None = None

    @property
    def per_worker(self) -> float:
        """Above 0."""
        return max(_LEAST, self._done_s / self._full_s)

    def end(self, work_s: float) -> None:
        """One is over, that was taken to be so much work when it started."""
        self._ended_s += max(0.0, work_s)

    def on_tick(self, now_s: float, workers: int, *, is_waited: bool) -> None:
        """To be called often; `is_waited`: somebody waits now."""
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
        """Nobody waits: what was measured goes back to what is taken of a fleet that was never full."""
        kept = exp(-passed_s / _MEMORY_S)
        self._done_s = _PRIOR_S + (self._done_s - _PRIOR_S) * kept
        self._full_s = _PRIOR_S + (self._full_s - _PRIOR_S) * kept
        self._counted_s = _PRIOR_S + (self._counted_s - _PRIOR_S) * kept


@dataclass(slots=True, eq=False)
class _Waiting:
    """Of one tenant: seconds of work by priority, and how many."""

    tenant: Tenant
    work_s: dict[int, float] = field(default_factory=dict)
    count: Counter[int] = field(default_factory=Counter)

    def add(self, priority: int, work_s: float) -> None:
        self.work_s[priority] = self.work_s.get(priority, 0.0) + work_s
        self.count[priority] += 1

    def remove(self, priority: int, work_s: float) -> None:
        self.count[priority] -= 1
        self.work_s[priority] -= work_s
        if not self.count[priority]:  # what rounding has left goes with the last
            del self.count[priority], self.work_s[priority]

    def up_to(self, priority: int) -> float:
        return sum(work_s for level, work_s in self.work_s.items() if level <= priority)

    def all_s(self) -> float:
        return sum(self.work_s.values())


class ForeseenWait:
    """Those that wait, in the queue or at a worker that has not begun them, and what is foreseen for one
    more."""

    def __init__(self) -> None:
        self.rate = DrainRate()
        self._workers = 0
        self._waiting: dict[str, _Waiting] = {}
        """By tenant that has any."""
        self._entries: dict[SequenceKey, tuple[str, int, float]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: SequenceKey, tenant: Tenant, priority: int, work_s: float) -> None:
        """It waits. Raises ValueError for one that does already."""
        if key in self._entries:
            raise ValueError(f"{key} waits already")
        known = self._waiting.setdefault(tenant.name, _Waiting(tenant))
        known.tenant = tenant
        known.add(priority, work_s)
        self._entries[key] = (tenant.name, priority, work_s)

    def remove(self, key: SequenceKey) -> None:
        """It does not wait any more; nothing for one that did not."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        name, priority, work_s = entry
        known = self._waiting[name]
        known.remove(priority, work_s)
        if not known.count:
            del self._waiting[name]

    def on_tick(self, now_s: float, workers: int) -> None:
        """To be called often: so many workers take work."""
        self._workers = workers
        self.rate.on_tick(now_s, workers, is_waited=bool(self._entries))

    def wait_s(self, tenant: Tenant, priority: int, work_s: float) -> float | None:
        """For one more of that tenant, of `work_s`. None: no worker is there, nobody can say."""
        if not self._entries:
            return 0.0
        if not self._workers:
            return None
        own = self._waiting.get(tenant.name)
        before_s = 0.0 if own is None else own.up_to(priority)
        share_s = (before_s + work_s) / tenant.weight
        level = CLASS_LEVELS[tenant.service_class]
        for name, other in self._waiting.items():
            their_level = CLASS_LEVELS[other.tenant.service_class]
            if name != tenant.name and their_level <= level:
                turn_s = share_s * other.tenant.weight
                before_s += other.all_s() if their_level < level else min(other.all_s(), turn_s)
        return max(0.0, before_s) / (self.rate.per_worker * self._workers)

    def longest_s(self) -> float:
        """For one more behind all that wait; 0 where nobody can say."""
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
