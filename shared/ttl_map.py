"""Maps whose entries expire, bounded in time and number. Pure."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from shared.messages.sequence import SequenceKey, SequenceRef

K = TypeVar("K")
V = TypeVar("V")


class RecentMap(Generic[K, V]):
    """Keeps each entry for `ttl_s` after its last `put`, and only the newest `limit` entries."""

    def __init__(self, ttl_s: float, limit: int) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._entries: dict[K, tuple[V, float]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V, now_s: float) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (value, now_s)
        if len(self._entries) > self._limit:
            del self._entries[next(iter(self._entries))]

    def get(self, key: K, now_s: float | None = None) -> V | None:
        """Return the value unless it has expired. Without `now_s`, ignore its age."""
        entry = self._entries.get(key)
        if entry is None or (now_s is not None and now_s - entry[1] > self._ttl_s):
            return None
        return entry[0]

    def pop(self, key: K) -> None:
        """Remove the entry if it exists."""
        self._entries.pop(key, None)

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def items(self) -> list[tuple[K, V]]:
        return [(key, value) for key, (value, _) in self._entries.items()]

    def expire(self, now_s: float) -> None:
        """Drop expired entries, which are ordered by age."""
        for key in list(self._entries):
            if now_s - self._entries[key][1] <= self._ttl_s:
                return
            del self._entries[key]


class Tombstones:
    """Attempts that must not start or return: the highest per sequence and gateway, for `ttl_s`. A gateway's
    cancellations affect and displace only its own entries, of which the newest `limit` are kept."""

    def __init__(self, ttl_s: float, limit: int) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._of: dict[str, RecentMap[SequenceKey, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def put(self, gateway_id: str, ref: SequenceRef, now_s: float) -> None:
        """Bar this attempt and all lower ones."""
        attempts = self._of.setdefault(gateway_id, RecentMap(self._ttl_s, self._limit))
        before = attempts.get(ref.key, now_s)
        attempts.put(ref.key, ref.attempt if before is None else max(before, ref.attempt), now_s)

    def covers(self, gateway_id: str, ref: SequenceRef, now_s: float | None = None) -> bool:
        """Return True if this attempt is barred. Without `now_s`, as of the last `expire`."""
        attempts = self._of.get(gateway_id)
        highest = None if attempts is None else attempts.get(ref.key, now_s)
        return highest is not None and ref.attempt <= highest

    def expire(self, now_s: float) -> None:
        """Drop expired entries."""
        for gateway_id, attempts in list(self._of.items()):
            attempts.expire(now_s)
            if not len(attempts):
                del self._of[gateway_id]
