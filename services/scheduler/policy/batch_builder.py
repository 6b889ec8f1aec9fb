"""One batch in the making: the token budget, the batch's size, and how decisions become a `PlannedBatch`.

Every policy puts its batches together with a `BatchBuilder`. It decides who comes next and whether there are
blocks; the builder says how much of a prompt this step may compute, counts, and projects what was decided on
the job table. Knows no order and no admission rule.

    budget 16:  decodes of a and b → 14 are left;  b is preempted → 15;  a prompt of 40 is cut to [0, 15)
"""

from collections.abc import Iterable

from services.scheduler.policy.contract import (
    PlannedBatch,
    PlannedDecode,
    PlannedPreemption,
    PlannedPrefill,
    PlannedQuestion,
    PolicySettings,
)
from services.scheduler.policy.job_table import Job, JobStage, JobTable
from shared.messages.sequence import SequenceKey


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
        self._start_tokens = 0

    @property
    def sequences(self) -> int:
        return len(self.decodes) + len(self.prefills)

    @property
    def jobs(self) -> list[Job]:
        """All that the batch computes."""
        return [job for job, _ in self.prefills.values()] + list(self.decodes.values())

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
        while steps > 1 and self._held_blocks_after(steps) > self._table.capacity_blocks:
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
        return PlannedBatch(
            steps=steps,
            preemptions=tuple(self.preemptions.values()),
            prefills=tuple([self._prefill(job, end) for job, end in self.prefills.values()]),
            decodes=tuple([self._decode(job, steps) for job in self.decodes.values()]),
            questions=tuple(questions),
        )

    def _prefill(self, job: Job, end_tokens: int) -> PlannedPrefill:
        item = PlannedPrefill(job.task.key, job.computed_tokens, end_tokens, job.held_blocks)
        self._table.finish_chunk(job, end_tokens)
        return item

    def _decode(self, job: Job, steps: int) -> PlannedDecode:
        tokens = min(steps, job.missing_tokens)
        self._table.finish_decodes(job, tokens)
        return PlannedDecode(job.task.key, tokens, job.held_blocks)
