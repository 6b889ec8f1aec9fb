"""Every job of one worker: the events of `contract.BatchPolicy`, and books of tokens and blocks that balance.

Two queues, prompts and generations (papers/003 §3.2.1), and what runs. A subclass plans. What was adopted
with KV joins the generation queue like a paused one, so that its reservation is made anew by this policy's
rule. Here too: hosts and guests part when either leaves (§3.4). Knows no order, no admission rule.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import ceil

from services.scheduler.policy.contract import Holding, PolicySettings, Task, WorkerShape
from services.scheduler.policy.ecoserve.groups import Groups
from services.scheduler.policy.ecoserve.jobs import Job, JobStage
from services.scheduler.policy.ecoserve.lengths import LengthEstimates
from services.scheduler.policy.ecoserve.options import EcoOptions, parse_options
from services.scheduler.policy.ecoserve.queues import WaitingQueue
from services.scheduler.policy.ecoserve.slots import free_guests, move_out, stand_alone
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey

_WEIGHT = 0.2
_PREFILL_TOKENS_PER_S = 4000.0
_STEP_S = 0.025


class WorkerSpeeds:
    """A worker's speeds, smoothed; a modest accelerator's until it has measured some."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = _PREFILL_TOKENS_PER_S
        self.decode_step_s = _STEP_S
        self._measured_prefill = self._measured_step = False

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        """0 is no measurement."""
        if prefill_tokens_per_s > 0:
            old = self.prefill_tokens_per_s if self._measured_prefill else prefill_tokens_per_s
            self.prefill_tokens_per_s = old + _WEIGHT * (prefill_tokens_per_s - old)
            self._measured_prefill = True
        if decode_step_s > 0:
            old = self.decode_step_s if self._measured_step else decode_step_s
            self.decode_step_s = old + _WEIGHT * (decode_step_s - old)
            self._measured_step = True

    def work_s(self, prefill_tokens: int, decode_tokens: int) -> float:
        """What so much takes with nobody else there."""
        return prefill_tokens / self.prefill_tokens_per_s + decode_tokens * self.decode_step_s

    def deadline_s(self, task: Task, answer_tokens: int, slo_scale: float) -> float:
        """On the clock of `task.arrival_s`; the task's own deadline where it has one."""
        if task.deadline_s is not None:
            return task.deadline_s
        return task.arrival_s + slo_scale * self.work_s(task.prompt_tokens, answer_tokens)


