"""Sequences between shards: which waiting ones another shard should take, and how loaded each is. Pure.

A sequence goes to another shard if placement names a worker there, which has its prefix cached; if this
shard's workers are full while another has room and no queue; or if no worker here can hold it. It goes at
most once, unless its shard has lost all workers.
"""

from collections.abc import Mapping

from services.scheduler.core.effects import Effect
from services.scheduler.core.long_waits import gathers_from_s
from services.scheduler.core.roster import Roster
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.worker_pipeline import Sync
from shared.messages.reports import ShardLoad
from shared.messages.values import as_count
from shared.shards import Shard, shard_of

_HEARD_S = 1.5
"""Seconds for which an announced load is valid."""
_MOST_HEADS = 64
"""Maximum number of sequences handed over in one tick."""
_ALIKE_S = 0.5
"""Waits that differ by less are as long as each other, since what is announced is somewhat older."""
WITHOUT_WORKERS_S = 1.0
"""Seconds without a worker after which a shard hands over all that waits."""


class Sharing:
    """Hands waiting sequences of one model to other shards, as far as they have announced room."""

    def __init__(self, roster: Roster, shard: Shard, now_s: float) -> None:
        self._roster, self._shard = roster, shard
        self._others: dict[int, tuple[ShardLoad, float]] = {}
        """Load of each other shard, and when it was announced."""
        self._room_tokens: dict[int, int] = {}
        """Room that is left of it for this shard."""
        self._with_workers_s = now_s

    def on_load(self, shard: int, load: ShardLoad, now_s: float) -> None:
        """Note what another shard's leader has announced. Shards with a queue divide the room."""
        self._others[shard] = load, now_s
        rivals = sum(other.queued > 0 for number, (other, _) in self._others.items() if number != shard)
        self._room_tokens[shard] = load.room_tokens // (1 + rivals)

    def may_gather(self, now_s: float) -> bool:
        """Return whether this shard has waited longest for other workers' memory. Of two that each hold a
        part of what there is, neither would ever have enough."""
        own_s = self._gathers_s(now_s)
        for shard, (load, at_s) in self._others.items():
            longer_s = load.gathers_s + now_s - at_s - own_s
            is_first = longer_s > _ALIKE_S or (longer_s > -_ALIKE_S and shard < self._shard.number)
            if load.gathers_s and now_s - at_s < _HEARD_S and is_first:
                return False
        return True

    def _gathers_s(self, now_s: float) -> float:
        from_s = gathers_from_s(self._roster)
        return 0.0 if from_s is None else max(now_s - from_s, 0.001)

    def load(self, now_s: float) -> ShardLoad:
        """Return this shard's load."""
        roster = self._roster
        ready = [one for one in roster.pipelines.values() if one.sync is Sync.IN_STEP]
        room_tokens = 0
        if not roster.backlog:
            for one in ready:
                here = sum(each.likely_tokens for each in roster.of_worker(one.worker_id))
                room_tokens += max(0, one.lasting_blocks * one.report.block_tokens - here)
        return ShardLoad(
            workers=len(ready),
            queued=len(roster.backlog),
            running=len(roster.sequences) - len(roster.backlog),
            room_tokens=as_count(room_tokens),
            context_tokens=max((one.report.max_context_tokens for one in ready), default=0),
            gathers_s=self._gathers_s(now_s),
        )

    def follow(self, sequence: Sequence, worker_id: str | None, now_s: float) -> list[Effect]:
        """Hand a sequence to the shard of the worker that placement named, unless it is this one's."""
        if worker_id is None or self._shard.has(worker_id) or sequence.is_bound:
            return []
        return self._roster.hand_over(sequence, shard_of(worker_id, self._shard.count), now_s)

    def on_tick(self, now_s: float) -> list[Effect]:
        """Hand over the heads of the queue that find a place only elsewhere."""
        roster = self._roster
        if len(roster.unready) < len(roster.pipelines):
            self._with_workers_s = now_s
        is_bare = now_s - self._with_workers_s > WITHOUT_WORKERS_S
        if not roster.backlog or not (is_bare or roster.backlog.is_stuck(now_s)):
            return []
        others = {
            shard: load
            for shard, (load, at_s) in self._others.items()
            if load.workers and now_s - at_s < _HEARD_S
        }
        effects: list[Effect] = []
        longest = roster.summary()[0] or 0
        for sequence in roster.backlog.first(_MOST_HEADS) if others else ():
            shard = self._target(sequence, others, may_crowd=is_bare or sequence.limit_tokens > longest)
            if shard is not None and (is_bare or not (sequence.is_bound or sequence.runs_alone)):
                self._room_tokens[shard] -= sequence.likely_tokens
                effects += roster.hand_over(sequence, shard, now_s)
        return effects

    def _target(self, sequence: Sequence, others: Mapping[int, ShardLoad], *, may_crowd: bool) -> int | None:
        """Return the shard with most room for each worker, or None. `may_crowd`: it may wait there."""
        able = [
            shard
            for shard, load in others.items()
            if sequence.limit_tokens <= load.context_tokens
            and (may_crowd or sequence.likely_tokens <= self._room_tokens[shard])
        ]
        return max(able, key=lambda each: self._room_tokens[each] / others[each].workers, default=None)
