"""What the coupled policies with exact allocation have in common: prompt and answer are one allocation.

A sequence starts where its prompt and its predicted answer fit, and holds all of that from its first chunk
on. One that outgrows its prediction takes blocks as it needs them, and asks for its length anew; where there
are none, the newest gives up its own and is computed again, as with `vllm`. Who starts next is each policy's
own rule: `_candidates`. Source: papers/003 §2 (exact-allocation); algorithms.md §1. Batches are put together
in `first_come.py`.
"""

from services.scheduler.policy.contract import PlannedBatch
from services.scheduler.policy.first_come import Draft
from services.scheduler.policy.foresight import Foreseeing
from services.scheduler.policy.progress import Entry, Stage


class ExactPolicy(Foreseeing):
    """One worker's batches, but for `_candidates`. A subclass fulfils `contract.BatchPolicy`."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        draft = self._draft()
        if not draft.preempted:
            self._admit(draft)
        return self._with_questions(self._commit(draft))

    def _exact_blocks(self, entry: Entry) -> int:
        """What prompt and predicted answer occupy, clamped to what an otherwise empty worker gives."""
        tokens = entry.task.prompt_tokens + self._foresight.length_tokens(entry) - 1
        return min(max(self._blocks(tokens), self._blocks(entry.prefill_tokens)), self._capacity_blocks)

    def _target_blocks(self, entry: Entry, tokens: int) -> int:
        needed = self._blocks(tokens)
        if entry.stage in (Stage.WAITING, Stage.PREFILLING):
            return max(needed, self._exact_blocks(entry))
        return needed

    def _can_start(self, draft: Draft, entry: Entry) -> bool:
        return self._exact_blocks(entry) <= draft.free_blocks
