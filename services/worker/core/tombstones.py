"""Attempts that must not come back: cancelled, dropped or acknowledged. Pure, bounded in time and number."""

from shared.incarnations import Incarnations
from shared.messages.sequence import SequenceKey, SequenceRef

LONGEST_NAP_S = 1.0
"""Between two ticks at most this much counts as time in which a gateway could have been heard."""


class GatewayWatch:
    """Last sign of life and present incarnation of each gateway that has sequences here or reports itself."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._awake_s = 0.0
        self._ticked_s: float | None = None
        self._heard: dict[str, float] = {}
        self._incarnations = Incarnations()

    def tick(self, now_s: float) -> list[str]:
        """Advance the clock. Returns the gateways that fell silent, each once until it is heard again."""
        if self._ticked_s is not None:
            self._awake_s += min(now_s - self._ticked_s, LONGEST_NAP_S)
        self._ticked_s = now_s
        silent = [name for name, at_s in self._heard.items() if self._awake_s - at_s > self._timeout_s]
        for name in silent:
            del self._heard[name]
        return silent

    def hear(self, gateway_id: str, incarnation: int) -> bool:
        """It reports itself. False when a later start of it is heard of."""
        if not self._incarnations.hear(gateway_id, incarnation, self._awake_s):
            return False
        self._heard[gateway_id] = self._awake_s
        return True

    def expect(self, gateway_id: str, incarnation: int) -> bool:
        """Somebody says that it waits for a sequence: a sign of life, unless another start of it is there."""
        if self._incarnations.is_another(gateway_id, incarnation, self._awake_s):
            return False
        self._heard[gateway_id] = self._awake_s
        return True


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