class Books(ABC):
    """One worker's jobs. `_free_blocks` is what is set aside for nobody."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._settings = settings
        self._options = self._make_options(settings.options)
        self._block_tokens = shape.block_tokens
        self._capacity_blocks = shape.capacity_blocks
        self._lengths = self._make_lengths()
        self._speeds = WorkerSpeeds()
        self._jobs: dict[SequenceKey, Job] = {}
        self._prompts, self._generations = self._make_queues()
        self._groups = Groups()
        self._partial: dict[SequenceKey, Job] = {}
        """Partly prefilled; more than one only after an adoption."""
        self._oversized: dict[SequenceKey, Job] = {}
        """Prompts that could never end here as small as the worker is now."""
        self._running: dict[SequenceKey, Job] = {}
        self._complete: dict[SequenceKey, Job] = {}
        self._questions: dict[SequenceKey, int] = {}
        self._own_blocks = self._held_blocks = 0
        self._pinned: SequenceKey | None = None
        self._changed = True
        """Something may start that could not before."""

    def _make_options(self, options: Mapping[str, object]) -> EcoOptions:
        return parse_options(options)

    def _make_lengths(self) -> LengthEstimates:
        return LengthEstimates(self._options, self._block_tokens)

    @abstractmethod
    def _make_queues(self) -> tuple[WaitingQueue, WaitingQueue]:
        """Prompts, generations."""

    @property
    def _free_blocks(self) -> int:
        return self._capacity_blocks - self._own_blocks

    @property
    def _reserve_blocks(self) -> int:
        return ceil(self._options.reserve_ratio * self._capacity_blocks)

    def on_arrival(self, task: Task, now_s: float) -> None:
        if task.key not in self._jobs:
            job = self._jobs[task.key] = Job(task, task.generated_tokens, task.prediction, task.prediction)
            self._fix_deadline(job)
            self._queue_prompt(job, now_s)

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        if task.key in self._jobs:
            return
        job = self._jobs[task.key] = Job(task, task.generated_tokens, task.prediction, task.prediction)
        self._fix_deadline(job)
        job.computed_tokens = holding.computed_tokens
        self._hold(job, holding.allocated_blocks)
        if not holding.decoding:
            self._queue_prompt(job, now_s)
        elif job.missing_tokens > 0:
            self._queue_generation(job, now_s)
        else:
            self._complete_job(job)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        job = self._jobs.pop(key, None)
        if job is not None:
            self._take_out(job)
            self._part(job)
            self._set_own(job, 0)
            self._held_blocks -= job.held_blocks
            self._questions.pop(key, None)
            if self._pinned == key:
                self._pinned = None

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        job = self._jobs.get(key)
        if job is None or job.stage is JobStage.PROMPT or missing_tokens <= 0:
            return
        waits = job.stage is JobStage.GENERATION
        self._take_out(job)
        job.generated_tokens -= missing_tokens
        job.computed_tokens -= missing_tokens
        if waits:
            self._queue_generation(job, now_s)
        else:
            job.stage = JobStage.RUNNING
            self._running[key] = job
            job.end_tokens = max(job.end_tokens, job.computed_tokens + 1)

    def on_prefix_hit(self, key: SequenceKey, cached_tokens: int, now_s: float) -> None:
        """As far as the free blocks reach: what is shared counts here as if it were its own."""
        job = self._partial.get(key)
        if job is None:
            return
        room_blocks = job.held_blocks + max(0, self._free_blocks)
        cached_tokens = min(cached_tokens, job.prefill_tokens - 1, room_blocks * self._block_tokens)
        if cached_tokens > job.computed_tokens:
            job.computed_tokens = cached_tokens
            self._hold(job, max(job.held_blocks, self._blocks(cached_tokens)))

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        """Where less is left than is set aside, whatever runs asks for its reservation anew."""
        self._capacity_blocks = capacity_blocks
        self._changed = True
        for job in [job for job in self._oversized.values() if not self._is_oversized(job)]:
            del self._oversized[job.task.key]
            self._prompts.add(job, now_s)
        if self._free_blocks < 0:
            for job in list(self._running.values()):
                self._pause(job, now_s)
            for job in self._jobs.values():
                job.host, job.level, job.hosted_blocks, job.slots = None, 0, 0, []
                self._set_own(job, job.held_blocks)

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, now_s: float) -> None:
        self._speeds.on_measured(prefill_tokens_per_s, decode_step_s)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        """The deadline follows the first prediction; where it waits, and when it ends, follow each."""
        job = self._jobs.get(key)
        if job is None:
            return
        is_queued = job in self._prompts, job in self._generations
        if any(is_queued):
            self._take_out(job)
        job.prediction = prediction
        if job.first_prediction is None:
            job.first_prediction = prediction
            self._fix_deadline(job)
        if is_queued[0]:
            self._queue_prompt(job, now_s)
        elif is_queued[1]:
            self._queue_generation(job, now_s)
        elif job.stage is not JobStage.COMPLETE:
            self._estimate_rest(job)
            now = job.prefill_tokens if job.stage is JobStage.PROMPT else job.computed_tokens
            job.end_tokens = now + job.rest_tokens
            self._changed = True

    def _fix_deadline(self, job: Job) -> None:
        tokens = self._lengths.whole_tokens(job.prediction, job.task.max_tokens)
        job.deadline_s = self._speeds.deadline_s(job.task, tokens, self._options.slo_scale)

    def _estimate_rest(self, job: Job) -> None:
        job.rest_tokens = self._lengths.rest_tokens(job.prediction, job.generated_tokens, job.task.max_tokens)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _is_oversized(self, job: Job) -> bool:
        return self._blocks(job.task.limit_tokens) > self._capacity_blocks

    def _set_own(self, job: Job, blocks: int) -> None:
        self._own_blocks += blocks - job.own_blocks
        self._changed = self._changed or blocks < job.own_blocks
        job.own_blocks = blocks

    def _hold(self, job: Job, blocks: int) -> None:
        """Physically so many from now on; what it is not hosted for is its own."""
        self._held_blocks += blocks - job.held_blocks
        job.held_blocks = blocks
        if job.reserved_blocks < blocks:
            self._set_own(job, blocks - job.hosted_blocks)

    def _set_due(self, job: Job) -> None:
        """What the slack classes count down to."""
        job.due_s = job.deadline_s

    def _queue_prompt(self, job: Job, now_s: float) -> None:
        job.stage = JobStage.PROMPT
        self._estimate_rest(job)
        self._set_due(job)
        if job.held_blocks or job.computed_tokens:
            self._partial[job.task.key] = job
        elif self._is_oversized(job):
            self._oversized[job.task.key] = job
        else:
            self._prompts.add(job, now_s)
        self._changed = True

    def _queue_generation(self, job: Job, now_s: float) -> None:
        job.stage = JobStage.GENERATION
        self._estimate_rest(job)
        self._set_due(job)
        self._generations.add(job, now_s)
        self._groups.add(job)
        self._changed = True

    def _take_out(self, job: Job) -> None:
        """From where it stands; its blocks are untouched."""
        key = job.task.key
        if job in self._prompts:
            self._prompts.remove(job)
        elif job in self._generations:
            self._groups.remove(job)
            self._generations.remove(job)
        else:
            for place in (self._partial, self._oversized, self._running, self._complete):
                place.pop(key, None)

    def _give_own(self, job: Job, blocks: int) -> None:
        """So many of those it is lent are its own from now on."""
        job.hosted_blocks -= blocks
        self._set_own(job, job.own_blocks + blocks)
        if not job.hosted_blocks:
            stand_alone(job)

    def _leave_host(self, job: Job) -> None:
        for guest, blocks in move_out(job):
            self._give_own(guest, blocks)

    def _part(self, job: Job) -> None:
        """From its host and its guests, as it gives up everything."""
        if job.host is not None:
            self._leave_host(job)
        self._free_guests(job)

    def _free_guests(self, job: Job) -> None:
        """Those of a host that needs no more than it holds own their ranges now; a hosted host keeps its
        guests until its own host takes them over."""
        if job.host is None:
            self._set_own(job, job.held_blocks)
            for guest in free_guests(job):
                self._give_own(guest, guest.hosted_blocks)

    def _pause(self, job: Job, now_s: float) -> None:
        """Keeps its KV and gives back the rest; a guest keeps its place in its host until that gets there."""
        self._take_out(job)
        self._free_guests(job)
        self._questions[job.task.key] = job.generated_tokens
        self._queue_generation(job, now_s)

    def _complete_job(self, job: Job) -> None:
        """Planned to its limit: what it will not need is free."""
        self._take_out(job)
        self._free_guests(job)
        job.stage = JobStage.COMPLETE
        self._complete[job.task.key] = job

    def _release(self, job: Job, now_s: float) -> None:
        """All it held is free; its tokens are to be computed again."""
        self._take_out(job)
        self._part(job)
        self._held_blocks -= job.held_blocks
        job.held_blocks = job.computed_tokens = 0
        self._set_own(job, 0)
        self._queue_prompt(job, now_s)
