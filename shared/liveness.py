"""Detect live and silent instances from heartbeats, and which run of each is current.

`Liveness` finds instances that fell silent, `Incarnations` the current run of each name. `AwakeTime` excludes
time in which this process could not receive. Pure, except for `new_incarnation`.

    workers = Liveness(silence_s=2.0)
    workers.hear("worker-0", 7, 0.0)    True
    workers.hear("worker-0", 8, 0.5)    True, and 8 is its current run
    workers.hear("worker-0", 7, 0.6)    False: replaced (it was frozen)
    workers.silent(3.0)                 ["worker-0"], once
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

SILENCE_S = 10.0
_MOST_INSTANCES = 4096
_MOST_EARLIER = 16


Start = tuple[str, int]
"""One run of a process: its instance (worker-0) and its incarnation."""


def new_incarnation() -> int:
    """Return a random incarnation: positive, below 2^62."""
    return secrets.randbelow(2**62 - 1) + 1


class AwakeTime:
    """Seconds in which this process could receive: not stopped, starved, or off the bus. Query it more often
    than every `longest_gap_s`; a longer gap means that the process was stopped. Time off the bus is excluded
    up to `longest_pause_s` in a row, so that waits still end."""

    def __init__(self, longest_gap_s: float = 1.0, longest_pause_s: float = 20.0) -> None:
        self._longest_gap_s = longest_gap_s
        self._longest_pause_s = longest_pause_s
        self._looked_s: float | None = None
        self._awake_s = 0.0
        self._paused_s = 0.0

    def at(self, now_s: float, *, is_listening: bool = True) -> float:
        """Return the awake time at `now_s`. It starts at the first `now_s` and never decreases."""
        if self._looked_s is None:
            self._looked_s = self._awake_s = now_s
        gap_s = max(0.0, now_s - self._looked_s)
        self._looked_s += gap_s
        if is_listening:
            self._paused_s = 0.0
            is_counted = gap_s <= self._longest_gap_s
        else:
            is_counted = self._paused_s >= self._longest_pause_s
            self._paused_s += gap_s
        if is_counted:
            self._awake_s += gap_s
        return self._awake_s


class AwakeClock:
    """Clock of `AwakeTime`. Its deadlines do not expire while this process cannot receive heartbeats."""

    def __init__(self, clock: Callable[[], float], is_listening: Callable[[], bool]) -> None:
        self._clock = clock
        self._is_listening = is_listening
        self._time = AwakeTime()
        self()

    def __call__(self) -> float:
        """Return seconds."""
        return self._time.at(self._clock(), is_listening=self._is_listening())


@dataclass(slots=True)
class _Life:
    incarnation: int
    heard_s: float
    earlier: OrderedDict[int, None] = field(default_factory=OrderedDict)


class Incarnations:
    """Current run of each instance, as one receiver knows it.

    An incarnation identifies a run and carries no order, because clocks can be set back. An unknown
    incarnation replaces the current one. Messages of a replaced run (frozen, then resumed) are rejected until
    its successor falls silent, so no run is excluded forever. Bounded: the instance heard least recently is
    dropped.
    """

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        """Accept a replaced run again after `silence_s` without a message from its successor."""
        self._silence_s = silence_s
        self._lives: OrderedDict[str, _Life] = OrderedDict()

    def hear(self, instance: str, incarnation: int, now_s: float) -> bool:
        """Record a message of this run. Return True if it is, or becomes, the current run."""
        life = self._lives.get(instance)
        if life is None:
            life = self._lives[instance] = _Life(incarnation, now_s)
            if len(self._lives) > _MOST_INSTANCES:
                self._lives.popitem(last=False)
        if life.incarnation != incarnation:
            if incarnation in life.earlier and now_s - life.heard_s <= self._silence_s:
                return False
            life.earlier.pop(incarnation, None)
            life.earlier[life.incarnation] = None
            if len(life.earlier) > _MOST_EARLIER:
                life.earlier.popitem(last=False)
            life.incarnation = incarnation
        life.heard_s = now_s
        self._lives.move_to_end(instance)
        return True

    def present(self, instance: str) -> int | None:
        """Return the current incarnation, or None if unknown."""
        life = self._lives.get(instance)
        return None if life is None else life.incarnation

    def is_replaced(self, instance: str, incarnation: int, now_s: float) -> bool:
        """Return True if a known later run replaced this one and was heard recently. An unknown run may be
        the newest, if this receiver was cut off."""
        life = self._lives.get(instance)
        return life is not None and incarnation in life.earlier and now_s - life.heard_s <= self._silence_s


class Liveness:
    """Live instances: all that were heard within the last `silence_s`. The owner keeps its data in a table
    with the same ids and drops the entries that `silent` returns."""

    def __init__(self, silence_s: float, return_s: float = SILENCE_S) -> None:
        """For `return_s` see `silence_s` of `Incarnations`."""
        self._silence_s = silence_s
        self._starts = Incarnations(return_s)
        self._heard_s: dict[str, float] = {}
        """Time of the last message, in the order of these times."""

    def __contains__(self, instance: str) -> bool:
        return instance in self._heard_s

    def __iter__(self) -> Iterator[str]:
        return iter(self._heard_s)

    def hear(self, instance: str, incarnation: int, now_s: float) -> bool:
        """Record a message. Return False if this run was replaced; the message must then be ignored."""
        if not self._starts.hear(instance, incarnation, now_s):
            return False
        self._note(instance, now_s)
        return True

    def _note(self, instance: str, now_s: float) -> None:
        self._heard_s.pop(instance, None)
        self._heard_s[instance] = now_s

    def expect(self, instance: str, incarnation: int | None, now_s: float) -> bool:
        """Add an instance on another's word, so that it must send a heartbeat in time. Return False if this
        run was replaced; `incarnation` is None if unknown."""
        if incarnation is not None and self._starts.is_replaced(instance, incarnation, now_s):
            return False
        self._note(instance, now_s)
        return True

    def present(self, instance: str) -> int | None:
        """Return the incarnation of a live instance; None if it is not live or unknown."""
        return self._starts.present(instance) if instance in self._heard_s else None

    def unheard_s(self, instance: str, now_s: float) -> float:
        """Return the time since the last message; 0 for an instance that is not live."""
        return now_s - self._heard_s.get(instance, now_s)

    def silent(self, now_s: float) -> list[str]:
        """Remove and return the instances that fell silent since the last call, longest silent first."""
        gone = list(takewhile(lambda name: now_s - self._heard_s[name] > self._silence_s, self._heard_s))
        for name in gone:
            del self._heard_s[name]
        return gone

    def forget(self, instance: str) -> None:
        """Remove an instance; its next message adds it again."""
        self._heard_s.pop(instance, None)
