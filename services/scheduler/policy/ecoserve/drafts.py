"""A batch in the making, and how it is put into words; what every policy of the family does alike.

`Drafting` adds to the books: prompts and decodes enter a draft within the token budget and the batch's
size, evictions leave it, and `_commit` projects all of it. Knows no order and no admission rule.
"""

from dataclasses import dataclass, field

from services.scheduler.policy.contract import (
    PlannedBatch,
    PlannedDecode,
    PlannedPreemption,
    PlannedPrefill,
    PlannedQuestion,
)
from services.scheduler.policy.ecoserve.job_table import Books
from services.scheduler.policy.ecoserve.jobs import Job, JobStage
from shared.messages.sequence import SequenceKey


@dataclass(slots=True)
class Draft:
    """Blocks are taken as jobs enter it; tokens are projected when it is committed."""

    budget_tokens: int
    decodes: dict[SequenceKey, Job] = field(default_factory=dict)
    prefills: dict[SequenceKey, tuple[Job, int]] = field(default_factory=dict)
    """With the end of the chunk."""
    preempted: list[PlannedPreemption] = field(default_factory=list)
    start_tokens: int = 0

    @property
    def sequences(self) -> int:
        return len(self.decodes) + len(self.prefills)


class Drafting(Books):
    """One worker's batches, but for `plan`."""

    def _draft_decode(self, draft: Draft, job: Job) -> None:
        draft.decodes[job.task.key] = job
        draft.budget_tokens -= 1

    def _most_running(self) -> int:
        """All that run get a token in each step."""
        return min(self._settings.max_batch_sequences, self._settings.token_budget)

    def _chunk_tokens(self, draft: Draft, job: Job) -> int:
        """Tokens of its prompt that this step may compute; 0 is none."""
        rest = job.prefill_tokens - job.computed_tokens
        if draft.sequences >= self._settings.max_batch_sequences:
            return 0
        if self._settings.chunked_prefill:
            return max(0, min(rest, draft.budget_tokens))
        return rest if rest <= draft.budget_tokens or not draft.prefills else 0

    def _text_fits(self, draft: Draft, job: Job) -> bool:
        total = draft.start_tokens + job.prefill_tokens
        return draft.start_tokens == 0 or total <= self._settings.start_tokens

    def _draft_prompt(self, draft: Draft, job: Job, chunk_tokens: int) -> None:
        """Takes it out of its queue, if it still waits there."""
        if job in self._prompts:
            self._prompts.remove(job)
            self._partial[job.task.key] = job
            draft.start_tokens += job.prefill_tokens
        end = job.computed_tokens + chunk_tokens
        draft.prefills[job.task.key] = (job, end)
        draft.budget_tokens -= chunk_tokens
        self._hold(job, max(job.held_blocks, self._blocks(end)))

    def _next_prompt(self) -> Job | None:
        """The first that waits; those too large for the worker as it is now are put aside."""
        while (job := self._prompts.first()) is not None and self._is_oversized(job):
            self._put_aside(job)
        return job

    def _put_aside(self, job: Job) -> None:
        """A waiting prompt that could never end here must not hold anybody up."""
        self._prompts.remove(job)
        self._oversized[job.task.key] = job

    def _evict(self, draft: Draft, job: Job, now_s: float) -> None:
        """It gives up all it holds; nothing of it is in this batch."""
        key = job.task.key
        if draft.decodes.pop(key, None) is not None:
            draft.budget_tokens += 1
        elif key in draft.prefills:
            draft.budget_tokens += draft.prefills.pop(key)[1] - job.computed_tokens
        draft.preempted.append(PlannedPreemption(key, job.held_blocks, job.computed_tokens))
        self._release(job, now_s)

    def _commit(self, draft: Draft, now_s: float) -> PlannedBatch | None:
        """Project the draft; None when there is nothing in it."""
        if not (draft.decodes or draft.prefills or draft.preempted):
            return None
        steps = self._steps(draft)
        prefills = [self._commit_prefill(job, end, now_s) for job, end in draft.prefills.values()]
        decodes = [self._commit_decode(job, steps) for job in draft.decodes.values()]
        questions = tuple(PlannedQuestion(key, tokens) for key, tokens in self._questions.items())
        self._questions.clear()
        return PlannedBatch(
            steps=steps,
            preemptions=tuple(draft.preempted),
            prefills=tuple(prefills),
            decodes=tuple(decodes),
            questions=questions,
        )

    def _commit_prefill(self, job: Job, end_tokens: int, now_s: float) -> PlannedPrefill:
        item = PlannedPrefill(job.task.key, job.computed_tokens, end_tokens, job.held_blocks)
        job.computed_tokens = end_tokens
        if end_tokens == job.prefill_tokens:
            self._take_out(job)
            job.generated_tokens += 1
            if job.missing_tokens > 0:
                self._prefilled(job, now_s)
            else:
                self._complete_job(job)
        return item

    def _prefilled(self, job: Job, now_s: float) -> None:
        """A prompt task is over: its generation task waits (papers/003 §3.2.1)."""
        self._queue_generation(job, now_s)

    def _commit_decode(self, job: Job, steps: int) -> PlannedDecode:
        tokens = min(steps, job.missing_tokens)
        job.computed_tokens += tokens
        job.generated_tokens += tokens
        self._hold(job, max(job.held_blocks, self._blocks(job.computed_tokens)))
        if job.missing_tokens == 0:
            self._complete_job(job)
        return PlannedDecode(job.task.key, tokens, job.held_blocks)

    def _steps(self, draft: Draft) -> int:
        """The most steps in which nothing can change and no allocation ends or host arrives."""
        waiting = draft.prefills or draft.preempted or self._partial or len(self._generations)
        if waiting or self._next_prompt() is not None:
            return 1
        jobs = draft.decodes.values()
        steps = min(self._settings.max_steps, max(job.missing_tokens for job in jobs))
        for job in jobs:
            room = self._room_tokens(job)
            if room < job.missing_tokens:
                steps = min(steps, room)
        while steps > 1 and self._grown_blocks(draft, steps) > self._capacity_blocks:
            steps -= 1
        return max(1, steps)

    def _room_tokens(self, job: Job) -> int:
        """Tokens until it has to ask for blocks."""
        blocks = min([job.reserved_blocks, *(slot.start for slot in job.slots if slot.guest is not None)])
        return blocks * self._block_tokens - job.computed_tokens

    def _grown_blocks(self, draft: Draft, steps: int) -> int:
        """All that is held, once so many steps have run."""
        grown = 0
        for job in draft.decodes.values():
            blocks = self._blocks(job.computed_tokens + min(steps, job.missing_tokens))
            grown += max(0, blocks - job.held_blocks)
        return self._held_blocks + grown

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance."""
        jobs = list(self._jobs.values())
        assert self._held_blocks == sum(job.held_blocks for job in jobs)
        assert self._own_blocks == sum(job.own_blocks for job in jobs)
        assert self._own_blocks <= self._capacity_blocks or not self._running, "promised more than there is"
        self._prompts.check_integrity()
        self._generations.check_integrity()
        self._groups.check_integrity({id(job) for job in self._generations})
        for job in jobs:
            self._check_job(job)

    def _check_job(self, job: Job) -> None:
        key, places = job.task.key, (self._partial, self._oversized, self._running, self._complete)
        queued = [job in self._prompts, job in self._generations]
        assert sum([*queued, *(key in place for place in places)]) == 1, f"{key} is not in one place"
        assert 0 <= job.generated_tokens <= job.task.max_tokens
        assert job.computed_tokens <= job.held_blocks * self._block_tokens
        assert job.held_blocks <= job.reserved_blocks and job.own_blocks >= 0
        assert queued[1] == (job.stage is JobStage.GENERATION)
        assert (key in self._running) == (job.stage is JobStage.RUNNING)
        assert (key in self._complete) == (job.stage is JobStage.COMPLETE)
        if job.stage is JobStage.PROMPT:
            assert (key in self._partial) == (job.held_blocks > 0 or job.computed_tokens > 0)
        else:
            assert job.computed_tokens == job.prefill_tokens - 1
            assert (job.missing_tokens == 0) == (job.stage is JobStage.COMPLETE)
        assert (job.host is None) == (job.hosted_blocks == 0) == (job.level == 0)
        if job.host is not None:
            assert sum(slot.guest is job for slot in job.host.slots) == 1, "a guest without a slot"
        top = job.held_blocks
        for slot in job.slots:
            assert slot.start < slot.end <= job.reserved_blocks, "a slot of nothing"
            if slot.guest is not None:
                assert top <= slot.start, "slots overlap, or the host is in one"
                top = slot.end
                assert slot.guest.host is job and slot.guest.hosted_blocks <= slot.end - slot.start
                assert job.host is not None or job.stage is JobStage.RUNNING, "a guest of nobody"
