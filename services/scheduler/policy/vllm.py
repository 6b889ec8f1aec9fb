"""`vllm`: first come, first served, blocks allocated on demand, the newest preempted by recomputation.

A prompt starts only where all of it fits beside what runs; after that blocks are taken one by one, and when
none is left the newest sequence gives up its own. The rival that papers/003 measures against, in its present
chunked form. How batches are put together is in `first_come.py`.
"""

from services.scheduler.policy.contract import PlannedBatch, PolicySettings, WorkerShape
from services.scheduler.policy.first_come import Draft, FirstComePolicy
from services.scheduler.policy.options import read_options
from services.scheduler.policy.progress import Entry


class VllmPolicy(FirstComePolicy):
    """One worker's batches. Implements `contract.BatchPolicy`."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        read_options("vllm", settings.options, {})
        super().__init__(shape, settings)

    def plan(self, now_s: float) -> PlannedBatch | None:
        draft = self._draft()
        if not draft.preempted:
            self._admit(draft)
        return self._commit(draft)

    def _target_blocks(self, entry: Entry, tokens: int) -> int:
        return self._blocks(tokens)

    def _can_start(self, draft: Draft, entry: Entry) -> bool:
        """The headroom is left to those that run, so that a start is not followed by a preemption at
        once."""
        headroom_blocks = self._capacity_blocks // 100 if draft.decodes or draft.prefills else 0
        return self._blocks(entry.prefill_tokens) <= draft.free_blocks - headroom_blocks
