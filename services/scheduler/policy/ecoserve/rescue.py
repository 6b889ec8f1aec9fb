"""What is done where nothing moves, or where a worker shrank: the newest holders give up their KV.

Liveness, as algorithms.md §1 demands it: if nothing runs and nothing can start, the oldest unfinished holder
is pinned until it ends, and others are evicted, half-prefilled prompts included. What is evicted keeps its
tokens and is prefilled again, so every answer grows monotonically and the pinned one always ends.
"""

from abc import abstractmethod
from itertools import chain

from services.scheduler.policy.ecoserve.drafts import Draft, Drafting
from services.scheduler.policy.ecoserve.jobs import Job, JobStage, arrival_rank


class Rescuing(Drafting):
    """A subclass says how a generation starts, and calls `_shed` and `_rescue` from its `plan`."""

    @abstractmethod
    def _start(self, draft: Draft, job: Job, blocks: int) -> None:
        """It runs from this batch on, with `blocks` set aside for it alone."""

    def _target_blocks(self, job: Job) -> int:
        """What a generation is allocated in all when it starts: clamped to what an otherwise empty worker
        gives, and never less than the next token needs."""
        target = self._blocks(job.computed_tokens + job.rest_tokens)
        clamped = min(target, self._capacity_blocks - self._reserve_blocks)
        return max(clamped, job.held_blocks, self._blocks(job.computed_tokens + 1))

    def _lacking_blocks(self, job: Job) -> int:
        return max(0, self._target_blocks(job) - job.own_blocks)

    def _overdue_prompt(self) -> Job | None:
        """The oldest prompt that is long overdue and could end here."""
        while (job := self._prompts.oldest_overdue()) is not None and self._is_oversized(job):
            self._put_aside(job)
        return job

    def _shed(self, draft: Draft, now_s: float) -> None:
        """Give back what a shrunken worker no longer has, newest first."""
        if self._free_blocks < 0:
            for victim in self._holders()[::-1]:
                if self._free_blocks >= 0:
                    return
                self._evict(draft, victim, now_s)

    def _holders(self) -> list[Job]:
        """Who holds KV and does not run, oldest first."""
        return sorted(chain(self._partial.values(), self._generations), key=arrival_rank)

    def _rescue(self, draft: Draft, now_s: float) -> None:
        """Nothing runs and nothing can start: the oldest holder is pinned until it ends, and others give
        up what they hold, newest first, as far as it takes."""
        holders = self._holders()
        if not holders:
            return
        pinned = self._jobs.get(self._pinned) if self._pinned is not None else None
        pinned = pinned if pinned in holders else holders[0]
        assert pinned is not None
        self._pinned = pinned.task.key
        needed = max(0, self._needed_blocks(pinned) - pinned.own_blocks)
        for victim in holders[::-1]:
            if self._free_blocks >= needed:
                break
            if victim is not pinned:
                self._evict(draft, victim, now_s)
        if self._free_blocks < needed:
            self._evict(draft, pinned, now_s)
        elif pinned.stage is JobStage.GENERATION:
            lacking = min(self._lacking_blocks(pinned), self._free_blocks)
            self._start(draft, pinned, pinned.own_blocks + max(needed, lacking))
        else:
            self._prefill_pinned(draft, pinned)

    def _needed_blocks(self, job: Job) -> int:
        """To do anything at all."""
        whole = job.stage is JobStage.PROMPT and not self._settings.chunked_prefill
        return self._blocks(job.prefill_tokens if whole else job.computed_tokens + 1)

    def _prefill_pinned(self, draft: Draft, job: Job) -> None:
        """As much of its prompt as the free blocks take."""
        room = (job.held_blocks + self._free_blocks) * self._block_tokens - job.computed_tokens
        draft.budget_tokens = self._settings.token_budget
        chunk = min(self._chunk_tokens(draft, job), room)
        if chunk > 0:
            self._draft_prompt(draft, job, chunk)
