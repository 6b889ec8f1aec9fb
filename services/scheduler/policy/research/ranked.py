"""Base of the preemptive policies: each step runs the highest ranks, with blocks for their longest answers.

A running sequence that loses its place pauses with its blocks; if the first waiting one lacks blocks, lower
ranks are preempted. Source: papers/003 §2 (its FastServe and SRTF); algorithms.md §1.
"""

from itertools import islice
from typing import Any

from services.scheduler.policy.batch_builder import BatchBuilder, Job, JobStage
from services.scheduler.policy.contract import PlannedBatch
from services.scheduler.policy.first_come import MaximumPolicy
from services.scheduler.policy.research.foresight import Foreseeing
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class RankedPolicy(MaximumPolicy):
    """Runs the highest ranks. A subclass defines `_rank` and satisfies `contract.BatchPolicy`."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        batch = BatchBuilder(self._table, self._settings)
        self._shed(batch)
        chosen = self._choose(batch)
        for job in chosen:
            self._add_decode(batch, job)
        may_start = True
        for job in chosen:
            if job.task.key in batch.preemptions:
                continue
            if job.stage is JobStage.WAITING:
                may_start = may_start and self._add_start(batch, job)
            else:
                self._add_chunk(batch, job)
        for job in list(self._running):  # fill places that failed starts left
            if batch.budget_tokens > 0 and job.task.key not in batch.decodes:
                self._add_decode(batch, job)
        planned = self._finish(batch)
        self._sort_running()
        return planned

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        super().on_short(key, missing_tokens, now_s)
        self._sort_running()

    def on_prefix_hit(self, key: SequenceKey, cached_tokens: int, now_s: float) -> None:
        super().on_prefix_hit(key, cached_tokens, now_s)
        self._sort_running()

    def _choose(self, batch: BatchBuilder) -> list[Job]:
        """Return the batch's jobs by rank, after making room for the first start."""
        limit = self._settings.max_batch_sequences
        running = [job for job in self._running if job.stage is not JobStage.COMPLETE]
        waiting: list[Job] = []
        if not batch.preemptions and all(
            job.held_blocks >= self._table.maximum_blocks(job) for job in running
        ):
            waiting = list(islice(self._startable(), limit))
        free_blocks = self._table.free_blocks
        may_evict = True
        chosen: list[Job] = []
        while len(chosen) < limit and (running or waiting):
            if not waiting or (running and self._rank(running[0]) < self._rank(waiting[0])):
                may_evict = may_evict and running[0].stage is JobStage.DECODING
                chosen.append(running.pop(0))
                continue
            missing_blocks = self._table.maximum_blocks(waiting[0]) - free_blocks
            if missing_blocks > 0 and not (may_evict and self._make_room(batch, missing_blocks, running)):
                waiting = []
                continue
            chosen.append(waiting.pop(0))
            free_blocks = self._table.free_blocks - sum(
                self._table.maximum_blocks(job) for job in chosen if job.stage is JobStage.WAITING
            )
            may_evict = False
        return chosen

    def _make_room(self, batch: BatchBuilder, missing_blocks: int, outranked: list[Job]) -> bool:
        """Preempt from the end of `outranked` and return True; return False if that cannot suffice, or if
        blocks are about to be free."""
        if missing_blocks <= self._releasing_blocks():
            return False
        if missing_blocks > sum(job.held_blocks for job in outranked):
            return False
        while missing_blocks > 0:
            victim = outranked.pop()
            missing_blocks -= victim.held_blocks
            self._preempt(batch, victim)
        return True


class SrtfPolicy(Foreseeing, RankedPolicy):
    """`srtf`: the shortest predicted remaining time runs first and may preempt."""

    name = "srtf"

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        super().on_predicted(key, prediction, now_s)
        self._sort_running()

    def _rank(self, job: Job) -> Any:
        prefill_tokens = 0
        if job.stage in (JobStage.WAITING, JobStage.PREFILLING):
            prefill_tokens = job.prefill_tokens - job.computed_tokens
        steps = self._length_tokens(job) - job.generated_tokens + prefill_tokens / self._settings.token_budget
        return (job.task.priority, steps, job.task.order)
