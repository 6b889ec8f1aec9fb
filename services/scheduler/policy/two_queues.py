"""What policies with two queues have in common: prompts wait in one, prefilled jobs in the other.

`TwoQueuePolicy` takes the events of `contract.BatchPolicy`, keeps every job of the table in one place, and
keeps predicted lengths and deadlines beside it. A policy says in which order jobs start, what may start, and
what is set aside (`plan`, `_start_pinned`). What was adopted with KV joins the ready queue like a paused
one, so that its reservation is made anew by the policy's rule.

Here too is what is done where nothing moves, or where a worker shrank: the newest holders give up their KV.
If nothing runs and nothing can start, the oldest unfinished holder is pinned until it ends, and others are
evicted, half-prefilled prompts included. What is evicted keeps its tokens and is prefilled again, so every
answer grows monotonically and the pinned one always ends.

    8 blocks, a and b hold 4 each and need a fifth → a is pinned, b is evicted; a ends; b is prefilled again

Source: papers/003 §3.2.1 (two queues); algorithms.md §1 (liveness).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import chain
from math import ceil

from services.scheduler.policy.batch_builder import BatchBuilder, Job, JobStage, JobTable, arrival_rank
from services.scheduler.policy.contract import (
    Holding,
    PlannedBatch,
    PlannedQuestion,
    PolicySettings,
    Task,
    WorkerShape,
)
from services.scheduler.policy.lengths import LengthEstimates, WorkerSpeeds
from services.scheduler.policy.options import TwoQueueOptions
from services.scheduler.policy.waiting_queue import WaitingQueue
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class TwoQueuePolicy(ABC):
    """One worker's batches, but for `plan`. A subclass fulfils `contract.BatchPolicy`."""

    def __init__(
        self,
        shape: WorkerShape,
        settings: PolicySettings,
        options: TwoQueueOptions,
        lengths: LengthEstimates,
        prompts: WaitingQueue,
        ready: WaitingQueue,
    ) -> None:
        self._settings = settings
        self._options = options
        self._table = JobTable(shape)
        self._lengths = lengths
        self._speeds = WorkerSpeeds()
        self._prompts = prompts
        self._oversized: dict[SequenceKey, Job] = {}
        """Prompts that could never end here as small as the worker is now."""
        self._partial: dict[SequenceKey, Job] = {}
        """Partly prefilled; more than one only after an adoption."""
        self._ready = ready
        self._running: dict[SequenceKey, Job] = {}
        self._complete: dict[SequenceKey, Job] = {}
        self._questions: dict[SequenceKey, int] = {}
        """Whose length is to be predicted anew, with the tokens it has."""
        self._pinned: SequenceKey | None = None

    @abstractmethod
    def plan(self, now_s: float) -> PlannedBatch | None:
        """See `contract.BatchPolicy`."""

    @abstractmethod
    def _start_pinned(self, batch: BatchBuilder, job: Job, needed_blocks: int) -> None:
        """A ready job runs from this batch on; `needed_blocks` more than its own are free."""

    # Events

    def on_arrival(self, task: Task, now_s: float) -> None:
        job = self._table.add(task)
        if job is not None:
            self._fix_deadline(job)
            self._queue_prompt(job, now_s)

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        job = self._table.add(task, holding)
        if job is None:
            return
        self._fix_deadline(job)
        if job.is_prompt:
            self._queue_prompt(job, now_s)
        elif job.stage is JobStage.READY:
            self._queue_ready(job, now_s)
        else:
            self._put_complete(job)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        job = self._table.jobs.get(key)
        if job is not None:
            self._take_out(job)
            self._part(job)
            self._table.remove(job)
            self._questions.pop(key, None)
            if self._pinned == key:
                self._pinned = None

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        job = self._table.jobs.get(key)
        if job is None or job.stage is JobStage.PREFILLING or missing_tokens <= 0:
            return
        self._take_out(job)
        self._table.take_back(job, missing_tokens)
        if job.stage is JobStage.WAITING:
            self._queue_prompt(job, now_s)
        elif job.stage is JobStage.READY:
            self._queue_ready(job, now_s)
        else:
            self._running[key] = job
            job.end_tokens = max(job.end_tokens, job.computed_tokens + 1)

    def on_prefix_hit(self, key: SequenceKey, cached_tokens: int, now_s: float) -> None:
        if key in self._partial:
            self._table.note_prefix_hit(self._partial[key], cached_tokens)

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        """Where less is left than is set aside, whatever runs asks for its reservation anew."""
        self._table.capacity_blocks = capacity_blocks
        self._table.changed = True
        for job in [job for job in self._oversized.values() if not self._table.is_oversized(job)]:
            del self._oversized[job.task.key]
            self._prompts.add(job, now_s)
        if self._table.free_blocks < 0:
            for job in list(self._running.values()):
                self._pause(job, now_s)
            for job in self._table.jobs.values():
                self._table.set_own(job, job.held_blocks)

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, now_s: float) -> None:
        self._speeds.on_measured(prefill_tokens_per_s, decode_step_s)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        """The deadline follows the first prediction; where it waits, and when it ends, follow each."""
        job = self._table.jobs.get(key)
        if job is None:
            return
        is_queued = job in self._prompts, job in self._ready
        if any(is_queued):
            self._take_out(job)
        job.prediction = prediction
        if job.first_prediction is None:
            job.first_prediction = prediction
            self._fix_deadline(job)
        if is_queued[0]:
            self._queue_prompt(job, now_s)
        elif is_queued[1]:
            self._queue_ready(job, now_s)
        elif job.stage is not JobStage.COMPLETE:
            self._estimate_rest(job)
            now = job.prefill_tokens if job.is_prompt else job.computed_tokens
            job.end_tokens = now + job.rest_tokens
            self._table.changed = True

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance, or a job is not in exactly one place. Where
        less is left than is held (while a load that was given up still writes, its blocks are nobody's), one
        that came short may run with what it holds; nothing is promised beyond that."""
        table = self._table
        table.check_integrity()
        promises_more = table.own_blocks > max(table.capacity_blocks, table.held_blocks)
        assert not promises_more or not self._running, "promised more than there is"
        self._prompts.check_integrity()
        self._ready.check_integrity()
        for key, job in table.jobs.items():
            places = (self._partial, self._oversized, self._running, self._complete)
            queued = [job in self._prompts, job in self._ready]
            assert sum([*queued, *(key in place for place in places)]) == 1, f"{key} is not in one place"
            assert queued[1] == (job.stage is JobStage.READY)
            assert (key in self._partial) == (job.stage is JobStage.PREFILLING)
            assert (key in self._running) == (job.stage is JobStage.DECODING)
            assert (key in self._complete) == (job.stage is JobStage.COMPLETE)

    # What is expected

    @property
    def _reserve_blocks(self) -> int:
        """Kept for prompts and for answers longer than predicted."""
        return ceil(self._options.reserve_ratio * self._table.capacity_blocks)

    def _fix_deadline(self, job: Job) -> None:
        tokens = self._lengths.whole_tokens(job.prediction, job.task.max_tokens)
        job.deadline_s = self._speeds.deadline_s(job.task, tokens, self._options.slo_scale)

    def _estimate_rest(self, job: Job) -> None:
        job.rest_tokens = self._lengths.rest_tokens(job.prediction, job.generated_tokens, job.task.max_tokens)

    def _set_due(self, job: Job) -> None:
        """What the slack classes count down to."""
        job.due_s = job.deadline_s

    # From place to place

    def _queue_prompt(self, job: Job, now_s: float) -> None:
        self._estimate_rest(job)
        self._set_due(job)
        if job.stage is JobStage.PREFILLING:
            self._partial[job.task.key] = job
        elif self._table.is_oversized(job):
            self._oversized[job.task.key] = job
        else:
            self._prompts.add(job, now_s)
        self._table.changed = True

    def _queue_ready(self, job: Job, now_s: float) -> None:
        job.stage = JobStage.READY
        self._estimate_rest(job)
        self._set_due(job)
        self._ready.add(job, now_s)
        self._table.changed = True

    def _put_complete(self, job: Job) -> None:
        """Planned to its limit: what it will not need is free."""
        self._take_out(job)
        self._give_back_unused(job)
        self._complete[job.task.key] = job

    def _take_out(self, job: Job) -> None:
        """From where it stands; its blocks are untouched. Most of those that are asked for run."""
        key = job.task.key
        if self._running.pop(key, None) is not None:
            return
        if job in self._prompts:
            self._prompts.remove(job)
        elif job in self._ready:
            self._ready.remove(job)
        else:
            for place in (self._partial, self._oversized, self._complete):
                place.pop(key, None)

    def _pause(self, job: Job, now_s: float) -> None:
        """Keeps its KV, gives back the rest, and asks how long it will go on."""
        self._take_out(job)
        self._give_back_unused(job)
        self._questions[job.task.key] = job.generated_tokens
        self._queue_ready(job, now_s)

    def _give_back_unused(self, job: Job) -> None:
        """It needs no more than it holds."""
        self._table.set_own(job, job.held_blocks)

    def _part(self, job: Job) -> None:
        """Before it gives up everything: nothing of it may still depend on others, or they on it."""
        self._give_back_unused(job)

    # A batch

    def _most_running(self) -> int:
        """All that run get a token in each step."""
        return min(self._settings.max_batch_sequences, self._settings.token_budget)

    def _add_chunk(self, batch: BatchBuilder, job: Job, chunk_tokens: int) -> None:
        """The next chunk of a prompt; its blocks are held from now on."""
        batch.add_chunk(job, chunk_tokens)
        if job.stage is JobStage.WAITING:
            self._prompts.remove(job)
            self._partial[job.task.key] = job
            job.stage = JobStage.PREFILLING
        blocks = self._table.blocks_for(job.computed_tokens + chunk_tokens)
        self._table.hold(job, max(job.held_blocks, blocks))

    def _next_prompt(self) -> Job | None:
        """The first that waits; those too large for the worker as it is now are put aside."""
        while (job := self._prompts.first()) is not None and self._table.is_oversized(job):
            self._put_aside(job)
        return job

    def _overdue_prompt(self) -> Job | None:
        """The oldest prompt that is long overdue and could end here."""
        while (job := self._prompts.oldest_overdue()) is not None and self._table.is_oversized(job):
            self._put_aside(job)
        return job

    def _put_aside(self, job: Job) -> None:
        """A waiting prompt that could never end here must not hold anybody up."""
        self._prompts.remove(job)
        self._oversized[job.task.key] = job

    def _evict(self, batch: BatchBuilder, job: Job, now_s: float) -> None:
        """It gives up all it holds; its tokens are to be computed again."""
        batch.preempt(job)
        self._take_out(job)
        self._part(job)
        self._table.clear(job)
        self._queue_prompt(job, now_s)

    def _finish(self, batch: BatchBuilder, now_s: float) -> PlannedBatch | None:
        """Project the batch, and put every job of it where it stands after it; None for an empty one."""
        if not batch:
            return None
        questions = [PlannedQuestion(key, tokens) for key, tokens in self._questions.items()]
        planned = batch.build(self._steps(batch), questions)
        self._questions.clear()
        for job in batch.prompts:
            if job.stage is JobStage.COMPLETE:
                self._put_complete(job)
            elif job.stage is JobStage.DECODING:
                self._take_out(job)
                self._prefilled(job, now_s)
        for job in batch.complete:
            self._put_complete(job)
        return planned

    def _prefilled(self, job: Job, now_s: float) -> None:
        """Its prefill is over: it waits until it may decode (papers/003 §3.2.1)."""
        self._queue_ready(job, now_s)

    def _steps(self, batch: BatchBuilder) -> int:
        """The most steps in which nothing can change, nobody outgrows its room and the blocks last."""
        if batch.prefills or batch.preemptions or self._partial or len(self._ready):
            return 1
        waits = self._next_prompt() is not None
        steps = self._settings.max_steps
        if waits:
            steps = min(steps, self._steps_beside_waiting())
        if steps <= 1:
            return 1
        most = 0
        jobs = batch.decodes.values()
        for job, room in zip(jobs, self._rooms(jobs), strict=True):
            missing = job.task.max_tokens - job.generated_tokens
            if missing > most:
                most = missing
            if room < missing:
                steps = min(steps, room)
            elif waits:
                steps = min(steps, missing)
            if steps <= 1:
                return 1
        return batch.steps_that_fit(min(steps, most))

    def _steps_beside_waiting(self) -> int:
        """How far a plan may reach while prompts wait that did not fit."""
        return 1

    def _rooms(self, jobs: Iterable[Job]) -> Iterator[int]:
        """Of each: tokens until it has to ask for blocks, or is looked at again."""
        size = self._table.block_tokens
        return (job.reserved_blocks * size - job.computed_tokens for job in jobs)

    # Where nothing moves

    def _shed(self, batch: BatchBuilder, now_s: float) -> None:
        """Give back what a shrunken worker no longer has, newest first."""
        if self._table.free_blocks < 0:
            for victim in self._holders()[::-1]:
                if self._table.free_blocks >= 0:
                    return
                self._evict(batch, victim, now_s)

    def _holders(self) -> list[Job]:
        """Who holds KV and does not run, oldest first."""
        return sorted(chain(self._partial.values(), self._ready), key=arrival_rank)

    def _rescue(self, batch: BatchBuilder, now_s: float) -> None:
        """Nothing runs and nothing can start: the oldest holder is pinned until it ends, and others give
        up what they hold, newest first, as far as it takes."""
        holders = self._holders()
        if not holders:
            return
        pinned = self._table.jobs.get(self._pinned) if self._pinned is not None else None
        pinned = pinned if pinned in holders else holders[0]
        assert pinned is not None
        self._pinned = pinned.task.key
        needed = max(0, self._needed_blocks(pinned) - pinned.own_blocks)
        for victim in holders[::-1]:
            if self._table.free_blocks >= needed:
                break
            if victim is not pinned:
                self._evict(batch, victim, now_s)
        if self._table.free_blocks < needed:
            self._evict(batch, pinned, now_s)
        elif pinned.stage is JobStage.READY:
            self._start_pinned(batch, pinned, needed)
        else:
            self._prefill_pinned(batch, pinned)

    def _needed_blocks(self, job: Job) -> int:
        """To do anything at all."""
        whole = job.is_prompt and not self._settings.chunked_prefill
        return self._table.blocks_for(job.prefill_tokens if whole else job.computed_tokens + 1)

    def _prefill_pinned(self, batch: BatchBuilder, job: Job) -> None:
        """As much of its prompt as the free blocks take."""
        blocks = job.held_blocks + self._table.free_blocks
        room = blocks * self._table.block_tokens - job.computed_tokens
        batch.budget_tokens = self._settings.token_budget
        chunk = min(batch.chunk_tokens(job), room)
        if chunk > 0:
            self._add_chunk(batch, job, chunk)
