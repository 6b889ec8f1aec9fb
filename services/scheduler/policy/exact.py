"""What the coupled policies with exact allocation have in common: prompt and answer are one allocation.

A sequence starts where its prompt and its predicted answer fit, and holds all of that from its first chunk
on. One that outgrows its prediction takes blocks as it needs them, and asks for its length anew; where there
are none, the newest gives up its own and is computed again, as with `vllm`. Who starts next is each policy's
own rule: `_candidates`. Source: papers/003 §2 (exact-allocation); algorithms.md §1. Batches are put together
in `first_come.py`.
"""

import msgspec

from services.scheduler.policy.contract import Holding, PlannedBatch, PolicySettings, Task, WorkerShape
from services.scheduler.policy.first_come import Draft, FirstComePolicy
from services.scheduler.policy.foresight import Foresight
from services.scheduler.policy.progress import Entry, Stage
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class ExactPolicy(FirstComePolicy):
    """One worker's batches, but for `_candidates`. A subclass fulfils `contract.BatchPolicy`."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._foresight = Foresight()
        super().__init__(shape, settings)

    def on_arrival(self, task: Task, now_s: float) -> None:
        if task.key not in self._entries:
            self._foresight.note_task(task)
            super().on_arrival(task, now_s)

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        if task.key not in self._entries:
            self._foresight.note_task(task)
            super().on_adopted(task, holding, now_s)

    def on_ended(self, key: SequenceKey, now_s: float) -> None:
        super().on_ended(key, now_s)
        self._foresight.forget(key)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        """Whoever waits is looked at anew; whoever runs keeps what it was given."""
        entry = self._entries.get(key)
        if entry is None:
            return
        waits = entry.stage is Stage.WAITING
        if waits:
            self._dequeue(entry)
        self._foresight.note(key, prediction)
        if waits:
            self._enqueue(entry)

    def plan(self, now_s: float) -> PlannedBatch | None:
        draft = self._draft()
        if not draft.preempted:
            self._admit(draft)
        batch = self._commit(draft)
        if batch is None:
            return None
        decoded = (self._entries[item.key] for item in batch.decodes)
        return msgspec.structs.replace(batch, questions=self._foresight.questions(decoded))

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance."""
        super().check_integrity()
        self._foresight.check_integrity(self._entries)

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
