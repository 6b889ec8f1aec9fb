"""Which start of an instance is the present one, where several of one name may be heard. Pure, but for the
number's origin.

An incarnation is a random number: it says which start of an instance sent a message, and nothing of time, for
clocks are set back. A start not heard of before replaces the one before it; what that still sends (it was
frozen, and woke up) is not listened to, unless its successor falls silent. So nothing is remembered for ever,
and nobody is shut out for good.
"""

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

SILENCE_S = 10.0
_MOST_INSTANCES = 4096
_MOST_EARLIER = 16


def new_incarnation() -> int:
    """Of a start: random, positive, below 2^62."""
    return secrets.randbelow(2**62 - 1) + 1


@dataclass(slots=True)
class _Life:
    incarnation: int
    heard_s: float
    earlier: OrderedDict[int, None] = field(default_factory=OrderedDict)


class Incarnations:
    """Of instances by id, as one reader has heard them. Bounded: the one unheard for longest is forgotten."""

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

    def is_another(self, instance: str, incarnation: int, now_s: float) -> bool:
        """Whether another start than this is the present one, and was heard of lately."""
        life = self._lives.get(instance)
        return (
            life is not None and life.incarnation != incarnation and now_s - life.heard_s <= self._silence_s
        )

    def forgive(self, paused_s: float) -> None:
        """The reader itself did not listen for so long: nobody was silent."""
        for life in self._lives.values():
            life.heard_s += paused_s
