"""Base of the policies with one order, and the policies `vllm`, `orca` and `fastgen`.

A batch holds decodes first, then partly prefilled prompts, then waiting prompts, each by `queue_key` or
arrival. A subclass decides allocation (`_target_blocks`) and starts (`_can_start`). Source: papers/003 §2.

    4 free blocks, a decodes and needs one, b waits with a prompt of 3 blocks → a is served, b starts.
    0 free blocks, a needs one, c came last → c is preempted, and a takes one of its blocks; nothing starts.
"""

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from msgspec import structs

from services.scheduler.policy.batch_builder import BatchBuilder, Job, JobStage, JobTable
from services.scheduler.policy.contract import (
    Holding,
    PlannedBatch,
    PolicySettings,
    QueueRule,
    Task,
    WorkerShape,
    policy_name,
    queue_key_of,
    read_options,
)
from services.scheduler.policy.estimates import LengthEstimates, WorkerSpeeds
from services.scheduler.policy.options import TwoQueueOptions
from services.scheduler.policy.waiting_queue import Line
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class FirstComePolicy(ABC):
    """Batches of one worker in one order. A subclass decides when a waiting job may start."""

    name: ClassVar[str] = ""
    """The policy's name, for errors about its options; "": they are not checked."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default of each option."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._options = read_options(self.name, settings.options, self.defaults) if self.name else {}
        self._settings = settings
        self._table = JobTable(shape)
        key = queue_key_of(self)
        self._rule = None if key is None else QueueRule(key, name=policy_name(type(self)))
        """None: by arrival."""
        self._speeds = WorkerSpeeds()
        self._estimates = LengthEstimates(TwoQueueOptions(pad=0.0), block_tokens=1)
        self._waiting: Line[Job] = Line(self._rank)
        self._running: list[Job] = []
        """All jobs that hold blocks, in order: prefilling, decoding or complete."""

    def on_arrival(self, task: Task, now_s: float) -> None:
        job = self._table.add(task)
        if job is not None:
            self._rank_anew(job)
            self._enqueue(job)

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        job = self._table.add(task, holding)
        if job is None:
            return
        self._rank_anew(job)
        if job.stage is JobStage.READY:
            job.stage = JobStage.DECODING
        if job.stage is JobStage.WAITING:
            self._enqueue(job)
        else:
            insort(self._running, job, key=self._rank)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        job = self._table.jobs.get(key)
        if job is not None:
            if job.stage is JobStage.WAITING:
                self._dequeue(job)
            else:
                self._running.remove(job)
            self._table.remove(job)

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        self._correct(key, self._table.take_back, missing_tokens)

    def on_gained(self, key: SequenceKey, tokens: int, now_s: float) -> None:
        self._correct(key, self._table.gain, tokens)

    def _correct(self, key: SequenceKey, change: Callable[[Job, int], None], tokens: int) -> None:
        job = self._table.jobs.get(key)
        if job is None or job.stage is JobStage.PREFILLING:
            return
        is_waiting = job.stage is JobStage.WAITING
        if is_waiting:
            self._dequeue(job)
        change(job, tokens)
        if is_waiting:
            self._enqueue(job)

    def on_prefix_hit(self, key: SequenceKey, cached_tokens: int, now_s: float) -> None:
        job = self._table.jobs.get(key)
        if job is not None and job.stage is JobStage.PREFILLING:
            self._table.note_prefix_hit(job, cached_tokens)

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        self._table.capacity_blocks = capacity_blocks

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, now_s: float) -> None:
        """Record the speeds, which apply to later arrivals."""
        self._speeds.on_measured(prefill_tokens_per_s, decode_step_s)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        """Update the job's rank; predictions have no other effect."""
        if self._rule is not None:
            self._note_prediction(key, prediction)

    def _note_prediction(self, key: SequenceKey, prediction: LengthPrediction) -> None:
        job = self._table.jobs.get(key)
        if job is None:
            return
        waits = job.stage is JobStage.WAITING
        if waits:
            self._dequeue(job)
        job.prediction = prediction
        self._rank_anew(job)
        if waits:
            self._enqueue(job)
        else:
            self._sort_running()

    def check_integrity(self) -> None:
        """Raises AssertionError when accounts do not balance or a job is not in exactly one line."""
        self._table.check_integrity()
        jobs = list(self._table.jobs.values())
        lines = [*self._waiting, *self._running]
        assert {id(job) for job in jobs} == {id(job) for job in lines}
        assert len(jobs) == len(lines)
        self._waiting.check_integrity()
        assert self._running == sorted(self._running, key=self._rank), "out of order"
        for job in jobs:
            assert (job in self._waiting) == (job.stage is JobStage.WAITING)
            assert job.own_blocks == job.held_blocks and job.stage is not JobStage.READY

    def _rank(self, job: Job) -> Any:
        """Return the sort key, unique per job and constant while it waits."""
        return job.task.order if self._rule is None else job.rank

    def _rank_anew(self, job: Job) -> None:
        """Set the rank by the policy's key, as in the fleet's queue."""
        if self._rule is None:
            return
        task = structs.replace(job.task, prediction=job.prediction)
        rest_tokens = self._estimates.rest_tokens(job.prediction, job.generated_tokens, task.max_tokens)
        memory_tokens = self._table.capacity_blocks * self._table.block_tokens
        work_s = self._speeds.occupied_s(job.prefill_tokens, rest_tokens, memory_tokens)
        job.rank = (task.priority, self._rule.place(task, work_s), *task.order[1:])

    def _enqueue(self, job: Job) -> None:
        """Add a job to the waiting line. A policy with its own index extends this and `_dequeue`."""
        self._waiting.add(job)

    def _dequeue(self, job: Job) -> None:
        self._waiting.remove(job)

    def _sort_running(self) -> None:
        self._running.sort(key=self._rank)

    def _startable(self) -> Iterator[Job]:
        """Yield waiting jobs in order, except those that can never fit."""
        return (job for job in self._waiting if not self._table.is_oversized(job))

    def _releasing_blocks(self) -> int:
        """Return the blocks that complete jobs free once their ends are confirmed."""
        return sum(job.held_blocks for job in self._running if job.stage is JobStage.COMPLETE)

    def plan(self, now_s: float) -> PlannedBatch | None:
        """See `contract.BatchPolicy`."""
        batch = BatchBuilder(self._table, self._settings)
        self._shed(batch)
        for job in [job for job in self._running if job.stage is JobStage.DECODING]:
            self._add_decode(batch, job)
        for job in [job for job in self._running if job.stage is JobStage.PREFILLING]:
            self._add_chunk(batch, job)
        if not batch.preemptions:
            self._admit(batch)
        return self._finish(batch)

    def _target_blocks(self, job: Job, tokens: int) -> int:
        """Return the blocks `job` should hold for `tokens` tokens of KV; at least enough for them."""
        return self._table.blocks_for(tokens)

    @abstractmethod
    def _can_start(self, batch: BatchBuilder, job: Job) -> bool:
        """Return whether the free blocks allow a waiting job to start."""

    def _shed(self, batch: BatchBuilder) -> None:
        """Preempt the newest jobs after the worker shrank."""
        while self._table.free_blocks < 0 and (victim := self._newest()) is not None:
            self._preempt(batch, victim)

    def _add_decode(self, batch: BatchBuilder, job: Job) -> None:
        """Add the job's next token, unless it was preempted or has no room."""
        may_run = job.stage is JobStage.DECODING and batch.has_room
        if may_run and self._secure(batch, job, job.computed_tokens + 1):
            batch.add_decode(job)

    def _add_chunk(self, batch: BatchBuilder, job: Job) -> None:
        """Add the next chunk of a prompt, unless it was preempted or has no room."""
        chunk = batch.chunk_tokens(job)
        may_run = job.stage is JobStage.PREFILLING and chunk > 0
        if may_run and self._secure(batch, job, job.computed_tokens + chunk):
            batch.add_chunk(job, chunk)

    def _secure(self, batch: BatchBuilder, job: Job, tokens: int) -> bool:
        """Reserve the target, or blocks for `tokens` after preempting newer jobs; return whether it could."""
        held = job.held_blocks
        target = max(held, self._target_blocks(job, tokens))
        if target - held > self._table.free_blocks:
            target = max(held, self._table.blocks_for(tokens))
        while target - held > self._table.free_blocks:
            victim = self._newest()
            if target - held <= self._table.free_blocks + self._releasing_blocks() or victim is None:
                return False
            self._preempt(batch, victim)
            if victim is job:
                return False
        self._table.set_own(job, target)
        return True

    def _newest(self) -> Job | None:
        return next((job for job in reversed(self._running) if job.stage is not JobStage.COMPLETE), None)

    def _preempt(self, batch: BatchBuilder, victim: Job) -> None:
        """Preempt a job: free its blocks and queue it for recomputation."""
        batch.preempt(victim)
        self._running.remove(victim)
        self._table.clear(victim)
        self._enqueue(victim)

    def _admit(self, batch: BatchBuilder) -> None:
        """Start waiting prompts in order; the first that does not fit holds back the rest."""
        running = sum(job.stage is not JobStage.COMPLETE for job in self._running)
        for job in self._candidates(batch):
            if running >= self._settings.max_batch_sequences or not self._add_start(batch, job):
                return
            running += 1

    def _add_start(self, batch: BatchBuilder, job: Job) -> bool:
        """Add the first chunk of a waiting job. Return whether another job may start after it."""
        chunk = batch.chunk_tokens(job)
        if chunk == 0 or not batch.text_fits(job) or not self._can_start(batch, job):
            return False
        self._table.set_own(job, self._target_blocks(job, chunk))
        batch.add_chunk(job, chunk)
        return chunk == job.prefill_tokens

    def _candidates(self, batch: BatchBuilder) -> Iterator[Job]:
        """Yield the next jobs to start; each is chosen by the current state of the batch."""
        return self._startable()

    def _finish(self, batch: BatchBuilder) -> PlannedBatch | None:
        """Apply the batch: starting jobs leave the waiting line. Return None if it is empty."""
        if not batch:
            return None
        waits = any(True for _ in self._startable())
        for job in (*(job for job, _ in batch.prefills.values()), *batch.decodes.values()):
            if job.stage is JobStage.WAITING:
                self._dequeue(job)
                insort(self._running, job, key=self._rank)
                job.stage = JobStage.PREFILLING
            self._table.hold(job, job.own_blocks)
        if batch.prefills or batch.preemptions:
            return batch.build(1)
        missing = [job.missing_tokens for job in batch.decodes.values()]
        most = min(missing) if waits else max(missing)
        return batch.build(batch.steps_that_fit(min(self._settings.max_steps, most)))


