"""Which shards a scheduler should lead, from the heartbeats of all. Pure; `now_s` is passed in."""

from collections.abc import Collection, Sequence

from shared.messages.reports import SchedulerPresent

_PRESENT_S = 2.0
"""Seconds for which a heartbeat is valid."""
_REST_S = 5.0
"""Seconds for which others may take a shard that was given back."""
_NEVER_S = float("inf")


def surplus(mine: int, others: Sequence[int], shards: int) -> int:
    """Return how many of its `mine` shards an instance gives back; 0 unless another has two fewer."""
    if not others or mine - min(others) < 2:
        return 0
    return max(1, mine - -(-shards // (1 + len(others))))


class FairShare:
    """The heartbeats of the other schedulers, and what follows for this one."""

    def __init__(self, shards: int, now_s: float) -> None:
        self._shards = shards
        self._others: dict[str, tuple[SchedulerPresent, float]] = {}
        self._given_s: dict[int, float] = {}
        """When this instance gave back each shard."""
        self._began_s = self._gave_s = now_s

    def hear(self, event: SchedulerPresent, now_s: float) -> None:
        if event.scheduler_id not in self._others:  # it takes nothing until it has heard the others
            self._gave_s = max(self._gave_s, now_s - _REST_S + 0.75 * _PRESENT_S)
        self._others[event.scheduler_id] = event, now_s

    def forget(self, instance: str, incarnation: int) -> None:
        """Remove an instance that left the bus."""
        if instance in self._others and self._others[instance][0].incarnation <= incarnation:
            del self._others[instance]

    def present(self, now_s: float) -> list[SchedulerPresent]:
        """Return the latest heartbeats of the others."""
        self._others = {name: heard for name, heard in self._others.items() if now_s - heard[1] <= _PRESENT_S}
        return [event for event, _ in self._others.values()]

    def objection(self, now_s: float) -> str:
        """Return why this instance leads nothing, or ""."""
        most = max(self.present(now_s), key=lambda each: each.shards, default=None)
        if most is None or most.shards <= self._shards:
            return ""
        return (
            f"{most.scheduler_id} has scheduler.shards={most.shards}, this one {self._shards}: it stands by;"
            " give all schedulers the same number"
        )

    def holders(self, now_s: float) -> dict[int, str]:
        """Return the other leader of each shard that has one."""
        return {shard: each.scheduler_id for each in self._peers(now_s) for shard in each.held}

    def patience_s(self, shard: int, mine: int, now_s: float, ttl_s: float) -> float:
        """Return how long to leave a free shard to others, which have fewer."""
        if self.objection(now_s):
            return _NEVER_S
        if self._shards == 1:
            return 0.0
        peers = self._peers(now_s)
        if now_s - self._began_s < _PRESENT_S / 2:
            return _NEVER_S  # the others have not been heard yet
        if now_s - self._given_s.get(shard, -_NEVER_S) < _REST_S:
            return _REST_S
        return ttl_s if mine >= -(-self._shards // (1 + len(peers))) else 0.0

    def give_back(self, mine: Collection[int], now_s: float) -> list[int]:
        """Return the shards to give back now: all where another has more shards configured."""
        if self.objection(now_s):
            return list(mine)
        if now_s - self._gave_s < _REST_S:
            return []
        count = surplus(len(mine), [len(each.held) for each in self._peers(now_s)], self._shards)
        given = sorted(mine)[len(mine) - count :]
        if given:
            self._gave_s = now_s
            self._given_s |= dict.fromkeys(given, now_s)
        return given

    def _peers(self, now_s: float) -> list[SchedulerPresent]:
        return [each for each in self.present(now_s) if each.shards == self._shards]
