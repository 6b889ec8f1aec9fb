"""Index by integer size that finds the next larger or smaller entry in constant time.

One bucket per size and one bit per bucket. A lookup is a shift and a `bit_length` on an integer with one bit
per possible size. Count sizes in blocks, not bytes. Within a bucket, entries keep insertion order.
"""

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class SizeIndex(Generic[T]):
    """A multiset of (size ≥ 0, thing) that finds the nearest size above or below another."""

    __slots__ = ("_buckets", "_mask")

    def __init__(self) -> None:
        self._buckets: dict[int, dict[T, None]] = {}
        self._mask = 0

    def __bool__(self) -> bool:
        return self._mask != 0

    def __iter__(self) -> Iterator[tuple[int, T]]:
        """Yield (size, thing), ascending by size."""
        for size in sorted(self._buckets):
            for thing in self._buckets[size]:
                yield size, thing

    def add(self, size: int, thing: T) -> None:
        bucket = self._buckets.get(size)
        if bucket is None:
            self._buckets[size] = {thing: None}
            self._mask |= 1 << size
        else:
            bucket[thing] = None

    def remove(self, size: int, thing: T) -> None:
        """Remove an entry. Raises KeyError if `thing` is not indexed under that size."""
        bucket = self._buckets[size]
        del bucket[thing]
        if not bucket:
            del self._buckets[size]
            self._mask &= ~(1 << size)

    def smallest(self) -> int:
        """Return the smallest size, -1 if empty."""
        return (self._mask & -self._mask).bit_length() - 1

    def largest(self) -> int:
        """Return the largest size, -1 if empty."""
        return self._mask.bit_length() - 1

    def ascending(self, least: int, limit: int) -> list[T]:
        """Return up to `limit` things of size at least `least`, smallest first."""
        found: list[T] = []
        size = max(0, least)
        rest = self._mask >> size
        while rest and len(found) < limit:
            size += (rest & -rest).bit_length() - 1
            for thing in self._buckets[size]:
                found.append(thing)
                if len(found) == limit:
                    return found
            size += 1
            rest = self._mask >> size
        return found

    def descending(self, most: int, limit: int) -> list[T]:
        """Return up to `limit` things of size at most `most`, largest first."""
        found: list[T] = []
        rest = self._mask
        if rest.bit_length() > most + 1:
            rest &= (1 << (most + 1)) - 1
        while rest and len(found) < limit:
            size = rest.bit_length() - 1
            for thing in self._buckets[size]:
                found.append(thing)
                if len(found) == limit:
                    return found
            rest &= ~(1 << size)
        return found
