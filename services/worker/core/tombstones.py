"""Attempts that must not come back: cancelled, dropped or acknowledged. Pure, bounded in time and number."""

from shared.messages.sequence import SequenceKey, SequenceRef


class Tombstones:
    """The highest buried attempt of each sequence, for `retention_s` after its burial."""

    def __init__(self, retention_s: float, most: int = 65536) -> None:
        self._retention_s = retention_s
        self._most = most
        self._buried: dict[SequenceKey, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._buried)

    def bury(self, ref: SequenceRef, now_s: float) -> None:
        """Remember this attempt and every lower one."""
        attempt, _ = self._buried.pop(ref.key, (0, 0.0))
        self._buried[ref.key] = (max(attempt, ref.attempt), now_s)
        if len(self._buried) > self._most:
            del self._buried[next(iter(self._buried))]

    def covers(self, ref: SequenceRef) -> bool:
        attempt, _ = self._buried.get(ref.key, (0, 0.0))
        return ref.attempt <= attempt

    def expire(self, now_s: float) -> None:
        """Forget what was buried longer ago than the retention; insertion order is burial order."""
        for key, (_, buried_s) in list(self._buried.items()):
            if now_s - buried_s <= self._retention_s:
                break
            del self._buried[key]
