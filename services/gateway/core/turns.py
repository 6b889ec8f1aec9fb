"""Fair queue for a few places: keys alternate, and a key has at most one place at a time."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from shared.errors import Overloaded

Item = TypeVar("Item")
MOST_WAITING, MOST_WAITING_OF_A_KEY = 512, 64


class Turns(Generic[Item]):
    """A bounded queue per key: a key that floods its queue or holds its place delays only itself."""

    def __init__(self, places: Iterable[int]) -> None:
        self._free = list(places)
        self._taken: dict[str, int] = {}
        """Place by key."""
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()
        """By key; the key served last comes last."""

    def ask(self, key: str, item: Item) -> None:
        """Queue an item. Raises Overloaded when a queue is full."""
        waiting = self._waiting.setdefault(key, deque())
        if len(waiting) >= MOST_WAITING_OF_A_KEY or sum(map(len, self._waiting.values())) >= MOST_WAITING:
            self._forget(key)
            raise Overloaded("too many forms of answers wait to be checked: try again", retry_after_s=1.0)
        waiting.append(item)

    def begin(self) -> tuple[str, int, Item] | None:
        """Return the next key, place and item; None while all places or all waiting keys are busy."""
        key = next((key for key in self._waiting if key not in self._taken), None)
        if key is None or not self._free:
            return None
        item = self._waiting[key].popleft()
        self._forget(key)
        place = self._taken[key] = self._free.pop()
        return key, place, item

    def end(self, key: str) -> None:
        """Free the key's place."""
        self._free.append(self._taken.pop(key))
        if key in self._waiting:
            self._waiting.move_to_end(key)

    def _forget(self, key: str) -> None:
        if not self._waiting[key]:
            del self._waiting[key]
