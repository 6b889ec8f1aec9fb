"""Watches for work that waits where nothing moves: no policy, pool or loan should bring that about. Pure.

Only the scheduler sees both. A worker moves while plans are out or being made for it, however slow its steps
are; a hung engine is the pipeline's affair (`outstanding`). What needs more than its worker's own memory, and
what has no worker yet, waits for others with good reason: that counts where nothing moves anywhere. Mends
nothing.
"""

from services.scheduler.core.effects import Effect, NoteStandstill
from services.scheduler.core.roster import Roster, is_deprived
from services.scheduler.core.worker_pipeline import WorkerPipeline

STANDSTILL_S = 15.0
"""As long as a pipeline waits for a plan's next step before it asks what is the matter."""
_LOOK_S = 1.0
_REPEAT_S = 60.0
ANYWHERE = "anywhere"


class Standstill:
    """One term's. Places are worker ids, and `ANYWHERE`."""

    def __init__(self, roster: Roster, now_s: float) -> None:
        self._roster = roster
        self._looked_s = self._noted_s = now_s
        self._since_s: dict[str, float] = {}

    def still_s(self, now_s: float) -> float:
        """For so long something has waited where nothing moved; 0 where that is not long enough to say so."""
        longest_s = max((now_s - since_s for since_s in self._since_s.values()), default=0.0)
        return longest_s if longest_s >= STANDSTILL_S else 0.0

    def on_tick(self, now_s: float) -> list[Effect]:
        """Says so when it begins, and once a minute."""
        if now_s - self._looked_s < _LOOK_S:
            return []
        was_still = self.still_s(self._looked_s) > 0
        moving = {
            pipeline.worker_id for pipeline in self._roster.pipelines.values() if self._has_moved(pipeline)
        }
        waiting = self._waiting()
        self._since_s = {
            place: self._since_s.get(place, now_s)
            for place in waiting
            if (not moving if place == ANYWHERE else place not in moving)
        }
        self._looked_s = now_s
        if not self.still_s(now_s) or (was_still and now_s - self._noted_s < _REPEAT_S):
            return []
        self._noted_s = now_s
        return [
            NoteStandstill(place, waiting[place], now_s - since_s)
            for place, since_s in self._since_s.items()
            if now_s - since_s >= STANDSTILL_S
        ]

    def _has_moved(self, pipeline: WorkerPipeline) -> bool:
        """Since the last look."""
        return pipeline.outstanding_steps > 0 or pipeline.planned_s > self._looked_s

    def _waiting(self) -> dict[str, int]:
        """Sequences by where something must move for them."""
        counts: dict[str, int] = {}
        for sequence in self._roster.sequences.values():
            pipeline = self._roster.pipelines.get(sequence.worker_id or "")
            place = ANYWHERE
            if pipeline is not None:
                blocks = -(-sequence.limit_tokens // pipeline.report.block_tokens)
                place = ANYWHERE if is_deprived(blocks, pipeline.report.capacity) else pipeline.worker_id
            counts[place] = counts.get(place, 0) + 1
        return counts
