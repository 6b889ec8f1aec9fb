"""What every policy stands on: the table of one worker's jobs, and one batch of them in the making.

A job is a task together with its projected progress. Blocks are counted three ways. `held_blocks` are there
physically. `own_blocks` are set aside for the job alone: never less than held, less what is hosted.
`hosted_blocks` are lent to it out of another job's own (only EcoServe lends). The worker's capacity bounds
the sum of `own_blocks` and with that, as no block is used by two at once, the sum of `held_blocks`.

    capacity 10:  a holds 3, owns 5   b holds 4, owns 2, is hosted 2 by a   → free: 10 − 5 − 2 = 3

A policy keeps its jobs in places of its own (a line, two queues), and asks the `JobTable` to hold, to set
aside and to clear. It decides who comes next and whether there are blocks; a `BatchBuilder` says how much of
a prompt this step may compute, counts, and projects what was decided on the table. Both know no order and no
admission rule.

    budget 16:  decodes of a and b → 14 are left;  b is preempted → 15;  a prompt of 40 is cut to [0, 15)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
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
    """Nothing of it is at the worker."""
    PREFILLING = "prefilling"
    """Partly prefilled, or it holds blocks for that."""
    READY = "ready"
    """Prefilled, and not running: new, adopted, or paused with its KV in place."""
    DECODING = "decoding"
    COMPLETE = "complete"
    """Planned to its limit: keeps its blocks until the end is confirmed."""


@dataclass(slots=True, eq=False)
class Job:
    """One task's projected progress, and what policies that plan by predicted lengths note about it."""

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
    """What the slack classes of the queue it waits in count down to."""
    rest_tokens: int = 0
    """Padded tokens to come, as of when it last entered a queue or was predicted anew."""
    end_tokens: int = 0
    """Tokens in the cache when it is expected to end; of a running one."""
    rank: tuple[Any, ...] = ()
    """Its place in the queue it waits in; the last parts tell any two jobs apart."""
    slack_class: int = 0
    queued_as: int = 0
    """Number of its stay in a queue: clocked events of earlier stays are void."""

    @property
    def prefill_tokens(self) -> int:
        """What has to be computed before it decodes: the prompt, and the answer so far."""
        return self.task.prompt_tokens + self.generated_tokens

    @property
    def missing_tokens(self) -> int:
        """Of the answer, up to its limit."""
        return self.task.max_tokens - self.generated_tokens

    @property
    def reserved_blocks(self) -> int:
        """How far it may grow without asking again."""
        return self.own_blocks + self.hosted_blocks

    @property
    def is_prompt(self) -> bool:
        """Whether its prefill is still to be done, or to be finished."""
        return self.stage in (JobStage.WAITING, JobStage.PREFILLING)


def arrival_rank(job: Job) -> tuple[Any, ...]:
    """First come, first served."""
    return job.task.order


