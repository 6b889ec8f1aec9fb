"""Profile admission instead of exact allocations: a generation starts iff, as predicted, there will be enough
at every completion (`profile.py`). Blocks are taken as they are needed, out of one pool.

An answer that outlives its prediction is predicted anew and goes on where the profile allows it; else it
takes a block's worth of the reserve; else it pauses and keeps its KV. Everything else is `planner.py`.

Source: algorithms.md §1 (Beyond the paper: `ecoserve_profile`).
"""

from services.scheduler.policy.contract import PlannedBatch
from services.scheduler.policy.ecoserve.drafts import Draft
from services.scheduler.policy.ecoserve.jobs import Job
from services.scheduler.policy.ecoserve.planner import DecoupledPolicy
from services.scheduler.policy.ecoserve.profile import UsageProfile


class ProfilingPolicy(DecoupledPolicy):
    """`ecoserve_profile`. Implements `contract.BatchPolicy`. Own blocks are those held, always."""

    _profile: UsageProfile | None = None
    _prompt_room_blocks: int | None = None
    """What prompts may take, once generations have been admitted."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        self._profile = self._prompt_room_blocks = None
        return super().plan(now_s)

    def _usage(self) -> UsageProfile:
        """As of this plan, up to date with whatever it has started."""
        if self._profile is None:
            self._profile = self._make_profile(self._capacity_blocks - self._reserve_blocks)
        return self._profile

    def _make_profile(self, limit_blocks: int) -> UsageProfile:
        growing = [
            (job.computed_tokens, max(job.end_tokens, job.computed_tokens), job.held_blocks)
            for job in self._running.values()
        ]
        ending = [
            (job.computed_tokens, job.computed_tokens, job.held_blocks) for job in self._complete.values()
        ]
        constant = self._held_blocks - sum(item[2] for item in growing) - sum(item[2] for item in ending)
        return UsageProfile(growing + ending, constant, limit_blocks, self._block_tokens)

    def _secure(self, draft: Draft, job: Job, now_s: float) -> bool:
        needed = self._blocks(job.computed_tokens + 1)
        if job.computed_tokens >= job.end_tokens and not self._prolong(job):
            self._pause(job, now_s)
            return False
        if needed > job.held_blocks:
            if needed - job.held_blocks > self._free_blocks:
                self._pause(job, now_s)
                return False
            self._set_own(job, needed)
        return True

    def _prolong(self, job: Job) -> bool:
        """A longer end for one that has reached its own."""
        rest = self._lengths.rest_tokens(job.prediction, job.generated_tokens, job.task.max_tokens)
        self._questions[job.task.key] = job.generated_tokens
        self._profile = None
        job.end_tokens = job.computed_tokens + rest
        if self._usage().free_blocks >= 0:
            return True
        job.end_tokens = job.computed_tokens + min(rest, self._block_tokens)
        self._profile = None
        return self._make_profile(self._capacity_blocks).free_blocks >= 0

    def _fits(self, job: Job) -> bool:
        return self._usage().fits(job.computed_tokens, job.computed_tokens + job.rest_tokens, job.held_blocks)

    def _leaves_room(self, blocks: int) -> bool:
        """A prompt may use the reserve; those that run must never miss what it takes."""
        if self._prompt_room_blocks is None:
            usage, head = self._usage(), self._generations.first()
            room = usage.free_blocks
            if head is not None:
                ends = head.computed_tokens + head.rest_tokens
                room = min(room, usage.room_beside(head.computed_tokens, ends, head.held_blocks))
            self._prompt_room_blocks = room + self._reserve_blocks
        return blocks <= min(self._prompt_room_blocks, self._free_blocks)

    def _start(self, draft: Draft, job: Job, blocks: int) -> None:
        """Nothing is set aside beyond the next token."""
        super()._start(draft, job, self._blocks(job.computed_tokens + 1))
        if self._profile is not None:
            self._profile.start(job.computed_tokens, job.end_tokens, job.held_blocks)

    def _draft_prompt(self, draft: Draft, job: Job, chunk_tokens: int) -> None:
        held = job.held_blocks
        super()._draft_prompt(draft, job, chunk_tokens)
        if self._prompt_room_blocks is not None:
            self._prompt_room_blocks -= job.held_blocks - held

    def _room_tokens(self, job: Job) -> int:
        return job.end_tokens - job.computed_tokens
