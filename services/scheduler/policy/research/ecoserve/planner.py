"""EcoServe's planner: generations fill the KV cache, prompts fill the rest of the forward size.

It has two queues (`policy/two_queues.py`) and reserves blocks at each generation's start (`admission.py`).
Starts are in order, or in groups that end together (`Groups`). A reserve serves prompts and long answers.
Pauses keep KV, and running jobs lend slots (`hosting.py`).

Variants of papers/003 §4, each adding to the one before: `ecoserve_d` → `_sd` (+ synced groups) → `_sdo` (+
ordering) → `ecoserve` (+ KVC pipelining). `ecoserve_profile` admits by profile instead of lending slots.

It differs from the paper as algorithms.md §1 explains. A paused generation's new length is E[RL − g | RL >
g]. Prompts leave room for the first ready generation. Overdue requests get a share of the admissions. Source:
papers/003 §3.2, §3.3, §3.5 (Algorithm 1).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from typing import Any

from services.scheduler.policy.batch_builder import BatchBuilder, Job, JobStage, arrival_rank
from services.scheduler.policy.contract import PlannedBatch, PolicySettings, WorkerShape
from services.scheduler.policy.lengths import LengthEstimates
from services.scheduler.policy.options import TwoQueueOptions, two_queue_options
from services.scheduler.policy.research.ecoserve.admission import (
    AdmissionRule,
    ExactAdmission,
    ProfileAdmission,
)
from services.scheduler.policy.research.ecoserve.hosting import Hosting
from services.scheduler.policy.two_queues import TwoQueuePolicy
from services.scheduler.policy.waiting_queue import AgingTurns, Line, QueueRank, WaitingQueue
from shared.messages.sequence import SequenceKey

OPTIONS = frozenset(field.name for field in fields(TwoQueueOptions)) - {"passing_share"}
GROUP_TOKENS = 32
BIN_TOKENS = 128
"""Bin width for comparing held KV and lengths."""


def _by_due(job: Job) -> tuple[Any, ...]:
    return (job.due_s, job.task.order)


def _by_occupied(job: Job) -> tuple[Any, ...]:
    return (job.computed_tokens, job.task.order)


@dataclass(slots=True)
class Group:
    members: Line[Job] = field(default_factory=lambda: Line(arrival_rank))
    due: Line[Job] = field(default_factory=lambda: Line(_by_due))
    occupied: Line[Job] = field(default_factory=lambda: Line(_by_occupied))


class Groups:
    """All ready jobs by length; a synced policy starts the jobs of a group together if they fit."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], Group] = {}
        """By priority and length."""

    def add(self, job: Job) -> None:
        group = self._groups.setdefault(_group_of(job), Group())
        for line in (group.members, group.due, group.occupied):
            line.add(job)

    def remove(self, job: Job) -> None:
        group = self._groups[_group_of(job)]
        for line in (group.members, group.due, group.occupied):
            line.remove(job)
        if not len(group.members):
            del self._groups[_group_of(job)]

    def by_arrival(self) -> list[list[Job]]:
        """Return the groups by priority and oldest member; members oldest first."""
        groups = [list(group.members) for group in self._groups.values()]
        return sorted(groups, key=lambda members: members[0].task.order)

    def by_slack(self, class_of: Callable[[float], int]) -> list[list[Job]]:
        """Return the groups by priority, slack class of the most urgent member, most held KV, length, and
        age."""

        def key(item: tuple[tuple[int, int], Group]) -> tuple[Any, ...]:
            (priority, length), group = item
            due, occupied, oldest = group.due.first(), group.occupied.last(), group.members.first()
            assert due is not None and occupied is not None and oldest is not None
            return (
                priority,
                class_of(due.due_s),
                -(occupied.computed_tokens // BIN_TOKENS),
                -(length * GROUP_TOKENS // BIN_TOKENS),
                oldest.task.order,
            )

        return [list(group.members) for _, group in sorted(self._groups.items(), key=key)]

    def check_integrity(self, jobs: set[int]) -> None:
        """Raises AssertionError unless exactly the jobs with these identities are here, in the right
        groups."""
        found: list[int] = []
        for place, group in self._groups.items():
            assert len(group.members) == len(group.due) == len(group.occupied) > 0
            assert all(_group_of(job) == place for job in group.members)
            found += [id(job) for job in group.members]
        assert len(found) == len(jobs) and set(found) == jobs


def _group_of(job: Job) -> tuple[int, int]:
    return (job.task.priority, -(-job.rest_tokens // GROUP_TOKENS))


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
    profiled = False
    """Whether the usage profile admits instead of exact allocation."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        options = two_queue_options("ecoserve", settings.options, names=OPTIONS)
        lengths = LengthEstimates(options, shape.block_tokens)
        prompts = self._make_queue(options, _prompt_rank)
        super().__init__(
            shape, settings, options, lengths, prompts, self._make_queue(options, _generation_rank)
        )
        self._admission = self._make_admission()
        self._hosting = Hosting(self._table, options.buffer)
        self._groups = Groups()
        self._prompt_turns = AgingTurns(options)
        self._generation_turns = AgingTurns(options)

    def _make_queue(self, options: TwoQueueOptions, rank: QueueRank) -> WaitingQueue:
        if not self.ordered:
            return WaitingQueue(arrival_rank)
        return WaitingQueue(rank, options.slack_edges_s, aging_s=options.aging_s)

    def _make_admission(self) -> AdmissionRule:
        if not self.profiled:
            return ExactAdmission(self._table, self._ready, lambda: self._reserve_blocks)
        return ProfileAdmission(
            self._table,
            self._ready,
            lambda: self._reserve_blocks,
            self._running,
            self._complete,
            self._lengths,
            self._questions,
        )

    def plan(self, now_s: float) -> PlannedBatch | None:
        self._prompts.advance(now_s)
        self._ready.advance(now_s)
        self._admission.begin_plan()
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

    # Places

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        shrinks = capacity_blocks < self._table.own_blocks
        super().on_resized(capacity_blocks, now_s)
        if shrinks:
            self._hosting.clear()

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        job = self._table.jobs.get(key)
        super().on_ended(key, now_s, answer_tokens)
        if job is not None:
            self._hosting.forget(job)

    def check_integrity(self) -> None:
        super().check_integrity()
        self._groups.check_integrity({id(job) for job in self._ready})
        self._hosting.check_integrity(self._ready)

    def _queue_ready(self, job: Job, now_s: float) -> None:
        super()._queue_ready(job, now_s)
        self._groups.add(job)
        if self.pipelined:
            self._hosting.note_ready(job)

    def _take_out(self, job: Job) -> None:
        if job in self._ready:
            self._groups.remove(job)
            self._hosting.note_taken(job)
        super()._take_out(job)

    def _give_back_unused(self, job: Job) -> None:
        """Drop the unused reservation; a guest keeps its place in its host."""
        self._hosting.give_back_unused(job)

    def _part(self, job: Job) -> None:
        self._hosting.leave_host(job)
        self._hosting.give_back_unused(job)

    # Generations

    def _secure(self, batch: BatchBuilder, job: Job, now_s: float) -> bool:
        """Return whether a running job may take its next token, within its reservation or with a block of the
        reserve. Otherwise it pauses with its KV (papers/003 §3.2.2)."""
        if not self._admission.goes_on(job):
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
        if self.profiled:
            return map(self._admission.room_tokens, jobs)
        size, room_blocks = self._table.block_tokens, self._hosting.room_blocks
        return (room_blocks(job) * size - job.computed_tokens for job in jobs)

    def _seat(self, batch: BatchBuilder, job: Job) -> bool:
        """Start a generation if it fits."""
        if len(self._running) >= self._most_running() or not self._admission.fits(job):
            return False
        self._start(batch, job, self._admission.start_blocks(job))
        return True

    def _start_pinned(self, batch: BatchBuilder, job: Job, needed_blocks: int) -> None:
        self._start(batch, job, self._admission.pinned_blocks(job, needed_blocks))

    def _start(self, batch: BatchBuilder, job: Job, blocks: int) -> None:
        """Start decoding in this batch, with `blocks` blocks reserved."""
        self._take_out(job)
        self._hosting.leave_host(job)
        self._table.set_own(job, max(blocks, job.held_blocks))
        self._run(batch, job)
        self._admission.note_start(job)
        if self.pipelined:
            self._hosting.open_slots(job)

    def _run(self, batch: BatchBuilder, job: Job) -> None:
        """Decode from this batch on."""
        self._take_out(job)
        job.stage = JobStage.DECODING
        job.end_tokens = job.computed_tokens + job.rest_tokens
        self._running[job.task.key] = job
        self._questions.pop(job.task.key, None)
        batch.add_decode(job)

    def _admit_generations(self, batch: BatchBuilder, now_s: float) -> None:
        """Start generations in order, groups first if synced; then the longest that fit; then guests."""
        self._admit_in_order(batch, now_s)
        if self.pipelined:
            self._hosting.fill(
                self._running,
                self._most_running(),
                self._admission.start_blocks,
                lambda guest: self._run(batch, guest),
            )

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
        if not self.synced:
            return self._oldest_first()
        groups = self._groups.by_slack(self._ready.class_of) if self.ordered else self._groups.by_arrival()
        return chain.from_iterable(groups)

    def _oldest_first(self) -> Iterator[Job]:
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
            while jobs := list(islice(line.starting_at(at), _OF_A_BIN)):
                if len(self._running) >= self._most_running():
                    return
                tried = [job for job in jobs if job.rank[:2] == jobs[0].rank[:2]]
                for job in tried:
                    if self._seat(batch, job):
                        self._generation_turns.count()
                at = (jobs[0].rank[0], jobs[0].rank[1] + 1)

    # Prompts

    def _admit_prompts(self, batch: BatchBuilder, now_s: float) -> None:
        """Add prompts up to the forward size, partly prefilled ones first; the last one is cut to fit."""
        batch.budget_tokens = self._prompt_budget(batch)
        for job in list(self._partial.values()):
            self._add_prompt(batch, job)
        if batch.preemptions or len(self._partial) > len(batch.prefills):
            return
        while (added := self._add_next_prompt(batch, now_s)) is not None:
            if batch.prefills[added.task.key][1] < added.prefill_tokens:
                return

    def _prompt_budget(self, batch: BatchBuilder) -> int:
        most = self._settings.token_budget
        return max(0, min(self._options.tfs_tokens or most, most) - len(batch.decodes))

    def _add_next_prompt(self, batch: BatchBuilder, now_s: float) -> Job | None:
        """Add the next prompt and return it, or None if it does not fit."""
        overdue = self._overdue_prompt() if self._prompt_turns.is_due() else None
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
        if not (self._admission.leaves_room(blocks) or (nobody and blocks <= self._table.free_blocks)):
            return False
        self._add_chunk(batch, job, chunk)
        self._admission.note_prompt(job.held_blocks - held)
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


class EcoServeProfile(EcoServeD):
    """`ecoserve_profile`: like `ecoserve_sdo`, with admission by profile instead of exact allocation."""

    synced = ordered = profiled = True
