"""`kvasir`, the default policy: shortest predicted remaining work first, admitted by predicted memory use.

A request waits once, as a prompt, until the worker is predicted to hold it to its end beside all running
requests. Only a share of started work may pass older work. Without free blocks, the request with the most
remaining work is preempted. `sheddable` requests use what better classes leave. Source: algorithms.md §1.

    10 blocks are free; a has the least work but will hold 12 at its end, b has more and will hold 6 → a is
    passed over, b starts; a starts once enough running requests are predicted to end in time.
"""

from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain, islice
from typing import Any

from services.scheduler.policy.batch_builder import BatchBuilder, Job, JobStage
from services.scheduler.policy.contract import (
    CLASS_LEVELS,
    PlannedBatch,
    PolicySettings,
    Task,
    WorkerShape,
    least_priority,
)
from services.scheduler.policy.estimates import Calibration, LengthEstimates, UsageProfile
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES
from services.scheduler.policy.options import two_queue_options
from services.scheduler.policy.two_queues import TwoQueuePolicy
from services.scheduler.policy.waiting_queue import PassingBudget, WaitingQueue
from shared.messages.sequence import SequenceKey, ServiceClass

_LATE = 4.0
"""Factor for work that is too late for its deadline, where more than `FEED_SEQUENCES` prompts wait."""
_DEFAULTS = {"pad": 0.0, "reserve_ratio": 0.01}
"""Defaults that differ from the paper's: nothing is allocated ahead, so no padding is needed."""
OPTIONS = ("default_tokens", "length", "pad", "passing_share", "reserve_ratio", "slo_scale")
_SHEDDABLE_PRIORITY = least_priority(CLASS_LEVELS[ServiceClass.SHEDDABLE])
"""Tasks of this priority or more are sheddable."""
_LEFT_SHARE = 0.25
"""Share of a decode step's time that prefill of sheddable prompts may add beside better classes."""
_PASSED_OVER = 16
"""Number of candidates considered in one plan, including those that do not fit."""


