"""The job table of one worker and the builder of one batch, shared by all policies.

A job is a task and its projected progress: `held_blocks` are in use, `own_blocks` are reserved for the job,
and `hosted_blocks` are lent by another job (EcoServe). The capacity limits the sum of `own_blocks`.

    capacity 10:  a holds 3, owns 5   b holds 4, owns 2, is hosted 2 by a   → free: 10 − 5 − 2 = 3
    budget 16:  decodes of a and b → 14 are left;  b is preempted → 15;  a prompt of 40 is cut to [0, 15)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from operator import attrgetter
from typing import Any

from services.scheduler.policy.contract import (
    Holding,
    PlannedBatch,
    PlannedDecode,
    PlannedPreemption,
    PlannedPrefill,
    PlannedQuestion,
    PolicySettings,
    Task,
    WorkerShape,
)
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class JobStage(StrEnum):
    WAITING = "waiting"
    """Holds nothing at the worker."""
    PREFILLING = "prefilling"
    """Partly prefilled, or holding blocks for prefill."""
    READY = "ready"
    """Prefilled and not running: new, adopted, or paused with its KV."""
    DECODING = "decoding"
    COMPLETE = "complete"
    """Planned to its limit; keeps its blocks until the end is confirmed."""


@dataclass(slots=True, eq=False)
class Job:
    """Projected progress of one task, and the notes of policies that plan by predicted length."""

    task: Task
    generated_tokens: int
    prediction: LengthPrediction | None = None
    first_prediction: LengthPrediction | None = None
    stage: JobStage = JobStage.WAITING
    computed_tokens: int = 0
    held_blocks: int = 0
    own_blocks: int = 0
    hosted_blocks: int = 0
    deadline_s: float = inf
    due_s: float = inf
    """Time that the slack classes of its queue count down to."""
    rest_tokens: int = 0
    """Padded remaining tokens, as of its last queueing or prediction."""
    end_tokens: int = 0
    """Tokens of KV at its expected end, for a running job."""
    rank: tuple[Any, ...] = ()
    """Sort key in its queue; its last parts make it unique."""
    slack_class: int = 0
    queued_as: int = 0
    """Number of its stay in a queue; it invalidates clock events of earlier stays."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens to compute before it decodes: the prompt and the answer so far."""
        return self.task.prompt_tokens + self.generated_tokens

    @property
    def missing_tokens(self) -> int:
        """Answer tokens up to the limit."""
        return self.task.max_tokens - self.generated_tokens

    @property
    def reserved_blocks(self) -> int:
        """Blocks up to which it may grow without asking again."""
        return self.own_blocks + self.hosted_blocks

    @property
    def is_prompt(self) -> bool:
        """Whether its prefill is not complete."""
        return self.stage in (JobStage.WAITING, JobStage.PREFILLING)


arrival_rank: Callable[[Job], tuple[Any, ...]] = attrgetter("task.order")
"""Key for first come, first served."""


