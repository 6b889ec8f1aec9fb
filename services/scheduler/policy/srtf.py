"""`srtf`: shortest remaining time first by prediction, preemptive, with blocks for the longest answer.

Remaining time is counted in steps: one for each token of the predicted answer that is missing, and what the
prefill still to do takes of a step's token budget. A new or newly predicted sequence that is shorter than
those that run takes the place of the longest. Long answers may wait as long as shorter ones keep coming:
that is the policy, and nothing here softens it. How a batch is filled by rank is in `ranked.py`. Source:
papers/003 §2 (SRTF with max-allocation), algorithms.md §1.
"""

from typing import Any

from services.scheduler.policy.contract import PlannedBatch, PolicySettings, WorkerShape
from services.scheduler.policy.foresight import Foreseeing
from services.scheduler.policy.options import read_options
from services.scheduler.policy.progress import Entry, Stage
from services.scheduler.policy.ranked import RankedPolicy
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class SrtfPolicy(Foreseeing, RankedPolicy):
    """One worker's batches. Implements `contract.BatchPolicy`."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        read_options("srtf", settings.options, {})
        super().__init__(shape, settings)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        super().on_predicted(key, prediction, now_s)
        self._sort_running()

    def plan(self, now_s: float) -> PlannedBatch | None:
        return self._with_questions(super().plan(now_s))

    def _rank(self, entry: Entry) -> Any:
        prefill_tokens = 0
        if entry.stage in (Stage.WAITING, Stage.PREFILLING):
            prefill_tokens = entry.prefill_tokens - entry.computed_tokens
        steps = self._foresight.remaining_tokens(entry) + prefill_tokens / self._settings.token_budget
        return (steps, entry.task.order)