class JobTable:
    """One worker's jobs by key, and the sums of their blocks."""

    def __init__(self, shape: WorkerShape) -> None:
        self.block_tokens = shape.block_tokens
        self.capacity_blocks = shape.capacity_blocks
        self.jobs: dict[SequenceKey, Job] = {}
        self.held_blocks = self.own_blocks = 0
        self.changed = True
        """Something may start that could not before. Whoever has looked, clears it."""

    @property
    def free_blocks(self) -> int:
        """Set aside for nobody. Negative after the worker shrank: somebody has to give up blocks."""
        return self.capacity_blocks - self.own_blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def maximum_blocks(self, job: Job) -> int:
        """Of its longest answer, clamped to what an otherwise empty worker gives: one that was found there
        may be larger."""
        return min(self.blocks_for(job.task.limit_tokens), self.capacity_blocks)

    def is_oversized(self, job: Job) -> bool:
        """Whether it could never end here, as small as the worker is now."""
        return self.blocks_for(job.task.limit_tokens) > self.capacity_blocks

    def add(self, task: Task, holding: Holding | None = None) -> Job | None:
        """A new job, with what it holds already; None when its key is known. The stage says where it stands:
        what decodes at the worker is READY, or COMPLETE when nothing is missing."""
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
        """It has ended: what it held is free."""
        self.clear(job)
        del self.jobs[job.task.key]

    def clear(self, job: Job) -> None:
        """It holds nothing any more; its tokens are to be computed again."""
        self.held_blocks -= job.held_blocks
        job.held_blocks = job.computed_tokens = 0
        self.set_own(job, 0)
        job.stage = JobStage.WAITING

    def set_own(self, job: Job, blocks: int) -> None:
        """So many are set aside for it alone from now on."""
        self.own_blocks += blocks - job.own_blocks
        self.changed = self.changed or blocks < job.own_blocks
        job.own_blocks = blocks

    def hold(self, job: Job, blocks: int) -> None:
        """Physically so many from now on; what it is not hosted for is its own."""
        self.held_blocks += blocks - job.held_blocks
        job.held_blocks = blocks
        if job.reserved_blocks < blocks:
            self.set_own(job, blocks - job.hosted_blocks)

    def finish_chunk(self, job: Job, end_tokens: int) -> None:
        """A prefill gets to `end_tokens`; the chunk that reaches the end yields the first token."""
        is_last = end_tokens == job.prefill_tokens
        job.computed_tokens = end_tokens
        if is_last:
            job.generated_tokens += 1
            job.stage = JobStage.DECODING if job.missing_tokens > 0 else JobStage.COMPLETE

    def finish_decodes(
        self, jobs: Mapping[SequenceKey, Job], steps: int
    ) -> tuple[list[PlannedDecode], list[Job]]:
        """Each decodes so many tokens more, or to its limit, with the blocks for them: what is planned, and
        who is at the limit. It goes over all of a worker in each plan: no calls but for what changes."""
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
            if computed_tokens > held_blocks * size:  # As `hold` does it.
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
        """So many planned tokens were not generated: one that was planned to its limit goes on, and one that
        has given up what it held has fewer to compute again."""
        if job.stage is JobStage.WAITING:
            job.generated_tokens = max(job.task.generated_tokens, job.generated_tokens - missing_tokens)
            return
        job.generated_tokens -= missing_tokens
        job.computed_tokens -= missing_tokens
        if job.stage is JobStage.COMPLETE and job.missing_tokens > 0:
            job.stage = JobStage.DECODING

    def note_prefix_hit(self, job: Job, cached_tokens: int) -> None:
        """The worker has so much of a prefilling one stored. It counts as far as the free blocks reach, as
        if it were the job's own."""
        room_blocks = job.held_blocks + max(0, self.free_blocks)
        cached_tokens = min(cached_tokens, job.prefill_tokens - 1, room_blocks * self.block_tokens)
        if cached_tokens > job.computed_tokens:
            job.computed_tokens = cached_tokens
            self.hold(job, max(job.held_blocks, self.blocks_for(cached_tokens)))

    def check_integrity(self) -> None:
        """Raises AssertionError when a sum is wrong, or a job's tokens, blocks and stage contradict."""
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
    """Jobs enter a batch, and may leave it again until it is built; then their tokens count as computed."""

    def __init__(self, table: JobTable, settings: PolicySettings) -> None:
        self._table = table
        self._settings = settings
        self.budget_tokens = settings.token_budget
        self.decodes: dict[SequenceKey, Job] = {}
        self.prefills: dict[SequenceKey, tuple[Job, int]] = {}
        """With the end of the chunk."""
        self.preemptions: dict[SequenceKey, PlannedPreemption] = {}
        self.complete: list[Job] = []
        """Of those that decode, who is at its limit once the batch is built."""
        self._start_tokens = 0

    @property
    def sequences(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def jobs(self) -> list[Job]:
        """All that the batch computes."""
        return [*self.prompts, *self.decodes.values()]

    @property
    def prompts(self) -> list[Job]:
        """Whose prompts it computes."""
        return [job for job, _ in self.prefills.values()]

    @property
    def has_room(self) -> bool:
        """More may run than a batch holds: after an adoption, or when a batch that would have ended some was
        cut."""
        return self.sequences < self._settings.max_batch_sequences

    def chunk_tokens(self, job: Job) -> int:
        """Tokens of its prompt that this step may compute; 0 is none. Without chunked prefill prompts go
        whole, and one longer than the budget goes when no other prompt does."""
        rest = job.prefill_tokens - job.computed_tokens
        if not self.has_room:
            return 0
        if self._settings.chunked_prefill:
            return max(0, min(rest, self.budget_tokens))
        return rest if rest <= self.budget_tokens or not self.prefills else 0

    def text_fits(self, job: Job) -> bool:
        """Whether the plan may carry the text of one more that starts."""
        total = self._start_tokens + job.prefill_tokens
        return self._start_tokens == 0 or total <= self._settings.start_tokens

    def add_decode(self, job: Job) -> None:
        self.decodes[job.task.key] = job
        self.budget_tokens -= 1

    def add_chunk(self, job: Job, chunk_tokens: int) -> None:
        """The next chunk of its prompt. One that waits starts with it: its text travels in the plan."""
        if job.stage is JobStage.WAITING:
            self._start_tokens += job.prefill_tokens
        self.prefills[job.task.key] = (job, job.computed_tokens + chunk_tokens)
        self.budget_tokens -= chunk_tokens

    def preempt(self, job: Job) -> None:
        """It gives up all it holds, and nothing of it is in this batch. Clearing it is the caller's."""
        key = job.task.key
        if self.decodes.pop(key, None) is not None:
            self.budget_tokens += 1
        elif key in self.prefills:
            self.budget_tokens += self.prefills.pop(key)[1] - job.computed_tokens
        self.preemptions[key] = PlannedPreemption(key, job.held_blocks, job.computed_tokens)

    def __bool__(self) -> bool:
        """Whether anything is in it."""
        return bool(self.decodes or self.prefills or self.preemptions)

    @property
    def most_steps(self) -> int:
        """So many steps until the last of those that decode is at its limit, or a plan is at its own."""
        return min(self._settings.max_steps, max(job.missing_tokens for job in self.decodes.values()))

    def steps_that_fit(self, steps: int) -> int:
        """As many of these steps as the worker has blocks for; at least one."""
        table = self._table
        most_grown = len(self.decodes) * (table.blocks_for(steps) + 1)
        if table.held_blocks + most_grown <= table.capacity_blocks:
            return max(1, steps)
        while steps > 1 and self._held_blocks_after(steps) > table.capacity_blocks:
            steps -= 1
        return max(1, steps)

    def _held_blocks_after(self, steps: int) -> int:
        """All that is held, once so many steps have run."""
        grown = 0
        for job in self.decodes.values():
            blocks = self._table.blocks_for(job.computed_tokens + min(steps, job.missing_tokens))
            grown += max(0, blocks - job.held_blocks)
        return self._table.held_blocks + grown

    def build(self, steps: int, questions: Iterable[PlannedQuestion] = ()) -> PlannedBatch:
        """Project the batch on the job table, and put it into words."""
        prefills = [self._prefill(job, end) for job, end in self.prefills.values()]
        decodes, self.complete = self._table.finish_decodes(self.decodes, steps)
        return PlannedBatch(
            steps=steps,
            preemptions=tuple(self.preemptions.values()),
            prefills=tuple(prefills),
            decodes=tuple(decodes),
            questions=tuple(questions),
        )

    def _prefill(self, job: Job, end_tokens: int) -> PlannedPrefill:
        item = PlannedPrefill(job.task.key, job.computed_tokens, end_tokens, job.held_blocks)
        self._table.finish_chunk(job, end_tokens)
        return item
