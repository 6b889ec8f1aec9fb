"""Map with expiring entries, bounded in time and number. Pure."""

from typing import Generic, TypeVar

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

    def items(self) -> list[tuple[K, V]]:
        return [(key, value) for key, (value, _) in self._entries.items()]

    def expire(self, now_s: float) -> None:
        """Drop expired entries, which are ordered by age."""
        for key in list(self._entries):
            if now_s - self._entries[key][1] <= self._ttl_s:
                return
            del self._entries[key]
