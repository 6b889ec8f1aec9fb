"""Bases of policies that use predicted answer lengths, above the current length and within the limit.

An answer that outgrew its prediction counts as one token longer than it is; a new one is requested once.
"""

import msgspec

from services.scheduler.policy.batch_builder import BatchBuilder, Job, JobStage
from services.scheduler.policy.contract import PlannedBatch, PlannedQuestion, PolicySettings, WorkerShape
from services.scheduler.policy.first_come import FirstComePolicy
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class Foreseeing(FirstComePolicy):
    """A policy in one order that tracks predicted lengths and asks about outgrown ones."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._asked: set[SequenceKey] = set()
        super().__init__(shape, settings)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        super().on_ended(key, now_s, answer_tokens)
        self._asked.discard(key)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        """Update the prediction; waiting jobs are ranked again, running ones keep their allocation."""
        job = self._table.jobs.get(key)
        if job is None:
            return
        waits = job.stage is JobStage.WAITING
        if waits:
            self._dequeue(job)
        job.prediction = prediction
        self._asked.discard(key)
        if waits:
            self._enqueue(job)

    def check_integrity(self) -> None:
        """Raises AssertionError when the accounts do not balance."""
        super().check_integrity()
        assert self._asked <= self._table.jobs.keys()

    def plan(self, now_s: float) -> PlannedBatch | None:
        """Return the next batch with questions about outgrown predictions."""
        batch = super().plan(now_s)
        questions = []
        for item in () if batch is None else batch.decodes:
            job = self._table.jobs[item.key]
            predicted = None if job.prediction is None else job.prediction.rl_tokens
            outgrown = predicted is not None and predicted <= job.generated_tokens < job.task.max_tokens
            if outgrown and item.key not in self._asked:
                self._asked.add(item.key)
                questions.append(PlannedQuestion(item.key, job.generated_tokens))
        return batch and msgspec.structs.replace(batch, questions=tuple(questions))

    def _length_tokens(self, job: Job) -> int:
        """Return the expected length of the whole answer; without a prediction the limit."""
        limit = job.task.max_tokens
        predicted = limit if job.prediction is None else job.prediction.rl_tokens
        return min(max(predicted, job.generated_tokens + 1), limit)


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
        tokens = job.task.prompt_tokens + self._length_tokens(job) - 1
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