class KvasirPolicy(TwoQueuePolicy):
    """The default policy. It reserves nothing: between two plans each job owns exactly what it holds."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        options = two_queue_options("kvasir", settings.options, _DEFAULTS, OPTIONS)
        super().__init__(
            shape,
            settings,
            options,
            LengthEstimates(options, shape.block_tokens, Calibration()),
            WaitingQueue(self._work_rank, (0.0,)),
            WaitingQueue(self._work_rank, (0.0,)),
        )
        self.passing_share = options.passing_share
        self._passing = PassingBudget(self.passing_share)
        self._aged: set[SequenceKey] = set()
        """Sequences that started as the oldest when no passing was allowed; they are preempted last."""
        self._profile: UsageProfile | None = None

    def queue_key(self, task: Task, work_s: float) -> float:
        """Return `work_s`: least work first."""
        return work_s

    def _work_rank(self, job: Job) -> tuple[Any, ...]:
        return (self._work_s(job), *job.task.order)

    def _work_s(self, job: Job) -> float:
        """Return the job's work in seconds of the whole worker."""
        memory_tokens = self._table.capacity_blocks * self._table.block_tokens
        cached_tokens = job.task.cached_tokens
        return self._speeds.occupied_s(job.prefill_tokens, job.rest_tokens, memory_tokens, cached_tokens)

    def _due_s(self, job: Job) -> float:
        """Return the latest start that meets the deadline."""
        prefill_tokens = job.prefill_tokens - job.computed_tokens
        return job.deadline_s - self._speeds.work_s(prefill_tokens, job.rest_tokens)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        job = self._table.jobs.get(key)
        if job is not None and answer_tokens is not None and answer_tokens > job.task.generated_tokens:
            self._lengths.learn(job.first_prediction, answer_tokens)
        super().on_ended(key, now_s, answer_tokens)
        self._aged.discard(key)

    def plan(self, now_s: float) -> PlannedBatch | None:
        self._prompts.advance(now_s)
        self._ready.advance(now_s)
        self._profile = None
        batch = BatchBuilder(self._table, self._settings)
        self._shed(batch, now_s)
        self._go_on_decoding(batch, now_s)
        self._resume(batch)
        self._shed_for_better(batch, now_s)
        started, held_back = list(self._partial.values()), []
        if started and self._better_prompt() is not None:  # sheddable jobs in mid-prompt go after it
            held_back = [job for job in started if job.task.priority >= _SHEDDABLE_PRIORITY]
        for job in started:
            if job not in held_back:
                self._go_on(batch, job, now_s)
        if not batch.preemptions and len(started) == len(batch.prefills) + len(held_back):
            self._admit(batch, now_s)
        for job in held_back:
            self._go_on(batch, job, now_s)
        if not (batch or self._complete):
            self._rescue(batch, now_s)
        return self._finish(batch, now_s)

    def on_gained(self, key: SequenceKey, tokens: int, now_s: float) -> None:
        """See `contract.GuardedPolicy`."""
        self._correct(key, lambda job: self._table.gain(job, tokens), now_s)

    def _shed_for_better(self, batch: BatchBuilder, now_s: float) -> None:
        """Preempt sheddable sequences for a better-class prompt without room, if that would suffice."""
        job = self._better_prompt()
        victims = [
            one
            for one in (self._victims() if job is not None else ())
            if one.task.priority >= _SHEDDABLE_PRIORITY and one.held_blocks
        ]
        if job is None or not victims:
            return
        self._estimate_rest(job)
        whole = sum([one.held_blocks for one in victims]) + self._table.free_blocks
        if self._table.blocks_for(job.prefill_tokens + 1) > whole:
            return
        while victims and not self._has_place(job):
            victim = max(victims, key=self._burden)
            victims.remove(victim)
            self._evict(batch, victim, now_s)
            self._profile = None

    def _has_place(self, job: Job) -> bool:
        """Return whether the prompt could start now, apart from this step's token budget."""
        total, ends = job.prefill_tokens, job.prefill_tokens + job.rest_tokens
        if len(self._running) + len(self._partial) >= self._most_running:
            return False
        fits = self._table.blocks_for(total + 1) <= self._table.free_blocks
        return not self._table.held_blocks or (fits and self._usage().fits(total, ends, 0))

    def _chunk_tokens(self, batch: BatchBuilder, job: Job) -> int:
        """Return the chunk size; a sheddable prompt leaves better classes 4/5 of their decode speed."""
        chunk = batch.chunk_tokens(job)
        is_left_over = self._settings.chunked_prefill and job.task.priority >= _SHEDDABLE_PRIORITY
        if not is_left_over or all(
            one.task.priority >= _SHEDDABLE_PRIORITY for one in batch.decodes.values()
        ):
            return chunk
        step_tokens = _LEFT_SHARE * self._speeds.decode_step_s * self._speeds.prefill_tokens_per_s
        return min(chunk, max(self._table.block_tokens, int(step_tokens)))

    def _better_prompt(self) -> Job | None:
        """Return the next prompt if it is of a better class than sheddable."""
        job = self._next_prompt()
        return None if job is None or job.task.priority >= _SHEDDABLE_PRIORITY else job

    def _go_on_decoding(self, batch: BatchBuilder, now_s: float) -> None:
        """Add a decode for each running sequence, up to the limit. The inline check is the fast path."""
        most, size, decoding = self._most_running, self._table.block_tokens, JobStage.DECODING
        decodes, added = batch.decodes, 0
        for key, job in list(self._running.items()):
            if job.stage is not decoding or len(decodes) >= most:
                continue
            held_blocks, computed_tokens = job.held_blocks, job.computed_tokens
            has_room = held_blocks == job.own_blocks and computed_tokens < held_blocks * size
            if (has_room and computed_tokens < job.end_tokens) or self._secure(batch, job, now_s):
                decodes[key] = job
                added += 1
        batch.budget_tokens -= added

    def _secure(self, batch: BatchBuilder, job: Job, now_s: float) -> bool:
        """Return whether the next token has a block, after preempting others if needed."""
        if job.computed_tokens >= job.end_tokens:
            rest = self._lengths.rest_tokens(job.prediction, job.generated_tokens, job.task.max_tokens)
            job.end_tokens = job.computed_tokens + rest
            self._questions[job.task.key] = job.generated_tokens
        needed = self._table.blocks_for(job.computed_tokens + 1)
        if needed <= job.held_blocks == job.own_blocks:
            return True
        if self._make_room(batch, job, needed, now_s):
            self._table.set_own(job, max(needed, job.held_blocks))
            return True
        return False

    def _make_room(self, batch: BatchBuilder, job: Job, blocks: int, now_s: float) -> bool:
        """Return whether `job` may hold `blocks`, after preempting the most remaining work if needed."""
        while blocks - job.held_blocks > self._table.free_blocks:
            releasing = sum([other.held_blocks for other in self._complete.values()])
            if blocks - job.held_blocks <= self._table.free_blocks + releasing:
                return False
            victim = max(self._victims(), key=self._burden)
            self._evict(batch, victim, now_s)
            self._profile = None
            if victim is job:
                return False
        return True

    def _victims(self) -> list[Job]:
        return [*self._running.values(), *self._ready, *self._partial.values()]

    def _burden(self, job: Job) -> tuple[Any, ...]:
        waits = job.stage is not JobStage.DECODING
        rest = job.rest_tokens if waits else job.end_tokens - job.computed_tokens
        is_spared = job.task.key in self._aged or job.task.key == self._pinned
        return (not is_spared, job.task.priority, rest, job.task.order)

    def _resume(self, batch: BatchBuilder) -> None:
        """Restart sequences that hold KV and do not run, before any prompt starts."""
        if not len(self._ready):
            return
        for job in list(self._ready):
            ends = job.computed_tokens + job.rest_tokens
            needed = max(0, self._table.blocks_for(job.computed_tokens + 1) - job.held_blocks)
            room = len(self._running) < self._most_running and needed <= self._table.free_blocks
            if room and self._usage().fits(job.computed_tokens, ends, job.held_blocks):
                self._start(batch, job)

    def _start_pinned(self, batch: BatchBuilder, job: Job, needed_blocks: int) -> None:
        self._start(batch, job)

    def _start(self, batch: BatchBuilder, job: Job) -> None:
        """Start decoding in this batch, with blocks for the next token only."""
        self._run(batch, job)
        if self._profile is not None:
            self._profile.start(job.computed_tokens, job.end_tokens, job.held_blocks)
        self._table.set_own(job, max(job.held_blocks, self._table.blocks_for(job.computed_tokens + 1)))

    def _prefilled(self, job: Job, now_s: float) -> None:
        job.stage = JobStage.DECODING
        self._running[job.task.key] = job
        job.end_tokens = max(job.end_tokens, job.computed_tokens + 1)

    def _rooms(self, jobs: Iterable[Job]) -> Iterator[int]:
        return (job.end_tokens - job.computed_tokens for job in jobs)

    def _usage(self) -> UsageProfile:
        """Return this plan's profile. A sequence in prefill counts as if prefill were complete."""
        if self._profile is None:
            table, prefilling = self._table, JobStage.PREFILLING
            growing = []
            constant = table.held_blocks
            for job in chain(self._running.values(), self._partial.values(), self._complete.values()):
                now, ends, held_blocks = job.computed_tokens, job.end_tokens, job.held_blocks
                if job.stage is prefilling:
                    now, ends = job.prefill_tokens, job.prefill_tokens + job.rest_tokens
                growing.append((now, ends if ends > now else now, held_blocks))
                constant -= held_blocks
            limit = table.capacity_blocks - self._reserve_blocks
            kv_tokens = table.capacity_blocks * table.block_tokens
            self._profile = UsageProfile(growing, constant, limit, table.block_tokens, kv_tokens)
        return self._profile

    def _go_on(self, batch: BatchBuilder, job: Job, now_s: float) -> None:
        """Add the next chunk of a prompt that has started."""
        chunk = self._chunk_tokens(batch, job)
        if chunk and self._make_room(batch, job, self._table.blocks_for(job.computed_tokens + chunk), now_s):
            self._add_chunk(batch, job, chunk)

    def _admit(self, batch: BatchBuilder, now_s: float) -> None:
        """Start prompts in order, passing over those that do not fit; cut the last one to the budget."""
        if self._is_full(batch) or not self._take_turns(batch) or self._next_prompt() is None:
            return
        jobs = list(islice(self._in_order(), _PASSED_OVER))
        ends = []
        for job in jobs:
            self._estimate_rest(job)
            ends.append((job.prefill_tokens, job.prefill_tokens + job.rest_tokens, 0))
        for job, fits in zip(jobs, self._usage().which_fit(ends), strict=True):
            if self._is_full(batch):
                return
            if self._table.is_oversized(job):
                self._put_aside(job)
            elif not self._may_pass():
                self._take_turns(batch)
                return
            elif fits or not self._table.held_blocks:  # an empty worker starts a prompt of any length
                self._begin(batch, job)

    def _take_turns(self, batch: BatchBuilder) -> bool:
        """Start the oldest prompts while no other may pass. Return False if the oldest has no room."""
        oldest = self._prompts.by_arrival.first
        while not self._may_pass() and (job := self._fitting(oldest)) is not None:
            self._estimate_rest(job)
            if self._is_full(batch) or not self._begin(batch, job):
                return False
            self._aged.add(job.task.key)
        return True

    def _may_pass(self) -> bool:
        return self._passing.may_pass(len(self._prompts))

    def _is_full(self, batch: BatchBuilder) -> bool:
        """Return whether no further prompt can start in this batch."""
        if batch.budget_tokens <= 0 or len(self._running) + len(self._partial) >= self._most_running:
            return True
        return any(end < job.prefill_tokens for job, end in batch.prefills.values())

    def _in_order(self) -> Iterator[Job]:
        """Yield prompts by priority, then weighted work."""
        for late, timely in self._prompts.levels.values():
            both = timely and late
            yield from merge(timely, late, key=self._weighted_work) if both else timely or late

    def _weighted_work(self, job: Job) -> tuple[Any, ...]:
        is_outdone = job.slack_class == 0 and len(self._prompts) > FEED_SEQUENCES
        return (job.rank[0] * (_LATE if is_outdone else 1), *job.rank[1:])

    def _begin(self, batch: BatchBuilder, job: Job) -> bool:
        """Start a prompt if the profile, or an empty worker, and the blocks allow it, and charge the passing
        budget. Return whether it started."""
        work_s, passes = self._work_s(job), self._prompts.by_arrival.first() is not job
        chunk = self._chunk_tokens(batch, job)
        if chunk == 0 or not batch.text_fits(job):
            return False
        total, usage = job.prefill_tokens, self._usage()
        ends = total + job.rest_tokens
        if self._table.held_blocks and not usage.fits(total, ends, 0):
            return False
        if self._table.blocks_for(job.computed_tokens + chunk) > self._table.free_blocks:
            return False
        job.end_tokens = ends
        self._add_chunk(batch, job, chunk)
        usage.start(total, ends, 0)
        self._passing.start(work_s, passes=passes)
        return True