class VllmPolicy(FirstComePolicy):
    """`vllm`: allocates blocks for existing tokens only; when they run out, the newest job is preempted."""

    name = "vllm"

    def _can_start(self, batch: BatchBuilder, job: Job) -> bool:
        """Leaves 1 % headroom for running jobs, so that a start does not cause a preemption at once."""
        headroom_blocks = self._table.capacity_blocks // 100 if batch.decodes or batch.prefills else 0
        return self._table.blocks_for(job.prefill_tokens) <= self._table.free_blocks - headroom_blocks


class MaximumPolicy(FirstComePolicy):
    """Allocates the blocks of the longest possible answer at the start."""

    def _target_blocks(self, job: Job, tokens: int) -> int:
        return max(self._table.blocks_for(tokens), self._table.maximum_blocks(job))

    def _can_start(self, batch: BatchBuilder, job: Job) -> bool:
        return self._table.maximum_blocks(job) <= self._table.free_blocks


class OrcaPolicy(MaximumPolicy):
    """`orca`: allocates the longest answer at the start, in order of arrival."""

    name = "orca"

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        super().__init__(shape, settings)
        self._adopted: set[SequenceKey] = set()
        """Adopted sequences, which may hold less than their maximum."""

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        super().on_adopted(task, holding, now_s)
        if self._table.jobs[task.key].held_blocks < self._table.blocks_for(task.limit_tokens):
            self._adopted.add(task.key)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        super().on_ended(key, now_s, answer_tokens)
        self._adopted.discard(key)

    def check_integrity(self) -> None:
        """Raises AssertionError when accounts do not balance or a started job could run out of blocks."""
        super().check_integrity()
        assert self._adopted <= self._table.jobs.keys()
        for job in self._running:
            has_maximum = job.held_blocks >= self._table.blocks_for(job.task.limit_tokens)
            assert has_maximum or job.task.key in self._adopted, "started with less than its maximum"

    def _admit(self, batch: BatchBuilder) -> None:
        """Start waiting prompts, unless an adopted sequence holds less than its maximum."""
        if not any(
            job.own_blocks < self._table.maximum_blocks(job)
            for job in self._running
            if job.stage is not JobStage.COMPLETE and job.task.key in self._adopted
        ):
            super()._admit(batch)


class FastGenPolicy(FirstComePolicy):
    """`fastgen`: like `vllm`, with prompts cut so that each step computes a fixed number of tokens."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        options = read_options("fastgen", settings.options, {"tfs_tokens": settings.token_budget})
        size_tokens = min(int(options["tfs_tokens"]), settings.token_budget)
        super().__init__(shape, replace(settings, chunked_prefill=True, token_budget=size_tokens))

    def _can_start(self, batch: BatchBuilder, job: Job) -> bool:
        return self._table.blocks_for(batch.chunk_tokens(job)) <= self._table.free_blocks
