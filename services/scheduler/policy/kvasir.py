"""`kvasir`: shortest predicted remaining work first, admitted by the profile of usage over time.

A request waits once, as a prompt: it starts when, as predicted, the worker can hold it to its end beside
all that run; then it prefills and decodes without another wait. Who can still meet the deadline comes
before who cannot; within either class the least remaining work, prefill included; those long overdue have
a share of the admissions. A few that do not fit are passed over. An answer that outlives its prediction
goes on, predicted anew. When blocks run out all the same, the one with the most left to do gives up its own.
Where steps are short, several are planned at once although others wait: as many as nobody is expected to
end in.

Source: algorithms.md §1 (Beyond the paper); parts from `ecoserve/`.
"""

from collections.abc import Iterator, Mapping
from heapq import merge
from itertools import islice
from typing import Any

from services.scheduler.policy.contract import PlannedBatch, PolicySettings, WorkerShape
from services.scheduler.policy.ecoserve.drafts import Draft
from services.scheduler.policy.ecoserve.jobs import Job, JobStage
from services.scheduler.policy.ecoserve.lengths import Calibration, LengthEstimates
from services.scheduler.policy.ecoserve.options import EcoOptions, parse_options
from services.scheduler.policy.ecoserve.profiling import UsageProfile, bucket_tokens
from services.scheduler.policy.ecoserve.queues import AgingTurns, WaitingQueue
from services.scheduler.policy.ecoserve.rescue import Rescuing
from shared.messages.sequence import SequenceKey

_LATE = 4.0
"""Work that comes too late for its deadline counts so many times."""
_DEFAULTS = {"pad": 0.0, "reserve_ratio": 0.01, "aging_s": 90.0}
"""Where they differ from the paper's: nothing is allocated ahead, so nothing has to be padded."""
_UNSEEN_S = 0.02
"""So long those that wait may have to do without room that an unexpected end has left."""
_PASSED_OVER = 16
"""So many that do not fit let shorter ones of the same class, or others, pass in one plan."""


