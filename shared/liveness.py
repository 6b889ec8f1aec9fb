"""Who was heard lately, which start of each is the present one, and that silence counts only while awake.

Everybody who keeps a table of others from their heartbeats keeps it by these: `Liveness` says whom nobody has
heard for too long, `Incarnations` which of several starts of one name is listened to, and `AwakeTime` leaves
out the time in which this process could not have heard anybody. Pure, but for an incarnation's origin.

    workers = Liveness(silence_s=2.0)
    workers.hear("worker-0", 7, 0.0)    True
    workers.hear("worker-0", 8, 0.5)    True, and 8 is its present start
    workers.hear("worker-0", 7, 0.6)    False: it was frozen, and woke up
    workers.silent(3.0)                 ["worker-0"], once
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SILENCE_S = 10.0
_MOST_INSTANCES = 4096
_MOST_EARLIER = 16


Start = tuple[str, int]
"""One run of a process: its instance (worker-0) and its incarnation."""


def new_incarnation() -> int:
    """Of a start: random, positive, below 2^62."""
    return secrets.randbelow(2**62 - 1) + 1


class AwakeTime:
    """Seconds in which this process could listen: without those it was stopped, starved, or off the bus.

    It has to be looked at more often than every `longest_gap_s`; a longer gap means that the process was
    stopped. Time off the bus is left out too, but at most `longest_pause_s` at a stretch: whoever waits has
    to learn some day.
    """

    def __init__(self, longest_gap_s: float = 1.0, longest_pause_s: float = 20.0) -> None:
        self._longest_gap_s = longest_gap_s
        self._longest_pause_s = longest_pause_s
        self._looked_s: float | None = None
        self._awake_s = 0.0
        self._paused_s = 0.0

    def at(self, now_s: float, *, is_listening: bool = True) -> float:
        """Begins with the first `now_s` and runs as that does, less what was missed. Never goes back."""
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
    """A clock that tells `AwakeTime`. Deadlines measured on it do not expire because nobody was there to see
    the heartbeats arrive."""

    def __init__(self, clock: Callable[[], float], is_listening: Callable[[], bool]) -> None:
        self._clock = clock
        self._is_listening = is_listening
        self._time = AwakeTime()
        self()

    def __call__(self) -> float:
        """Seconds."""
        return self._time.at(self._clock(), is_listening=self._is_listening())


@dataclass(slots=True)
class _Life:
    incarnation: int
    heard_s: float
    earlier: OrderedDict[int, None] = field(default_factory=OrderedDict)


class Incarnations:
    """Which start of each instance is the present one, as one reader has heard them.

    An incarnation is a random number: it says which start of an instance sent a message, and nothing of time,
    for clocks are set back. A start not heard of before replaces the one before it; what that still sends (it
    was frozen, and woke up) is not listened to, unless its successor falls silent. So nothing is remembered
    for ever, and nobody is shut out for good. Bounded: the instance unheard for longest is forgotten.
    """

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        """After `silence_s` without a word from its successor an earlier start may come back."""
        self._silence_s = silence_s
        self._lives: OrderedDict[str, _Life] = OrderedDict()

    def hear(self, instance: str, incarnation: int, now_s: float) -> bool:
        """Something came from this start. Whether it is the present one, perhaps from now on."""
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
        """The present start; None: not heard of."""
        life = self._lives.get(instance)
        return None if life is None else life.incarnation

    def is_replaced(self, instance: str, incarnation: int, now_s: float) -> bool:
        """Whether this start was heard of, and then another one, and that one lately. A start that was never
        heard of may be newer than all others: whoever was cut off for a while has not heard it."""
        life = self._lives.get(instance)
        return life is not None and incarnation in life.earlier and now_s - life.heard_s <= self._silence_s


class Liveness:
    """Who is there: everybody that was heard and has not been silent for more than `silence_s` since.

    What belongs to an instance lies in its owner's table, by the same id, and goes when `silent` names it.
    """

    def __init__(self, silence_s: float, return_s: float = SILENCE_S) -> None:
        """`return_s`: see `Incarnations`."""
        self._silence_s = silence_s
        self._starts = Incarnations(return_s)
        self._heard_s: dict[str, float] = {}

    def __contains__(self, instance: str) -> bool:
        return instance in self._heard_s

    def __iter__(self) -> Iterator[str]:
        return iter(self._heard_s)

    def hear(self, instance: str, incarnation: int, now_s: float) -> bool:
        """It says something. False, and nothing of it counts, where this start of it was replaced."""
        if not self._starts.hear(instance, incarnation, now_s):
            return False
        self._heard_s[instance] = now_s
        return True

    def expect(self, instance: str, incarnation: int | None, now_s: float) -> bool:
        """Somebody says that it is there: it has to show itself from now on. False where that is of a start
        (None: not known of which) that was replaced."""
        if incarnation is not None and self._starts.is_replaced(instance, incarnation, now_s):
            return False
        self._heard_s[instance] = now_s
        return True

    def present(self, instance: str) -> int | None:
        """The start of it that is there; None: none is, or nobody knows which."""
        return self._starts.present(instance) if instance in self._heard_s else None

    def unheard_s(self, instance: str, now_s: float) -> float:
        """For how long; 0 for one that is not there."""
        return now_s - self._heard_s.get(instance, now_s)

    def silent(self, now_s: float) -> list[str]:
        """Who has fallen silent since the last call; they are there no more until they are heard again."""
        gone = [name for name, heard_s in self._heard_s.items() if now_s - heard_s > self._silence_s]
        for name in gone:
            del self._heard_s[name]
        return gone

    def forget(self, instance: str) -> None:
        """It is there no more, whoever found that out; its next word brings it back."""
        self._heard_s.pop(instance, None)
