"""A line that stays in order: adding, removing and looking at an end cost the logarithm of its length.

A thin typed wrapper around `sortedcontainers.SortedKeyList`. What stands in a line must keep its key while it
stands there; whoever changes a key takes the item out first. Knows nothing of what the items are.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedKeyList

T = TypeVar("T")


class Line(Generic[T]):
    """A sorted collection of items in the order of `key`, which has to tell any two of them apart."""

    def __init__(self, key: Callable[[T], Any], items: Iterable[T] = ()) -> None:
        self._key = key
        self._items: Any = SortedKeyList(items, key=key)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: T) -> bool:
        return item in self._items

    def add(self, item: T) -> None:
        self._items.add(item)

    def remove(self, item: T) -> None:
        """Raises ValueError when `item` does not stand here (under its present key)."""
        self._items.remove(item)

    def discard(self, item: T) -> None:
        self._items.discard(item)

    def first(self) -> T | None:
        return self._items[0] if self._items else None

    def last(self) -> T | None:
        return self._items[-1] if self._items else None

    def starting_at(self, key: Any) -> Iterator[T]:
        """Items whose key is at least `key`, lowest first. The line must not change meanwhile."""
        return iter(self._items.irange_key(min_key=key))

    def downwards_from(self, key: Any) -> Iterator[T]:
        """Items whose key is at most `key`, highest first. The line must not change meanwhile."""
        return iter(self._items.irange_key(max_key=key, reverse=True))

    def check_integrity(self) -> None:
        """Raises AssertionError when an item's key changed while it stood here."""
        keys = [self._key(item) for item in self._items]
        assert keys == sorted(keys), "out of order"
