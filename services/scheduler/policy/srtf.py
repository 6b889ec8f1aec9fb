"""`srtf`: shortest remaining time first by prediction, preemptive, with blocks for the longest answer.

Remaining time is counted in steps: one for each token of the predicted answer that is missing, and what the
prefill still to do takes of a step's token budget. A new or newly predicted sequence that is shorter than
those that run takes the place of the longest. Long answers may wait as long as shorter ones keep coming:
that is the policy, and nothing here softens it. How a batch is filled by rank is in `ranked.py`. Source:
papers/003 §2 (SRTF with max-allocation), algorithms.md §1.
"""

from typing import Any

import msgspec

from services.scheduler.policy.contract import Holding, PlannedBatch, PolicySettings, Task, WorkerShape
from services.scheduler.policy.foresight import Foresight
from services.scheduler.policy.options import read_options
from services.scheduler.policy.progress import Entry, Stage
from services.scheduler.policy.ranked import RankedPolicy
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class SrtfPolicy(RankedPolicy):
    """One worker's batches. Implements `contract.BatchPolicy`."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        read_options("srtf", settings.options, {})
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
        entry = self._entries.get(key)
        if entry is None:
            return
        waits = entry.stage is Stage.WAITING
        if waits:
            self._dequeue(entry)
        self._foresight.note(key, prediction)
        if waits:
            self._enqueue(entry)
        self._sort_running()

    def plan(self, now_s: float) -> PlannedBatch | None:
        batch = super().plan(now_s)
        if batch is None:
            return None
        decoded = (self._entries[item.key] for item in batch.decodes)
        return msgspec.structs.replace(batch, questions=self._foresight.questions(decoded))

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance."""
        super().check_integrity()
        self._foresight.check_integrity(self._entries)

    def _rank(self, entry: Entry) -> Any:
        prefill_tokens = 0
        if entry.stage in (Stage.WAITING, Stage.PREFILLING):
            prefill_tokens = entry.prefill_tokens - entry.computed_tokens
        steps = self._foresight.remaining_tokens(entry) + prefill_tokens / self._settings.token_budget
        return (steps, entry.task.order)
