"""EcoServe's planner: generations fill the KV cache, prompts fill the rest of the forward size.

Blocks up to the predicted end are reserved at each generation's start. Variants of papers/003 §4, each adding
to the one before: `ecoserve_d` → `_sd` (+ synced groups) → `_sdo` (+ ordering) → `ecoserve` (+ KVC
pipelining). Source: papers/003 §3.2, §3.3, §3.5 (Algorithm 1); algorithms.md §1 (differences).

    16 blocks of 4 tokens are free; 44 tokens more are predicted for a, then 24 for b → a owns 11, b has to
    wait for the sixth block.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from itertools import chain, islice
from typing import Any

from services.scheduler.policy.batch_builder import BatchBuilder, Job, JobStage, arrival_rank
from services.scheduler.policy.contract import PlannedBatch, PolicySettings, WorkerShape
from services.scheduler.policy.estimates import LengthEstimates
from services.scheduler.policy.options import TwoQueueOptions, two_queue_options
from services.scheduler.policy.research.ecoserve.hosting import Hosting, open_slots
from services.scheduler.policy.two_queues import TwoQueuePolicy
from services.scheduler.policy.waiting_queue import QueueRank, WaitingQueue
from shared.messages.sequence import SequenceKey

OPTIONS = frozenset(field.name for field in fields(TwoQueueOptions)) - {"passing_share"}
GROUP_TOKENS = 32
BIN_TOKENS = 128
"""Bin width for comparing held KV and lengths."""


def groups_of(ready: Iterable[Job], class_of: Callable[[float], int] | None = None) -> list[list[Job]]:
    """Return ready jobs, given by arrival, in groups of equal priority and length, each oldest first.

    The groups are in order of their oldest jobs, or, with `class_of`, by priority, slack class of the most
    urgent job, most held KV, length, and age."""
    groups: dict[tuple[int, int], list[Job]] = {}
    for job in ready:
        groups.setdefault((job.task.priority, -(-job.rest_tokens // GROUP_TOKENS)), []).append(job)
    if class_of is None:
        return list(groups.values())

    def key(item: tuple[tuple[int, int], list[Job]]) -> tuple[Any, ...]:
        (priority, length), jobs = item
        return (
            priority,
            class_of(min([job.due_s for job in jobs])),
            -(max([job.computed_tokens for job in jobs]) // BIN_TOKENS),
            -(length * GROUP_TOKENS // BIN_TOKENS),
            jobs[0].task.order,
        )

    return [jobs for _, jobs in sorted(groups.items(), key=key)]


_STARVING = 4


class AgingTurns:
    """Turns of one queue: by order, or, for a fixed share, the oldest overdue job. None are saved."""

    def __init__(self, options: TwoQueueOptions) -> None:
        self._aging_s = options.aging_s
        self._others = max(0.0, 1 / options.aging_share - 1)
        """Admissions by order per admission by age."""
        self._since = 0.0

    def count(self) -> None:
        """Count an admission by order."""
        self._since = min(self._since + 1, 2 * self._others)

    def is_due(self) -> bool:
        return self._since >= self._others

    def take(self) -> None:
        """Count an admission by age."""
        self._since = max(0.0, self._since - self._others)

    def is_starving(self, job: Job, now_s: float) -> bool:
        """Return whether the job is so late that no other may pass it."""
        return now_s > job.deadline_s + _STARVING * self._aging_s


_OF_A_BIN = 8
"""Number of jobs of one length bin to try before shorter ones."""


def _prompt_rank(job: Job) -> tuple[Any, ...]:
    """Return the key within a slack class: longest prompt first, in bins of 128."""
    return (-(job.prefill_tokens // BIN_TOKENS), *job.task.order)


def _generation_rank(job: Job) -> tuple[Any, ...]:
    """Return the key within a slack class: most held KV, then longest rest, in bins of 128."""
    return (-(job.computed_tokens // BIN_TOKENS), -(job.rest_tokens // BIN_TOKENS), *job.task.order)


class EcoServeD(TwoQueuePolicy):
    """`ecoserve_d`: decoupled queues, first come first served, exact allocation. Subclasses enable parts."""

    synced = False
    """Whether ready jobs that should end together start together."""
    ordered = False
    """Whether queues go by slack, held KV and length instead of arrival."""
    pipelined = False
    """Whether running jobs lend their last blocks to shorter ones."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        options = two_queue_options("ecoserve", settings.options, names=OPTIONS)
        lengths = LengthEstimates(options, shape.block_tokens)
        prompts = self._make_queue(options, _prompt_rank)
        super().__init__(
            shape, settings, options, lengths, prompts, self._make_queue(options, _generation_rank)
        )
        self._hosting = Hosting(self._table, options.buffer)
        self._prompt_turns = AgingTurns(options)
        self._generation_turns = AgingTurns(options)

    def _make_queue(self, options: TwoQueueOptions, rank: QueueRank) -> WaitingQueue:
        if not self.ordered:
            return WaitingQueue(arrival_rank)
        return WaitingQueue(rank, options.slack_edges_s, aging_s=options.aging_s)

    def _goes_on(self, job: Job) -> bool:
        """Return whether a running job's predicted end allows another token."""
        return True

    def _fits(self, job: Job) -> bool:
        """Return whether a ready job fits the free blocks minus the reserve."""
        return self._lacking_blocks(job) <= max(0, self._table.free_blocks - self._reserve_blocks)

    def _start_blocks(self, job: Job) -> int:
        """Return the blocks to reserve at a start: up to the predicted end, at most an empty worker's."""
        target = self._table.blocks_for(job.computed_tokens + job.rest_tokens)
        clamped = min(target, self._table.capacity_blocks - self._reserve_blocks)
        return max(clamped, job.held_blocks, self._table.blocks_for(job.computed_tokens + 1))

    def _pinned_blocks(self, job: Job, needed_blocks: int) -> int:
        """Return the total blocks to reserve for a pinned job, which needs `needed_blocks` beyond its own."""
        lacking = min(self._lacking_blocks(job), self._table.free_blocks)
        return job.own_blocks + max(needed_blocks, lacking)

    def _leaves_room(self, blocks: int) -> bool:
        """Return whether a prompt may take `blocks` blocks.

        While generations wait, they and new prompts hold the reserve at most (papers/003 §2.3), and the first
        still fits. Otherwise waiting KV fills the memory until hardly a generation runs, and it stays so.
        """
        head, room = self._ready.first(), self._table.free_blocks
        if head is not None:
            waiting = sum(job.held_blocks for job in self._ready)
            room = min(self._reserve_blocks - waiting, room - self._lacking_blocks(head))
        return blocks <= room

    def _lacking_blocks(self, job: Job) -> int:
        return max(0, self._start_blocks(job) - job.own_blocks)

    def plan(self, now_s: float) -> PlannedBatch | None:
        self._prompts.advance(now_s)
        self._ready.advance(now_s)
        batch = BatchBuilder(self._table, self._settings)
        self._shed(batch, now_s)
        for job in list(self._running.values()):
            if job.stage is JobStage.DECODING and self._secure(batch, job, now_s):
                batch.add_decode(job)
        if len(self._ready) and self._table.changed:
            self._table.changed = False
            self._admit_generations(batch, now_s)
        self._admit_prompts(batch, now_s)
        if not (batch or self._complete):
            self._rescue(batch, now_s)
        return self._finish(batch, now_s)

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        shrinks = capacity_blocks < self._table.own_blocks
        super().on_resized(capacity_blocks, now_s)
        if shrinks:
            self._hosting.clear()

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        super().on_ended(key, now_s, answer_tokens)
        self._hosting.lodgings.pop(key, None)

    def check_integrity(self) -> None:
        super().check_integrity()
        self._hosting.check_integrity(self._ready)

    def _queue_ready(self, job: Job, now_s: float) -> None:
        super()._queue_ready(job, now_s)
        if self.pipelined and not self._hosting.is_guest(job):
            self._hosting.by_rest.add(job)

    def _take_out(self, job: Job) -> None:
        if job in self._ready:
            self._hosting.by_rest.discard(job)
        super()._take_out(job)

    def _give_back_unused(self, job: Job, *, leaves: bool = False) -> None:
        """Drop the unused reservation; a guest keeps its place in its host, unless it leaves."""
        if leaves:
            self._hosting.leave_host(job)
        self._hosting.give_back_unused(job)

    def _secure(self, batch: BatchBuilder, job: Job, now_s: float) -> bool:
        """Return whether a running job may take its next token. Otherwise it pauses with its KV."""
        if not self._goes_on(job):
            self._pause(job, now_s)
            return False
        needed = self._table.blocks_for(job.computed_tokens + 1)
        if needed <= job.held_blocks:
            return True
        if needed > job.reserved_blocks:
            if needed - job.reserved_blocks > self._table.free_blocks:
                self._pause(job, now_s)
                return False
            self._table.set_own(job, needed - job.hosted_blocks)
        return self._hosting.vacate(job, needed, lambda guest: self._evict(batch, guest, now_s))

    def _rooms(self, jobs: Iterable[Job]) -> Iterator[int]:
        size, room_blocks = self._table.block_tokens, self._hosting.room_blocks
        return (room_blocks(job) * size - job.computed_tokens for job in jobs)

    def _seat(self, batch: BatchBuilder, job: Job) -> bool:
        """Start a generation if it fits."""
        if len(self._running) >= self._most_running or not self._fits(job):
            return False
        self._start(batch, job, self._start_blocks(job))
        return True

    def _start_pinned(self, batch: BatchBuilder, job: Job, needed_blocks: int) -> None:
        self._start(batch, job, self._pinned_blocks(job, needed_blocks))

    def _start(self, batch: BatchBuilder, job: Job, blocks: int) -> None:
        """Start decoding in this batch, with `blocks` blocks reserved."""
        self._take_out(job)
        self._hosting.leave_host(job)
        self._table.set_own(job, max(blocks, job.held_blocks))
        self._run(batch, job)
        if self.pipelined:
            open_slots(self._hosting.lodging_of(job))

    def _run(self, batch: BatchBuilder, job: Job) -> None:
        super()._run(batch, job)
        self._questions.pop(job.task.key, None)

    def _admit_generations(self, batch: BatchBuilder, now_s: float) -> None:
        """Start generations in order, groups first if synced; then the longest that fit; then guests."""
        self._admit_in_order(batch, now_s)
        if self.pipelined:
            most, start = self._most_running, partial(self._run, batch)
            self._hosting.fill(self._running, most, self._start_blocks, start)

    def _admit_in_order(self, batch: BatchBuilder, now_s: float) -> None:
        pinned = self._table.jobs.get(self._pinned) if self._pinned is not None else None
        if pinned is not None and pinned in self._ready:
            self._seat(batch, pinned)
        for job in self._in_order():
            if not self._take_turn(batch, now_s):
                return
            if job in self._ready:
                if not self._seat(batch, job):
                    break
                self._generation_turns.count()
        if self.ordered:
            self._fill(batch)

    def _in_order(self) -> Iterator[Job]:
        if self.synced:
            class_of = self._ready.class_of if self.ordered else None
            yield from chain.from_iterable(groups_of(self._ready.by_arrival, class_of))
            return
        while (job := self._ready.first()) is not None:
            yield job

    def _take_turn(self, batch: BatchBuilder, now_s: float) -> bool:
        """Start an overdue generation if it is due. Return False if all others must wait for it."""
        job = self._ready.oldest_overdue()
        if job is None or not self._generation_turns.is_due():
            return True
        if self._seat(batch, job):
            self._generation_turns.take()
            return True
        return not self._generation_turns.is_starving(job, now_s)

    def _fill(self, batch: BatchBuilder) -> None:
        """Start the longest generations that still fit, by slack and held KV."""
        for line in self._ready.classes():
            at: tuple[Any, ...] = ()
            while jobs := list(islice(line.irange_key(at), _OF_A_BIN)):
                if len(self._running) >= self._most_running:
                    return
                for job in [job for job in jobs if job.rank[:2] == jobs[0].rank[:2]]:
                    if self._seat(batch, job):
                        self._generation_turns.count()
                at = (jobs[0].rank[0], jobs[0].rank[1] + 1)

    def _admit_prompts(self, batch: BatchBuilder, now_s: float) -> None:
        """Add prompts up to the forward size, partly prefilled ones first; the last one is cut to fit."""
        most = self._settings.token_budget
        batch.budget_tokens = max(0, min(self._options.tfs_tokens or most, most) - len(batch.decodes))
        for job in list(self._partial.values()):
            self._add_prompt(batch, job)
        if batch.preemptions or len(self._partial) > len(batch.prefills):
            return
        while (added := self._add_next_prompt(batch, now_s)) is not None:
            if batch.prefills[added.task.key][1] < added.prefill_tokens:
                return

    def _add_next_prompt(self, batch: BatchBuilder, now_s: float) -> Job | None:
        """Add the next prompt and return it, or None if it does not fit."""
        overdue = self._fitting(self._prompts.oldest_overdue) if self._prompt_turns.is_due() else None
        if overdue is not None:
            if self._add_prompt(batch, overdue):
                self._prompt_turns.take()
                return overdue
            if self._prompt_turns.is_starving(overdue, now_s):
                return None
        job = self._next_prompt()
        if job is None or not self._add_prompt(batch, job):
            return None
        self._prompt_turns.count()
        return job

    def _add_prompt(self, batch: BatchBuilder, job: Job) -> bool:
        """Add the prompt's next chunk as far as budget and blocks allow; return whether any."""
        chunk = batch.chunk_tokens(job)
        if chunk == 0 or (job.stage is JobStage.WAITING and not batch.text_fits(job)):
            return False
        held = job.held_blocks
        blocks = max(0, self._table.blocks_for(job.computed_tokens + chunk) - held)
        nobody = not len(self._ready) and not self._running
        if not (self._leaves_room(blocks) or (nobody and blocks <= self._table.free_blocks)):
            return False
        self._add_chunk(batch, job, chunk)
        return True


class EcoServeSD(EcoServeD):
    """`ecoserve_sd`: adds groups that end together (Time-Synced Batching, papers/003 §3.2.2)."""

    synced = True


class EcoServeSDO(EcoServeD):
    """`ecoserve_sdo`: adds ordering by slack, held KV and length (papers/003 §3.3)."""

    synced = ordered = True


class EcoServe(EcoServeD):
    """`ecoserve`: adds lending of blocks that are not needed yet (KVC pipelining, papers/003 §3.4)."""

    synced = ordered = pipelined = True