class JobTable:
    """Jobs of one worker by key, and the sums of their blocks."""

    def __init__(self, shape: WorkerShape) -> None:
        self.block_tokens = shape.block_tokens
        self.capacity_blocks = shape.capacity_blocks
        self.jobs: dict[SequenceKey, Job] = {}
        self.held_blocks = self.own_blocks = 0
        self.changed = True
        """Whether a start may have become possible; the reader clears it."""

    @property
    def free_blocks(self) -> int:
        """Unreserved blocks. Negative after the worker shrank, until jobs give up blocks."""
        return self.capacity_blocks - self.own_blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def maximum_blocks(self, job: Job) -> int:
        """Return the blocks of its longest answer, at most the capacity; an adopted job may exceed that."""
        return min(self.blocks_for(job.task.limit_tokens), self.capacity_blocks)

    def is_oversized(self, job: Job) -> bool:
        """Return whether the job cannot end at the worker's present size."""
        return self.blocks_for(job.task.limit_tokens) > self.capacity_blocks

    def add(self, task: Task, holding: Holding | None = None) -> Job | None:
        """Add a job with the blocks it holds, READY or COMPLETE if decoding; None if the key is known."""
        if task.key in self.jobs:
            return None
        job = self.jobs[task.key] = Job(task, task.generated_tokens, task.prediction, task.prediction)
        if holding is not None:
            job.computed_tokens = holding.computed_tokens
            self.hold(job, holding.allocated_blocks)
            if holding.decoding:
                job.stage = JobStage.READY if job.missing_tokens > 0 else JobStage.COMPLETE
            elif holding.computed_tokens or holding.allocated_blocks:
                job.stage = JobStage.PREFILLING
        return job

    def remove(self, job: Job) -> None:
        """Remove an ended job and free its blocks."""
        self.clear(job)
        del self.jobs[job.task.key]

    def clear(self, job: Job) -> None:
        """Free all blocks of a job; its tokens must be computed again."""
        self.held_blocks -= job.held_blocks
        job.held_blocks = job.computed_tokens = 0
        self.set_own(job, 0)
        job.stage = JobStage.WAITING

    def set_own(self, job: Job, blocks: int) -> None:
        """Reserve exactly `blocks` for the job."""
        self.own_blocks += blocks - job.own_blocks
        self.changed = self.changed or blocks < job.own_blocks
        job.own_blocks = blocks

    def hold(self, job: Job, blocks: int) -> None:
        """Hold exactly `blocks`; what is not hosted becomes its own."""
        self.held_blocks += blocks - job.held_blocks
        job.held_blocks = blocks
        if job.reserved_blocks < blocks:
            self.set_own(job, blocks - job.hosted_blocks)

    def finish_chunk(self, job: Job, end_tokens: int) -> None:
        """Apply a prefill up to `end_tokens`; the last chunk yields the first token."""
        is_last = end_tokens == job.prefill_tokens
        job.computed_tokens = end_tokens
        if is_last:
            job.generated_tokens += 1
            job.stage = JobStage.DECODING if job.missing_tokens > 0 else JobStage.COMPLETE

    def finish_decodes(
        self, jobs: Mapping[SequenceKey, Job], steps: int
    ) -> tuple[list[PlannedDecode], list[Job]]:
        """Decode up to `steps` tokens per job; return the decodes and the jobs at their limit. A hot path."""
        planned: list[PlannedDecode] = []
        complete: list[Job] = []
        size = self.block_tokens
        for key, job in jobs.items():
            tokens = job.task.max_tokens - job.generated_tokens
            if tokens > steps:
                tokens = steps
            else:
                job.stage = JobStage.COMPLETE
                complete.append(job)
            job.generated_tokens += tokens
            computed_tokens = job.computed_tokens = job.computed_tokens + tokens
            held_blocks = job.held_blocks
            if computed_tokens > held_blocks * size:  # as in `hold`
                blocks = -(-computed_tokens // size)
                self.held_blocks += blocks - held_blocks
                job.held_blocks = held_blocks = blocks
                own_blocks = blocks - job.hosted_blocks
                if own_blocks > job.own_blocks:
                    self.own_blocks += own_blocks - job.own_blocks
                    job.own_blocks = own_blocks
            planned.append(PlannedDecode(key, tokens, held_blocks))
        return planned, complete

    def take_back(self, job: Job, missing_tokens: int) -> None:
        """Subtract planned tokens that were not generated; a complete job may decode again."""
        if job.stage is JobStage.WAITING:
            job.generated_tokens = max(job.task.generated_tokens, job.generated_tokens - missing_tokens)
            return
        job.generated_tokens -= missing_tokens
        job.computed_tokens -= missing_tokens
        if job.stage is JobStage.COMPLETE and job.missing_tokens > 0:
            job.stage = JobStage.DECODING

    def gain(self, job: Job, tokens: int) -> None:
        """Add tokens that were not planned, as far as the limit and free blocks allow; a job may be complete
        with them."""
        if job.stage is JobStage.WAITING:
            job.generated_tokens += max(0, min(tokens, job.missing_tokens - 1))
        else:
            room_blocks = max(job.held_blocks, job.reserved_blocks + max(0, self.free_blocks))
            room = room_blocks * self.block_tokens - job.computed_tokens
            tokens = max(0, min(tokens, job.missing_tokens, room))
            job.generated_tokens += tokens
            job.computed_tokens += tokens
            self.hold(job, max(job.held_blocks, self.blocks_for(job.computed_tokens)))
            if not job.missing_tokens:
                job.stage = JobStage.COMPLETE

    def note_prefix_hit(self, job: Job, cached_tokens: int) -> None:
        """Record a prefix cache hit of a prefilling job, limited by the free blocks."""
        room_blocks = job.held_blocks + max(0, self.free_blocks)
        cached_tokens = min(cached_tokens, job.prefill_tokens - 1, room_blocks * self.block_tokens)
        if cached_tokens > job.computed_tokens:
            job.computed_tokens = cached_tokens
            self.hold(job, max(job.held_blocks, self.blocks_for(cached_tokens)))

    def check_integrity(self) -> None:
        """Raises AssertionError when a sum is wrong, or a job's tokens, blocks and stage are inconsistent."""
        jobs = list(self.jobs.values())
        assert self.held_blocks == sum(job.held_blocks for job in jobs)
        assert self.own_blocks == sum(job.own_blocks for job in jobs)
        for job in jobs:
            assert 0 <= job.generated_tokens <= job.task.max_tokens
            assert job.computed_tokens <= job.held_blocks * self.block_tokens
            assert job.held_blocks <= job.reserved_blocks and job.own_blocks >= 0
            if job.stage is JobStage.WAITING:
                assert job.computed_tokens == job.held_blocks == 0
            elif job.stage is JobStage.PREFILLING:
                assert job.held_blocks > 0 or job.computed_tokens > 0
            else:
                assert job.computed_tokens == job.prefill_tokens - 1
                assert (job.missing_tokens == 0) == (job.stage is JobStage.COMPLETE)


class BatchBuilder:
    """A batch under construction; `build` counts its tokens as computed."""

    def __init__(self, table: JobTable, settings: PolicySettings) -> None:
        self._table = table
        self._settings = settings
        self.budget_tokens = settings.token_budget
        self.decodes: dict[SequenceKey, Job] = {}
        self.prefills: dict[SequenceKey, tuple[Job, int]] = {}
        """With the end of each chunk."""
        self.preemptions: dict[SequenceKey, PlannedPreemption] = {}
        self.complete: list[Job] = []
        """Decoding jobs that reach their limit in the built batch."""
        self._start_tokens = 0

    @property
    def has_room(self) -> bool:
        """Whether another job fits. More may run than a batch holds, after an adoption or a cut batch."""
        return len(self.decodes) + len(self.prefills) < self._settings.max_batch_sequences

    def chunk_tokens(self, job: Job) -> int:
        """Return the prompt tokens that this step may compute: the whole prompt without chunked prefill."""
        rest = job.prefill_tokens - job.computed_tokens
        if not self.has_room:
            return 0
        if self._settings.chunked_prefill:
            return max(0, min(rest, self.budget_tokens))
        return rest if rest <= self.budget_tokens or not self.prefills else 0

    def text_fits(self, job: Job) -> bool:
        """Return whether the plan has room for another job's text."""
        total = self._start_tokens + job.prefill_tokens
        return self._start_tokens == 0 or total <= self._settings.start_tokens

    def add_decode(self, job: Job) -> None:
        self.decodes[job.task.key] = job
        self.budget_tokens -= 1

    def add_chunk(self, job: Job, chunk_tokens: int) -> None:
        """Add the next chunk; a waiting job starts with it, and its text travels in the plan."""
        if job.stage is JobStage.WAITING:
            self._start_tokens += job.prefill_tokens
        self.prefills[job.task.key] = (job, job.computed_tokens + chunk_tokens)
        self.budget_tokens -= chunk_tokens

    def preempt(self, job: Job) -> None:
        """Add a preemption and remove the job's other items. The caller clears the job."""
        key = job.task.key
        if self.decodes.pop(key, None) is not None:
            self.budget_tokens += 1
        elif key in self.prefills:
            self.budget_tokens += self.prefills.pop(key)[1] - job.computed_tokens
        self.preemptions[key] = PlannedPreemption(key, job.held_blocks, job.computed_tokens)

    def __bool__(self) -> bool:
        """Return whether the batch has any item."""
        return bool(self.decodes or self.prefills or self.preemptions)

    def steps_that_fit(self, steps: int) -> int:
        """Return the largest number of these steps that the capacity allows, at least 1."""
        table = self._table
        most_grown = len(self.decodes) * (table.blocks_for(steps) + 1)
        if table.held_blocks + most_grown <= table.capacity_blocks:
            return max(1, steps)
        for tried in range(steps, 1, -1):
            held_blocks = table.held_blocks
            for job in self.decodes.values():
                blocks = table.blocks_for(job.computed_tokens + min(tried, job.missing_tokens))
                held_blocks += max(0, blocks - job.held_blocks)
            if held_blocks <= table.capacity_blocks:
                return tried
        return 1

    def build(self, steps: int, questions: Iterable[PlannedQuestion] = ()) -> PlannedBatch:
        """Apply the batch to the job table and return it as a plan."""
        prefills = []
        for job, end_tokens in self.prefills.values():
            item = PlannedPrefill(job.task.key, job.computed_tokens, end_tokens, job.held_blocks)
            self._table.finish_chunk(job, end_tokens)
            prefills.append(item)
        decodes, self.complete = self._table.finish_decodes(self.decodes, steps)
        return PlannedBatch(
            steps=steps,
            preemptions=tuple(self.preemptions.values()),
            prefills=tuple(prefills),
            decodes=tuple(decodes),
            questions=tuple(questions),
        )
