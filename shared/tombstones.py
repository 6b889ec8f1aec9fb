"""Attempts that must not start or return, kept per gateway. A gateway's cancellations affect and displace
only its own entries. Pure."""

from shared.messages.sequence import SequenceKey, SequenceRef
from shared.ttl_map import RecentMap


class Tombstones:
    """Highest barred attempt per sequence and gateway, for `ttl_s`. Keeps the newest `limit` sequences of
    each gateway."""

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
