"""Base of the policies with two queues: one for prompts, one for prefilled ("ready") jobs.

It handles the events, job places, predicted lengths and deadlines. If nothing runs and nothing can start, the
oldest unfinished holder is pinned until it ends, and others are evicted, newest first. Source: papers/003
§3.2.1 (two queues); algorithms.md §1 (liveness).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, starmap
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
from services.scheduler.policy.estimates import LengthEstimates, WorkerSpeeds
from services.scheduler.policy.options import TwoQueueOptions
from services.scheduler.policy.waiting_queue import WaitingQueue
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class TwoQueuePolicy(ABC):
    """Handles the events of one worker; a subclass adds `plan` and satisfies `contract.BatchPolicy`."""

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
        """Prompts that cannot end at the worker's present size."""
        self._partial: dict[SequenceKey, Job] = {}
        """Partly prefilled jobs; more than one only after an adoption."""
        self._ready = ready
        self._running: dict[SequenceKey, Job] = {}
        self._complete: dict[SequenceKey, Job] = {}
        self._questions: dict[SequenceKey, int] = {}
        """Sequences to predict again, with their generated tokens."""
        self._pinned: SequenceKey | None = None
        self._most_running = min(settings.max_batch_sequences, settings.token_budget)
        """Limit of running jobs, so that each gets a token in every step."""

    @abstractmethod
    def plan(self, now_s: float) -> PlannedBatch | None:
        """See `contract.BatchPolicy`."""

    @abstractmethod
    def _start_pinned(self, batch: BatchBuilder, job: Job, needed_blocks: int) -> None:
        """Start a ready job in this batch; `needed_blocks` beyond its own are free."""

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
            self._give_back_unused(job, leaves=True)
            self._table.remove(job)
            self._questions.pop(key, None)
            if self._pinned == key:
                self._pinned = None

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        if missing_tokens > 0 and key in self._running:  # as in `_correct`; a hot path
            job = self._running[key] = self._running.pop(key)
            self._table.take_back(job, missing_tokens)
            job.end_tokens = max(job.end_tokens, job.computed_tokens + 1)
        elif missing_tokens > 0:
            self._correct(key, lambda job: self._table.take_back(job, missing_tokens), now_s)

    def _correct(self, key: SequenceKey, change: Callable[[Job], None], now_s: float) -> None:
        """Change a job's tokens, and put it where it belongs then."""
        job = self._table.jobs.get(key)
        if job is None or job.stage is JobStage.PREFILLING:
            return
        self._take_out(job)
        change(job)
        if job.stage is JobStage.WAITING:
            self._queue_prompt(job, now_s)
        elif job.stage is JobStage.READY:
            self._queue_ready(job, now_s)
        elif job.stage is JobStage.COMPLETE:
            self._put_complete(job)
        else:
            self._running[key] = job
            job.end_tokens = max(job.end_tokens, job.computed_tokens + 1)

    def on_prefix_hit(self, key: SequenceKey, cached_tokens: int, now_s: float) -> None:
        if key in self._partial:
            self._table.note_prefix_hit(self._partial[key], cached_tokens)

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        """Set the capacity. If more is reserved than is left, every running job must reserve again."""
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
        """Update place and expected end; only the first prediction sets the deadline."""
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
        """Raises AssertionError when accounts do not balance or a job is not in exactly one place."""
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

    @property
    def _reserve_blocks(self) -> int:
        """Blocks kept for prompts and for answers longer than predicted."""
        return ceil(self._options.reserve_ratio * self._table.capacity_blocks)

    def _fix_deadline(self, job: Job) -> None:
        tokens = self._lengths.whole_tokens(job.prediction, job.task.max_tokens)
        job.deadline_s = self._speeds.deadline_s(job.task, tokens, self._options.slo_scale)

    def _estimate_rest(self, job: Job) -> None:
        job.rest_tokens = self._lengths.rest_tokens(job.prediction, job.generated_tokens, job.task.max_tokens)

    def _due_s(self, job: Job) -> float:
        """Return the time that the slack classes count down to."""
        return job.deadline_s

    def _queue_prompt(self, job: Job, now_s: float) -> None:
        self._estimate_rest(job)
        job.due_s = self._due_s(job)
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
        job.due_s = self._due_s(job)
        self._ready.add(job, now_s)
        self._table.changed = True

    def _put_complete(self, job: Job) -> None:
        """Move a job that is planned to its limit, and free its unused blocks."""
        self._take_out(job)
        self._give_back_unused(job)
        self._complete[job.task.key] = job

    def _take_out(self, job: Job) -> None:
        """Remove the job from its place; its blocks stay. The common case, a running job, comes first."""
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
        """Return the job to the ready queue with its KV alone, and ask for a new prediction."""
        self._take_out(job)
        self._give_back_unused(job)
        self._questions[job.task.key] = job.generated_tokens
        self._queue_ready(job, now_s)

    def _give_back_unused(self, job: Job, *, leaves: bool = False) -> None:
        """Drop the reservation beyond the held blocks. `leaves`: these will be freed too."""
        self._table.set_own(job, job.held_blocks)

    def _add_chunk(self, batch: BatchBuilder, job: Job, chunk_tokens: int) -> None:
        """Add the next chunk of a prompt and hold its blocks."""
        batch.add_chunk(job, chunk_tokens)
        if job.stage is JobStage.WAITING:
            self._prompts.remove(job)
            self._partial[job.task.key] = job
            job.stage = JobStage.PREFILLING
        blocks = self._table.blocks_for(job.computed_tokens + chunk_tokens)
        self._table.hold(job, max(job.held_blocks, blocks))

    def _next_prompt(self) -> Job | None:
        return self._fitting(self._prompts.first)

    def _fitting(self, first: Callable[[], Job | None]) -> Job | None:
        """Return the first waiting prompt, after setting aside those that cannot end here."""
        while (job := first()) is not None and self._table.is_oversized(job):
            self._put_aside(job)
        return job

    def _put_aside(self, job: Job) -> None:
        self._prompts.remove(job)
        self._oversized[job.task.key] = job

    def _evict(self, batch: BatchBuilder, job: Job, now_s: float) -> None:
        """Preempt the job and queue it for recomputation."""
        batch.preempt(job)
        self._take_out(job)
        self._give_back_unused(job, leaves=True)
        self._table.clear(job)
        self._queue_prompt(job, now_s)

    def _run(self, batch: BatchBuilder, job: Job) -> None:
        """Decode from this batch on."""
        self._take_out(job)
        job.stage = JobStage.DECODING
        job.end_tokens = job.computed_tokens + job.rest_tokens
        self._running[job.task.key] = job
        batch.add_decode(job)

    def _finish(self, batch: BatchBuilder, now_s: float) -> PlannedBatch | None:
        """Apply the batch to the projection and move its jobs; return None for an empty batch."""
        if not batch:
            return None
        questions = starmap(PlannedQuestion, self._questions.items())
        planned = batch.build(self._steps(batch), questions)
        self._questions.clear()
        for job, _ in batch.prefills.values():
            if job.stage is JobStage.COMPLETE:
                self._put_complete(job)
            elif job.stage is JobStage.DECODING:
                self._take_out(job)
                self._prefilled(job, now_s)
        for job in batch.complete:
            self._put_complete(job)
        return planned

    def _prefilled(self, job: Job, now_s: float) -> None:
        """Queue a job whose prefill is complete until it may decode (papers/003 §3.2.1)."""
        self._queue_ready(job, now_s)

    def _steps(self, batch: BatchBuilder) -> int:
        """Return the longest number of steps in which no job changes state or needs a decision."""
        if batch.prefills or batch.preemptions or self._partial or len(self._ready):
            return 1
        waits = self._next_prompt() is not None
        steps = self._settings.max_steps
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

    def _rooms(self, jobs: Iterable[Job]) -> Iterator[int]:
        """Yield the tokens until each job needs blocks or a new check."""
        size = self._table.block_tokens
        return (job.reserved_blocks * size - job.computed_tokens for job in jobs)

    def _shed(self, batch: BatchBuilder, now_s: float) -> None:
        """Evict holders, newest first, after the worker shrank."""
        if self._table.free_blocks < 0:
            for victim in self._holders()[::-1]:
                if self._table.free_blocks >= 0:
                    return
                self._evict(batch, victim, now_s)

    def _holders(self) -> list[Job]:
        """Return the jobs that hold KV and do not run, oldest first."""
        return sorted(chain(self._partial.values(), self._ready), key=arrival_rank)

    def _rescue(self, batch: BatchBuilder, now_s: float) -> None:
        """Pin the oldest holder where nothing can run, and evict others, newest first, as needed."""
        holders = self._holders()
        if not holders:
            return
        pinned = self._table.jobs.get(self._pinned) if self._pinned is not None else None
        pinned = pinned if pinned in holders else holders[0]
        assert pinned is not None
        self._pinned = pinned.task.key
        whole = pinned.is_prompt and not self._settings.chunked_prefill
        least_tokens = pinned.prefill_tokens if whole else pinned.computed_tokens + 1  # for any progress
        needed = max(0, self._table.blocks_for(least_tokens) - pinned.own_blocks)
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
            blocks = pinned.held_blocks + self._table.free_blocks
            batch.budget_tokens = self._settings.token_budget
            room = blocks * self._table.block_tokens - pinned.computed_tokens
            if (chunk := min(batch.chunk_tokens(pinned), room)) > 0:
                self._add_chunk(batch, pinned, chunk)
