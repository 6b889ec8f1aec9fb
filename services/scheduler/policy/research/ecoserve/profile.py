"""`ecoserve_profile`: a generation starts if blocks suffice at every predicted completion.

It takes blocks as needed. An answer that outlives its prediction gets a new one, or pauses with its KV.
Source: algorithms.md §1 (Beyond the paper).
"""

from collections.abc import Iterable, Iterator

from services.scheduler.policy.batch_builder import BatchBuilder, Job
from services.scheduler.policy.contract import PlannedBatch, PolicySettings, WorkerShape
from services.scheduler.policy.estimates import UsageProfile
from services.scheduler.policy.research.ecoserve.planner import EcoServeSDO


class EcoServeProfile(EcoServeSDO):
    """`ecoserve_profile`: like `ecoserve_sdo`, with admission by profile instead of exact allocation."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        super().__init__(shape, settings)
        self._profile: UsageProfile | None = None
        self._prompt_room_blocks: int | None = None
        """Blocks that prompts may take in this plan."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        self._profile = self._prompt_room_blocks = None
        return super().plan(now_s)

    def _goes_on(self, job: Job) -> bool:
        """Return whether the job may continue; one at its predicted end gets a new end."""
        if job.computed_tokens < job.end_tokens:
            return True
        rest = self._lengths.rest_tokens(job.prediction, job.generated_tokens, job.task.max_tokens)
        self._questions[job.task.key] = job.generated_tokens
        self._profile = None
        job.end_tokens = job.computed_tokens + rest
        if self._usage().free_blocks >= 0:
            return True
        job.end_tokens = job.computed_tokens + min(rest, self._table.block_tokens)
        self._profile = None
        return self._make_profile(self._table.capacity_blocks).free_blocks >= 0

    def _fits(self, job: Job) -> bool:
        return self._usage().fits(job.computed_tokens, job.computed_tokens + job.rest_tokens, job.held_blocks)

    def _start_blocks(self, job: Job) -> int:
        """Return the blocks up to the next token."""
        return self._table.blocks_for(job.computed_tokens + 1)

    def _pinned_blocks(self, job: Job, needed_blocks: int) -> int:
        return self._start_blocks(job)

    def _start(self, batch: BatchBuilder, job: Job, blocks: int) -> None:
        super()._start(batch, job, blocks)
        if self._profile is not None:
            self._profile.start(job.computed_tokens, job.end_tokens, job.held_blocks)

    def _leaves_room(self, blocks: int) -> bool:
        """Return whether a prompt may take the blocks, of the reserve but not of running jobs' needs. While
        generations wait, they and new prompts hold the reserve at most."""
        if self._prompt_room_blocks is None:
            waiting = sum(job.held_blocks for job in self._ready)
            room = min(self._usage().free_blocks, -waiting) if waiting else self._usage().free_blocks
            self._prompt_room_blocks = room + self._reserve_blocks
        return blocks <= min(self._prompt_room_blocks, self._table.free_blocks)

    def _add_prompt(self, batch: BatchBuilder, job: Job) -> bool:
        held, added = job.held_blocks, super()._add_prompt(batch, job)
        if added and self._prompt_room_blocks is not None:
            self._prompt_room_blocks -= job.held_blocks - held
        return added

    def _rooms(self, jobs: Iterable[Job]) -> Iterator[int]:
        return (job.end_tokens - job.computed_tokens for job in jobs)

    def _usage(self) -> UsageProfile:
        """Return this plan's profile, including its starts."""
        if self._profile is None:
            self._profile = self._make_profile(self._table.capacity_blocks - self._reserve_blocks)
        return self._profile

    def _make_profile(self, limit_blocks: int) -> UsageProfile:
        running, complete = self._running.values(), self._complete.values()
        growing = [
            (one.computed_tokens, max(one.end_tokens, one.computed_tokens), one.held_blocks)
            for one in running
        ]
        growing += [(one.computed_tokens, one.computed_tokens, one.held_blocks) for one in complete]
        constant = self._table.held_blocks - sum([held for _, _, held in growing])
        return UsageProfile(growing, constant, limit_blocks, self._table.block_tokens)
