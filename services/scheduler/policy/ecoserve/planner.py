"""EcoServe's planning step: generations fill the KV cache, prompts fill the rest of the forward size.

Decoupled queues, an exact allocation for each generation when it starts, in order or in groups that end
together, a reserve for prompts and for answers longer than predicted, offload-free pauses, and a pinned
oldest holder where nothing else can move. Class attributes say which of the paper's parts a variant has.

Differs from the paper where algorithms.md §1 says so: a paused generation's new length is
E[RL − g | RL > g], prompts leave room for the head of the generation queue, and overdue requests have a share
of the admissions. Source: papers/003 §3.2, §3.3, §3.5 (Algorithm 1).
"""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from services.scheduler.policy.contract import PlannedBatch, PolicySettings, WorkerShape
from services.scheduler.policy.ecoserve.drafts import Draft
from services.scheduler.policy.ecoserve.groups import BIN_TOKENS
from services.scheduler.policy.ecoserve.jobs import Job, JobStage, arrival_rank
from services.scheduler.policy.ecoserve.queues import AgingTurns, WaitingQueue
from services.scheduler.policy.ecoserve.rescue import Rescuing

_OF_A_BIN = 8
"""So many of one bin of lengths are tried before shorter ones are."""


def prompt_rank(job: Job) -> tuple[Any, ...]:
    """Within a slack class: longest prompt first, in bins of 128."""
    return (-(job.prefill_tokens // BIN_TOKENS), *job.task.order)


def generation_rank(job: Job) -> tuple[Any, ...]:
    """Within a slack class: most occupied KV, then longest rest, in bins of 128."""
    return (-(job.computed_tokens // BIN_TOKENS), -(job.rest_tokens // BIN_TOKENS), *job.task.order)


class DecoupledPolicy(Rescuing):
    """`ecoserve_d`: neither synced nor ordered. Implements `contract.BatchPolicy`."""

    synced = False
    ordered = False

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        super().__init__(shape, settings)
        self._prompt_turns = AgingTurns(self._options)
        self._generation_turns = AgingTurns(self._options)

    def _make_queues(self) -> tuple[WaitingQueue, WaitingQueue]:
        if not self.ordered:
            return WaitingQueue(arrival_rank), WaitingQueue(arrival_rank)
        edges_s, aging_s = self._options.slack_edges_s, self._options.aging_s
        return (
            WaitingQueue(prompt_rank, edges_s, aging_s=aging_s),
            WaitingQueue(generation_rank, edges_s, aging_s=aging_s),
        )

    def plan(self, now_s: float) -> PlannedBatch | None:
        self._prompts.advance(now_s)
        self._generations.advance(now_s)
        draft = Draft(self._settings.token_budget)
        self._shed(draft, now_s)
        for job in list(self._running.values()):
            if job.stage is JobStage.RUNNING and self._secure(draft, job, now_s):
                self._draft_decode(draft, job)
        if len(self._generations) and self._changed:
            self._changed = False
            self._admit_generations(draft, now_s)
        self._admit_prompts(draft, now_s)
        if not (draft.sequences or draft.preempted or self._complete):
            self._rescue(draft, now_s)
        return self._commit(draft, now_s)

    # Blocks

    def _secure(self, draft: Draft, job: Job, now_s: float) -> bool:
        """Whether a running job may take its next token: within its reservation, or with a block more
        (papers/003 §3.2.2: reserve first, else it stops and keeps its KV)."""
        needed = self._blocks(job.computed_tokens + 1)
        if needed <= job.held_blocks:
            return True
        if needed > job.reserved_blocks:
            if needed - job.reserved_blocks > self._free_blocks:
                self._pause(job, now_s)
                return False
            self._set_own(job, needed - job.hosted_blocks)
        return self._vacate(draft, job, needed, now_s)

    def _vacate(self, draft: Draft, job: Job, blocks: int, now_s: float) -> bool:
        """Whether the job has its first `blocks` blocks to itself. Nothing is lent here."""
        return True

    def _fits(self, job: Job) -> bool:
        """Whether its allocation fits into what is free, less the reserve."""
        return self._lacking_blocks(job) <= max(0, self._free_blocks - self._reserve_blocks)

    def _leaves_room(self, blocks: int) -> bool:
        """Whether a prompt may take so many: the head generation's allocation still fits beside it, or no
        generation waits or runs."""
        head = self._generations.first()
        if head is None:
            return blocks <= self._free_blocks
        return self._lacking_blocks(head) <= self._free_blocks - blocks

    # Generations

    def _seat(self, draft: Draft, job: Job) -> bool:
        """Start a generation if it fits."""
        if len(self._running) >= self._most_running() or not self._fits(job):
            return False
        self._start(draft, job, self._target_blocks(job))
        return True

    def _start(self, draft: Draft, job: Job, blocks: int) -> None:
        """It runs from this batch on, with `blocks` set aside for it alone."""
        self._take_out(job)
        if job.host is not None:
            self._leave_host(job)
        self._set_own(job, max(blocks, job.held_blocks))
        self._run(draft, job)

    def _run(self, draft: Draft, job: Job) -> None:
        job.stage = JobStage.RUNNING
        job.end_tokens = job.computed_tokens + job.rest_tokens
        self._running[job.task.key] = job
        self._questions.pop(job.task.key, None)
        self._draft_decode(draft, job)

    def _admit_generations(self, draft: Draft, now_s: float) -> None:
        """In order, whole groups first where groups are synced; then whatever still fits, longest first."""
        pinned = self._jobs.get(self._pinned) if self._pinned is not None else None
        if pinned is not None and pinned in self._generations:
            self._seat(draft, pinned)
        for job in self._in_order():
            if not self._take_turn(draft, now_s):
                return
            if job in self._generations:
                if not self._seat(draft, job):
                    break
                self._generation_turns.count()
        if self.ordered:
            self._fill(draft, now_s)

    def _in_order(self) -> Iterator[Job]:
        if not self.synced:
            return self._oldest_first()
        groups = (
            self._groups.by_slack(self._generations.class_of) if self.ordered else self._groups.by_arrival()
        )
        return chain.from_iterable(groups)

    def _oldest_first(self) -> Iterator[Job]:
        while (job := self._generations.first()) is not None:
            yield job

    def _take_turn(self, draft: Draft, now_s: float) -> bool:
        """An overdue generation's turn, if it is one; False when everybody has to wait for it."""
        job = self._generations.oldest_overdue()
        if job is None or not self._generation_turns.is_due():
            return True
        if self._seat(draft, job):
            self._generation_turns.take()
            return True
        return not self._generation_turns.is_starving(job, now_s)

    def _fill(self, draft: Draft, now_s: float) -> None:
        """Bucket by bucket of (slack, occupied KV), the longest bin of lengths that still fits."""
        for line in self._generations.classes:
            at: tuple[Any, ...] = ()
            while jobs := list(islice(line.starting_at(at), _OF_A_BIN)):
                if len(self._running) >= self._most_running():
                    return
                tried = [job for job in jobs if job.rank[:2] == jobs[0].rank[:2]]
                for job in tried:
                    if self._seat(draft, job):
                        self._generation_turns.count()
                at = (jobs[0].rank[0], jobs[0].rank[1] + 1)

    # Prompts

    def _admit_prompts(self, draft: Draft, now_s: float) -> None:
        """Until the forward size is reached; the last prompt is cut to land exactly. One that is partly
        prefilled comes before any other starts."""
        draft.budget_tokens = self._prompt_budget(draft)
        for job in list(self._partial.values()):
            self._add_prompt(draft, job)
        if draft.preempted or len(self._partial) > len(draft.prefills):
            return
        while (added := self._add_next_prompt(draft, now_s)) is not None:
            if draft.prefills[added.task.key][1] < added.prefill_tokens:
                return

    def _prompt_budget(self, draft: Draft) -> int:
        tfs_tokens = min(self._options.tfs_tokens or self._settings.token_budget, self._settings.token_budget)
        return max(0, tfs_tokens - len(draft.decodes))

    def _add_next_prompt(self, draft: Draft, now_s: float) -> Job | None:
        """The one whose turn it is, if it fits."""
        overdue = self._overdue_prompt() if self._prompt_turns.is_due() else None
        if overdue is not None:
            if self._add_prompt(draft, overdue):
                self._prompt_turns.take()
                return overdue
            if self._prompt_turns.is_starving(overdue, now_s):
                return None
        job = self._next_prompt()
        if job is None or not self._add_prompt(draft, job):
            return None
        self._prompt_turns.count()
        return job

    def _add_prompt(self, draft: Draft, job: Job) -> bool:
        """The next chunk of it, as much as the budget and the blocks allow."""
        chunk = self._chunk_tokens(draft, job)
        if chunk == 0 or (job in self._prompts and not self._text_fits(draft, job)):
            return False
        blocks = max(0, self._blocks(job.computed_tokens + chunk) - job.held_blocks)
        nobody = not len(self._generations) and not self._running
        if not (self._leaves_room(blocks) or (nobody and blocks <= self._free_blocks)):
            return False
        self._draft_prompt(draft, job, chunk)
        return True
