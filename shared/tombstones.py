"""Attempts of sequences that must not come, or come back, each as a word of the gateway that they belong to.

What one gateway has cancelled keeps nothing of another's away, and crowds nothing of another's out. Pure.
"""

from shared.messages.sequence import SequenceKey, SequenceRef
from shared.ttl_map import RecentMap


class Tombstones:
    """For each gateway the highest such attempt of each sequence, for `ttl_s` after it was last put; the
    newest `limit` sequences of each gateway at most."""

    def __init__(self, ttl_s: float, limit: int) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._of: dict[str, RecentMap[SequenceKey, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def put(self, gateway_id: str, ref: SequenceRef, now_s: float) -> None:
        """This attempt and every lower one."""
        attempts = self._of.setdefault(gateway_id, RecentMap(self._ttl_s, self._limit))
        before = attempts.get(ref.key, now_s)
        attempts.put(ref.key, ref.attempt if before is None else max(before, ref.attempt), now_s)

    def covers(self, gateway_id: str, ref: SequenceRef, now_s: float | None = None) -> bool:
        """Whether this attempt of that gateway's sequence may not come. Without `now_s`: as of `expire`."""
        attempts = self._of.get(gateway_id)
        highest = None if attempts is None else attempts.get(ref.key, now_s)
        return highest is not None and ref.attempt <= highest

    def expire(self, now_s: float) -> None:
        """Forget what is too old."""
        for gateway_id, attempts in list(self._of.items()):
            attempts.expire(now_s)
            if not len(attempts):
                del self._of[gateway_id]
