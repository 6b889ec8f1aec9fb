"""Policies that use predicted answer lengths, above the current length and within the limit.

An answer that outgrew its prediction counts as one token longer than it is; a new one is requested once.
`multires` and `sync_coupled` allocate prompt and predicted answer at once. Source: papers/003 §2.1 and §2.2;
algorithms.md §1.
"""

from collections.abc import Iterator
from itertools import islice
from math import inf, log2
from typing import Any, ClassVar

import msgspec

from services.scheduler.policy.batch_builder import BatchBuilder, Job, JobStage
from services.scheduler.policy.contract import PlannedBatch, PlannedQuestion, PolicySettings, WorkerShape
from services.scheduler.policy.first_come import FirstComePolicy
from services.scheduler.policy.waiting_queue import Line
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
        """Update the prediction; running jobs keep their allocation."""
        self._asked.discard(key)
        self._note_prediction(key, prediction)

    def check_integrity(self) -> None:
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


_ROWS_PER_OCTAVE = 4


class MultiResPolicy(ExactPolicy):
    """`multires`: starts the sequence whose demand is closest to the free resources, in compute and KV.

    A demand is (prompt tokens this step may compute, blocks of prompt and predicted answer), as shares.
    Waiting sequences stand in rows of similar prompt length, by blocks; the closest of a row is the largest
    that fits.
    """

    name = "multires"

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._rows: dict[tuple[int, int], Line[SequenceKey]] = {}
        """Waiting sequences that can fit, by priority and the logarithm of their prompt."""
        self._places: dict[SequenceKey, tuple[Any, ...]] = {}
        """(row, negative block demand, arrival, key) of each of them."""
        super().__init__(shape, settings)

    def check_integrity(self) -> None:
        super().check_integrity()
        startable = {job.task.key for job in self._startable()}
        assert self._places.keys() == startable
        assert sum(len(row) for row in self._rows.values()) == len(startable)
        for number, row in self._rows.items():
            row.check_integrity()
            assert len(row) and all(self._places[key][0] == number for key in row)

    def _enqueue(self, job: Job) -> None:
        super()._enqueue(job)
        if self._table.is_oversized(job):
            return
        number = (job.task.priority, int(log2(max(1, job.prefill_tokens)) * _ROWS_PER_OCTAVE))
        key = job.task.key
        self._places[key] = (number, -self._exact_blocks(job), *job.task.order)
        self._rows.setdefault(number, Line(self._in_row)).add(key)

    def _dequeue(self, job: Job) -> None:
        super()._dequeue(job)
        key = job.task.key
        if key in self._places:
            row = self._rows[self._places[key][0]]
            row.remove(key)
            if not len(row):
                del self._rows[self._places[key][0]]
            del self._places[key]

    def _in_row(self, key: SequenceKey) -> Any:
        return self._places[key][1:]

    def _candidates(self, batch: BatchBuilder) -> Iterator[Job]:
        job = self._closest(batch)
        while job is not None:
            yield job
            job = self._closest(batch)

    def _closest(self, batch: BatchBuilder) -> Job | None:
        best: Job | None = None
        least: tuple[int, float, Any] = (0, inf, None)
        for row in self._rows.values():
            for key in row.irange_key((-self._table.free_blocks,)):
                if key in batch.prefills:
                    continue
                job = self._table.jobs[key]
                found = (job.task.priority, self._distance(batch, job), job.task.order)
                if found[1] < inf and (best is None or found < least):
                    best, least = job, found
                break
        return best

    def _distance(self, batch: BatchBuilder, job: Job) -> float:
        """Return the squared distance in shares of budget and capacity; infinite if it does not fit."""
        tokens = batch.chunk_tokens(job)
        if tokens == 0:
            return inf
        budget_share = max(0, batch.budget_tokens - tokens) / self._settings.token_budget
        blocks_share = (self._table.free_blocks - self._exact_blocks(job)) / self._table.capacity_blocks
        return float(budget_share**2 + blocks_share**2)


class SyncCoupledPolicy(ExactPolicy):
    """`sync_coupled`: waiting sequences stand in groups by predicted length; one group starts at a time.

    That of the earliest arrival goes first, as many members as fit; no other starts before it is done."""

    name = "sync_coupled"
    defaults: ClassVar[dict[str, int]] = {"group_tokens": 32}

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._groups: dict[tuple[int, int], Line[Job]] = {}
        """Waiting sequences that can fit, by priority and predicted length."""
        self._numbers: dict[SequenceKey, tuple[int, int]] = {}
        """Group of each of them."""
        self._heads: Line[tuple[int, int]] = Line(self._head_order)
        """Groups by their earliest arrival."""
        self._chosen: list[SequenceKey] = []
        """Members of the latest group that have not started, in order."""
        super().__init__(shape, settings)
        self._group_tokens = int(self._options["group_tokens"])

    def check_integrity(self) -> None:
        super().check_integrity()
        startable = {job.task.key for job in self._startable()}
        assert self._numbers.keys() == startable >= set(self._chosen)
        assert sum(len(group) for group in self._groups.values()) == len(startable)
        assert sorted(self._heads) == sorted(self._groups)
        self._heads.check_integrity()

    def _head_order(self, number: tuple[int, int]) -> Any:
        first = self._groups[number].first()
        assert first is not None
        return first.task.order

    def _enqueue(self, job: Job) -> None:
        super()._enqueue(job)
        if self._table.is_oversized(job):
            return
        length = -(-(self._length_tokens(job) - job.generated_tokens) // self._group_tokens)
        number = (job.task.priority, length)
        if number in self._groups:
            self._heads.remove(number)
        self._groups.setdefault(number, Line(self._rank)).add(job)
        self._heads.add(number)
        self._numbers[job.task.key] = number

    def _dequeue(self, job: Job) -> None:
        super()._dequeue(job)
        number = self._numbers.pop(job.task.key, None)
        if number is None:
            return
        if job.task.key in self._chosen:
            self._chosen.remove(job.task.key)
        self._heads.remove(number)
        self._groups[number].remove(job)
        if len(self._groups[number]):
            self._heads.add(number)
        else:
            del self._groups[number]

    def _candidates(self, batch: BatchBuilder) -> Iterator[Job]:
        """Yield the rest of the latest group, then others, until one does not fit, lower priorities first."""
        head = self._heads.first()
        if self._chosen and head is not None and head[0] < self._numbers[self._chosen[0]][0]:
            self._chosen.clear()
        for key in list(self._chosen):
            yield self._table.jobs[key]
        for number in list(self._heads):
            most = len(batch.prefills) + self._settings.max_batch_sequences + 1
            first = list(islice(self._groups[number], most))
            open_to = [job for job in first if job.task.key not in batch.prefills]
            members = self._fitting(batch, open_to)
            self._chosen += [job.task.key for job in members]
            yield from members
            if len(members) < len(open_to):
                return

    def _fitting(self, batch: BatchBuilder, group: list[Job]) -> list[Job]:
        """Return the first members that fit the free blocks and the batch."""
        free_blocks = self._table.free_blocks
        running = sum(job.missing_tokens > 0 for job in self._running)
        starting = sum(self._table.jobs[key].stage is JobStage.WAITING for key in batch.prefills)
        places = self._settings.max_batch_sequences - running - starting
        members: list[Job] = []
        for job in group:
            free_blocks -= self._exact_blocks(job)
            if free_blocks < 0 or len(members) >= places:
                break
            members.append(job)
        return members