class KvasirPolicy(Rescuing):
    """One worker's batches. Implements `contract.BatchPolicy`. Own blocks are those held, always."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        super().__init__(shape, settings)
        self._turns = AgingTurns(self._options)
        self._aged: set[SequenceKey] = set()
        """Started by age: last to give up what they hold."""
        self._profile: UsageProfile | None = None

    def _make_options(self, options: Mapping[str, object]) -> EcoOptions:
        return parse_options(options, _DEFAULTS)

    def _make_lengths(self) -> LengthEstimates:
        return LengthEstimates(self._options, self._block_tokens, Calibration())

    def _make_queues(self) -> tuple[WaitingQueue, WaitingQueue]:
        return (
            WaitingQueue(self._work_rank, (0.0,), aging_s=self._options.aging_s),
            WaitingQueue(self._work_rank, (0.0,)),
        )

    def _work_rank(self, job: Job) -> tuple[Any, ...]:
        return (self._work_s(job), *job.task.order)

    def _work_s(self, job: Job) -> float:
        return self._speeds.work_s(job.prefill_tokens - job.computed_tokens, job.rest_tokens)

    def _set_due(self, job: Job) -> None:
        """The latest start at which the deadline is met."""
        job.due_s = job.deadline_s - self._work_s(job)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        job = self._jobs.get(key)
        if job is not None and answer_tokens is not None and answer_tokens > job.task.generated_tokens:
            self._lengths.learn(job.first_prediction, answer_tokens)
        super().on_ended(key, now_s, answer_tokens)
        self._aged.discard(key)

    def plan(self, now_s: float) -> PlannedBatch | None:
        self._prompts.advance(now_s)
        self._generations.advance(now_s)
        self._profile = None
        draft = Draft(self._settings.token_budget)
        self._shed(draft, now_s)
        for job in list(self._running.values()):
            if job.stage is JobStage.RUNNING and self._secure(draft, job, now_s):
                self._draft_decode(draft, job)
        self._resume(draft)
        for job in list(self._partial.values()):
            self._add_chunk(draft, job, now_s)
        if not draft.preempted and len(self._partial) == len(draft.prefills):
            self._admit(draft, now_s)
        if not (draft.sequences or draft.preempted or self._complete):
            self._rescue(draft, now_s)
        return self._commit(draft, now_s)

    # What runs

    def _secure(self, draft: Draft, job: Job, now_s: float) -> bool:
        """A block for the next token, if need be of those with the most left to do."""
        if draft.sequences >= self._most_running():
            return False
        if job.computed_tokens >= job.end_tokens:
            rest = self._lengths.rest_tokens(job.prediction, job.generated_tokens, job.task.max_tokens)
            job.end_tokens = job.computed_tokens + rest
            self._questions[job.task.key] = job.generated_tokens
        needed = self._blocks(job.computed_tokens + 1)
        if self._make_room(draft, job, needed, now_s):
            self._set_own(job, max(needed, job.held_blocks))
            return True
        return False

    def _make_room(self, draft: Draft, job: Job, blocks: int, now_s: float) -> bool:
        """Whether `job` may hold so many; those with the most left to do give up theirs, in the end
        itself. What is complete is about to be free: that is waited for."""
        while blocks - job.held_blocks > self._free_blocks:
            releasing = sum(other.held_blocks for other in self._complete.values())
            if blocks - job.held_blocks <= self._free_blocks + releasing:
                return False
            victim = max(self._victims(), key=self._burden)
            self._evict(draft, victim, now_s)
            self._profile = None
            if victim is job:
                return False
        return True

    def _victims(self) -> list[Job]:
        return [*self._running.values(), *self._generations, *self._partial.values()]

    def _burden(self, job: Job) -> tuple[Any, ...]:
        waits = job.stage is not JobStage.RUNNING
        rest = job.rest_tokens if waits else job.end_tokens - job.computed_tokens
        is_spared = job.task.key in self._aged or job.task.key == self._pinned
        return (not is_spared, rest, job.task.order)

    def _resume(self, draft: Draft) -> None:
        """Adopted ones, and all after the worker shrank: those that hold KV come before any prompt."""
        if not len(self._generations):
            return
        for job in list(self._generations):
            ends = job.computed_tokens + job.rest_tokens
            needed = max(0, self._blocks(job.computed_tokens + 1) - job.held_blocks)
            room = len(self._running) < self._most_running() and needed <= self._free_blocks
            if room and self._usage().fits(job.computed_tokens, ends, job.held_blocks):
                self._start(draft, job, 0)

    def _start(self, draft: Draft, job: Job, blocks: int) -> None:
        self._take_out(job)
        job.end_tokens = job.computed_tokens + job.rest_tokens
        if self._profile is not None:
            self._profile.start(job.computed_tokens, job.end_tokens, job.held_blocks)
        self._set_own(job, max(job.held_blocks, self._blocks(job.computed_tokens + 1)))
        job.stage = JobStage.RUNNING
        self._running[job.task.key] = job
        self._draft_decode(draft, job)

    def _prefilled(self, job: Job, now_s: float) -> None:
        job.stage = JobStage.RUNNING
        self._running[job.task.key] = job
        job.end_tokens = max(job.end_tokens, job.computed_tokens + 1)

    def _room_tokens(self, job: Job) -> int:
        return max(1, job.end_tokens - job.computed_tokens)

    def _steps(self, draft: Draft) -> int:
        """Whoever waits has just been found not to fit beside what runs. Short steps in which nobody is
        expected to end change nothing about that; an arrival that can start cuts them short."""
        if draft.prefills or draft.preempted or self._partial or len(self._generations):
            return 1
        waits = self._next_prompt() is not None
        jobs = draft.decodes.values()
        steps = min(self._settings.max_steps, max(job.missing_tokens for job in jobs))
        if waits:
            steps = min(steps, int(_UNSEEN_S / self._speeds.decode_step_s))
        for job in jobs:
            room = self._room_tokens(job)
            if waits or room < job.missing_tokens:
                steps = min(steps, room, job.missing_tokens)
        while steps > 1 and self._grown_blocks(draft, steps) > self._capacity_blocks:
            steps -= 1
        return max(1, steps)

    # Prompts

    def _usage(self) -> UsageProfile:
        """As of this plan. One that prefills counts as if that were over."""
        if self._profile is None:
            jobs = [*self._running.values(), *self._partial.values(), *self._complete.values()]
            growing = []
            for job in jobs:
                now, ends = job.computed_tokens, job.end_tokens
                if job.stage is JobStage.PROMPT:
                    now, ends = job.prefill_tokens, job.prefill_tokens + job.rest_tokens
                growing.append((now, max(now, ends), job.held_blocks))
            constant = self._held_blocks - sum(item[2] for item in growing)
            limit = self._capacity_blocks - self._reserve_blocks
            rests = [ends - now for now, ends, _ in growing]
            bucket = bucket_tokens(rests, self._capacity_blocks * self._block_tokens)
            self._profile = UsageProfile(growing, constant, limit, self._block_tokens, bucket)
        return self._profile

    def _add_chunk(self, draft: Draft, job: Job, now_s: float) -> None:
        """The next chunk of one that has started."""
        chunk = self._chunk_tokens(draft, job)
        if chunk and self._make_room(draft, job, self._blocks(job.computed_tokens + chunk), now_s):
            self._draft_prompt(draft, job, chunk)

    def _admit(self, draft: Draft, now_s: float) -> None:
        """In order, passing over a few that do not fit; the last prompt is cut to the budget."""
        if self._is_full(draft):
            return
        overdue = self._overdue_prompt() if self._turns.is_due() else None
        if overdue is not None:
            if self._begin(draft, overdue):
                self._turns.take()
                self._aged.add(overdue.task.key)
            elif self._turns.is_starving(overdue, now_s):
                return
        if self._next_prompt() is None:
            return
        jobs = list(islice(self._in_order(), _PASSED_OVER))
        for job in jobs:
            self._estimate_rest(job)
        ends = [(job.prefill_tokens, job.prefill_tokens + job.rest_tokens, 0) for job in jobs]
        for job, fits in zip(jobs, self._usage().which_fit(ends), strict=True):
            if self._is_full(draft):
                return
            if self._is_oversized(job):
                self._put_aside(job)
            elif (fits or self._is_empty) and self._begin(draft, job):
                self._turns.count()

    @property
    def _is_empty(self) -> bool:
        """Whoever comes first is taken, however long."""
        return self._held_blocks == 0

    def _is_full(self, draft: Draft) -> bool:
        """No further prompt can start now."""
        is_cut = any(end < job.prefill_tokens for job, end in draft.prefills.values())
        busy = len(self._running) + len(self._partial)
        return is_cut or draft.budget_tokens <= 0 or busy >= self._most_running()

    def _in_order(self) -> Iterator[Job]:
        """Least work first, where work that comes too late counts `_LATE` times."""
        late, timely = self._prompts.classes
        return merge(timely, late, key=self._weighted_work)

    def _weighted_work(self, job: Job) -> tuple[Any, ...]:
        return (job.rank[0] * (_LATE if job.slack_class == 0 else 1), *job.rank[1:])

    def _begin(self, draft: Draft, job: Job) -> bool:
        """Start a prompt, if the profile takes it; alone it is always taken."""
        chunk = self._chunk_tokens(draft, job)
        if chunk == 0 or not self._text_fits(draft, job):
            return False
        total, ends = job.prefill_tokens, job.prefill_tokens + job.rest_tokens
        if not self._is_empty and not self._usage().fits(total, ends, 0):
            return False
        if self._blocks(job.computed_tokens + chunk) > self._free_blocks:
            return False
        usage = self._usage()
        job.end_tokens = ends
        self._draft_prompt(draft, job, chunk)
        usage.start(total, ends, 0)
        return True
