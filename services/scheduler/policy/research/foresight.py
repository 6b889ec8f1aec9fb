"""Predicted answer lengths for policies: always above the current length, never above the limit.

Without a prediction the limit counts. An answer that outgrew its prediction counts as one token longer than
it is, and a new prediction is requested once. `Foreseeing` adds this to a policy's events.
"""

from collections.abc import Iterable

import msgspec

from services.scheduler.policy.batch_builder import BatchBuilder, Job, JobStage
from services.scheduler.policy.contract import (
    Holding,
    PlannedBatch,
    PlannedQuestion,
    PolicySettings,
    Task,
    WorkerShape,
)
from services.scheduler.policy.first_come import FirstComePolicy
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class Foresight:
    """Latest prediction of each sequence of one worker."""

    def __init__(self) -> None:
        self._length_tokens: dict[SequenceKey, int] = {}
        self._asked: set[SequenceKey] = set()

    def note_task(self, task: Task) -> None:
        """Record the task's own prediction."""
        if task.prediction is not None:
            self.note(task.key, task.prediction)

    def note(self, key: SequenceKey, prediction: LengthPrediction) -> None:
        self._length_tokens[key] = prediction.rl_tokens
        self._asked.discard(key)

    def forget(self, key: SequenceKey) -> None:
        self._length_tokens.pop(key, None)
        self._asked.discard(key)

    def length_tokens(self, job: Job) -> int:
        """Return the whole answer's length: above the current one, at most the limit."""
        limit = job.task.max_tokens
        predicted = self._length_tokens.get(job.task.key, limit)
        return min(max(predicted, job.generated_tokens + 1), limit)

    def remaining_tokens(self, job: Job) -> int:
        return self.length_tokens(job) - job.generated_tokens

    def questions(self, jobs: Iterable[Job]) -> tuple[PlannedQuestion, ...]:
        """Return questions about answers that reached their predicted length."""
        asked = []
        for job in jobs:
            key = job.task.key
            predicted = self._length_tokens.get(key)
            outgrown = predicted is not None and predicted <= job.generated_tokens < job.task.max_tokens
            if outgrown and key not in self._asked:
                self._asked.add(key)
                asked.append(PlannedQuestion(key, job.generated_tokens))
        return tuple(asked)

    def check_integrity(self, known: Iterable[SequenceKey]) -> None:
        """Raises AssertionError when it remembers removed sequences."""
        assert self._asked <= self._length_tokens.keys() <= set(known)


class Foreseeing(FirstComePolicy):
    """A policy in one order that tracks predicted lengths and asks about outgrown ones."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._foresight = Foresight()
        super().__init__(shape, settings)

    def on_arrival(self, task: Task, now_s: float) -> None:
        if task.key not in self._table.jobs:
            self._foresight.note_task(task)
            super().on_arrival(task, now_s)

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        if task.key not in self._table.jobs:
            self._foresight.note_task(task)
            super().on_adopted(task, holding, now_s)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        super().on_ended(key, now_s, answer_tokens)
        self._foresight.forget(key)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        """Update the prediction; waiting jobs are ranked again, running ones keep their allocation."""
        job = self._table.jobs.get(key)
        if job is None:
            return
        waits = job.stage is JobStage.WAITING
        if waits:
            self._dequeue(job)
        self._foresight.note(key, prediction)
        if waits:
            self._enqueue(job)

    def check_integrity(self) -> None:
        """Raises AssertionError when the accounts do not balance."""
        super().check_integrity()
        self._foresight.check_integrity(self._table.jobs)

    def plan(self, now_s: float) -> PlannedBatch | None:
        """Return the next batch with questions about outgrown predictions."""
        batch = super().plan(now_s)
        if batch is None:
            return None
        decoded = (self._table.jobs[item.key] for item in batch.decodes)
        return msgspec.structs.replace(batch, questions=self._foresight.questions(decoded))


class ExactPolicy(Foreseeing):
    """Allocates prompt and predicted answer at once. A subclass defines the order (`_candidates`)."""

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        """Set the capacity and re-sort waiting jobs, whose clamped demands changed."""
        waiting = list(self._waiting)
        for job in waiting:
            self._dequeue(job)
        super().on_resized(capacity_blocks, now_s)
        for job in waiting:
            self._enqueue(job)

    def _exact_blocks(self, job: Job) -> int:
        """Return the blocks of prompt and predicted answer, at most the capacity."""
        tokens = job.task.prompt_tokens + self._foresight.length_tokens(job) - 1
        return min(
            max(self._table.blocks_for(tokens), self._table.blocks_for(job.prefill_tokens)),
            self._table.capacity_blocks,
        )

    def _target_blocks(self, job: Job, tokens: int) -> int:
        needed = super()._target_blocks(job, tokens)
        if job.stage in (JobStage.WAITING, JobStage.PREFILLING):
            return max(needed, self._exact_blocks(job))
        return needed

    def _can_start(self, batch: BatchBuilder, job: Job) -> bool:
        return self._exact_blocks(job) <= self._table.free_blocks
