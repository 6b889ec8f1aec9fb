"""Preemptive policies: each step runs the highest ranks, with blocks for their longest answers.

A running sequence that loses its place pauses with its blocks; if the first waiting one lacks blocks, lower
ranks are preempted. Source: papers/003 §2 (its FastServe and SRTF); algorithms.md §1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from services.scheduler.policy.batch_builder import BatchBuilder, Job, JobStage
from services.scheduler.policy.contract import Holding, PlannedBatch, PolicySettings, Task, WorkerShape
from services.scheduler.policy.first_come import MaximumPolicy
from services.scheduler.policy.research.foresight import Foreseeing
from services.scheduler.policy.waiting_queue import Line
from shared.messages.sequence import SequenceKey


class RankedPolicy(MaximumPolicy):
    """Runs the highest ranks. A subclass defines `_rank` and satisfies `contract.BatchPolicy`."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        batch = BatchBuilder(self._table, self._settings)
        self._shed(batch)
        chosen = self._choose(batch)
        for job in chosen:
            self._add_decode(batch, job)
        may_start = True
        for job in chosen:
            if job.task.key in batch.preemptions:
                continue
            if job.stage is JobStage.WAITING:
                may_start = may_start and self._add_start(batch, job)
            else:
                self._add_chunk(batch, job)
        for job in list(self._running):  # fill places that failed starts left
            if batch.budget_tokens > 0 and job.task.key not in batch.decodes:
                self._add_decode(batch, job)
        planned = self._finish(batch)
        self._sort_running()
        return planned

    def _correct(self, key: SequenceKey, change: Callable[[Job, int], None], tokens: int) -> None:
        super()._correct(key, change, tokens)
        self._sort_running()

    def on_prefix_hit(self, key: SequenceKey, cached_tokens: int, now_s: float) -> None:
        super().on_prefix_hit(key, cached_tokens, now_s)
        self._sort_running()

    def _choose(self, batch: BatchBuilder) -> list[Job]:
        """Return the batch's jobs by rank, after making room for the first start."""
        limit = self._settings.max_batch_sequences
        running = [job for job in self._running if job.stage is not JobStage.COMPLETE]
        waiting: list[Job] = []
        if not batch.preemptions and all(
            job.held_blocks >= self._table.maximum_blocks(job) for job in running
        ):
            waiting = list(islice(self._startable(), limit))
        free_blocks = self._table.free_blocks
        may_evict = True
        chosen: list[Job] = []
        while len(chosen) < limit and (running or waiting):
            if not waiting or (running and self._rank(running[0]) < self._rank(waiting[0])):
                may_evict = may_evict and running[0].stage is JobStage.DECODING
                chosen.append(running.pop(0))
                continue
            missing_blocks = self._table.maximum_blocks(waiting[0]) - free_blocks
            if missing_blocks > 0 and not (may_evict and self._make_room(batch, missing_blocks, running)):
                waiting = []
                continue
            chosen.append(waiting.pop(0))
            free_blocks = self._table.free_blocks - sum(
                self._table.maximum_blocks(job) for job in chosen if job.stage is JobStage.WAITING
            )
            may_evict = False
        return chosen

    def _make_room(self, batch: BatchBuilder, missing_blocks: int, outranked: list[Job]) -> bool:
        """Preempt from the end of `outranked` and return True; return False if that cannot suffice, or if
        blocks are about to be free."""
        if missing_blocks <= self._releasing_blocks():
            return False
        if missing_blocks > sum(job.held_blocks for job in outranked):
            return False
        while missing_blocks > 0:
            victim = outranked.pop()
            missing_blocks -= victim.held_blocks
            self._preempt(batch, victim)
        return True


class SrtfPolicy(Foreseeing, RankedPolicy):
    """`srtf`: the shortest predicted remaining time runs first and may preempt."""

    name = "srtf"

    def _rank(self, job: Job) -> Any:
        prefill_tokens = 0
        if job.stage in (JobStage.WAITING, JobStage.PREFILLING):
            prefill_tokens = job.prefill_tokens - job.computed_tokens
        steps = self._length_tokens(job) - job.generated_tokens + prefill_tokens / self._settings.token_budget
        return (job.task.priority, steps, job.task.order)


@dataclass(slots=True)
class _Turn:
    """A sequence's place in the levels."""

    level: int
    joined: int
    """Counter of joins to any level; lower goes first within one."""
    served_s: float
    tokens: int = 0
    """Tokens generated at this level."""


class FastServePolicy(RankedPolicy):
    """`fastserve`: a multi-level feedback queue, ranked by level, then by time of joining.

    Each level's quantum is twice that of the level above. A sequence joins the highest level whose quantum
    covers its first iteration (skip-join), and drops a level after generating a quantum of tokens. After
    `starve_s` without service it returns to the top. Source: FastServe (arXiv 2305.05920) §4.
    """

    name = "fastserve"
    defaults: ClassVar[dict[str, float]] = {"levels": 5, "quantum_steps": 8, "starve_s": 10.0}

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._turns: dict[SequenceKey, _Turn] = {}
        self._joins = 0
        self._step_prefill_tokens = float(settings.token_budget)
        """Prompt tokens that take as long as one decode step."""
        self._neglected: Line[Job] = Line(self._neglect)
        """Waiting sequences below the top level, longest unserved first."""
        super().__init__(shape, settings)
        self._levels = int(self._options["levels"])
        self._quantum_steps = int(self._options["quantum_steps"])
        self._starve_s: float = self._options["starve_s"]

    def on_arrival(self, task: Task, now_s: float) -> None:
        self._enter(task, now_s)
        super().on_arrival(task, now_s)

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        self._enter(task, now_s)
        super().on_adopted(task, holding, now_s)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        super().on_ended(key, now_s, answer_tokens)
        self._turns.pop(key, None)

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, now_s: float) -> None:
        if prefill_tokens_per_s > 0 and decode_step_s > 0:
            self._step_prefill_tokens = max(1.0, prefill_tokens_per_s * decode_step_s)

    def plan(self, now_s: float) -> PlannedBatch | None:
        self._raise_starved(now_s)
        batch = super().plan(now_s)
        if batch is not None:
            for prefill in batch.prefills:
                job = self._table.jobs[prefill.key]
                self._serve(prefill.key, int(job.stage is not JobStage.PREFILLING), now_s)
            for decode in batch.decodes:
                self._serve(decode.key, decode.tokens, now_s)
            self._sort_running()
        return batch

    def check_integrity(self) -> None:
        super().check_integrity()
        assert self._turns.keys() == self._table.jobs.keys()
        assert all(0 <= turn.level < self._levels for turn in self._turns.values())
        below = [job for job in self._waiting if self._turns[job.task.key].level > 0]
        assert set(map(id, below)) == set(map(id, self._neglected)) and len(below) == len(self._neglected)
        self._neglected.check_integrity()

    def _rank(self, job: Job) -> Any:
        turn = self._turns[job.task.key]
        return (job.task.priority, turn.level, turn.joined)

    def _neglect(self, job: Job) -> Any:
        turn = self._turns[job.task.key]
        return (turn.served_s, turn.joined)

    def _enqueue(self, job: Job) -> None:
        super()._enqueue(job)
        if self._turns[job.task.key].level > 0:
            self._neglected.add(job)

    def _dequeue(self, job: Job) -> None:
        super()._dequeue(job)
        self._neglected.discard(job)

    def _enter(self, task: Task, now_s: float) -> None:
        """Give a new sequence a place."""
        if task.key in self._table.jobs:
            return
        steps = (task.prompt_tokens + task.generated_tokens) / self._step_prefill_tokens
        level = 0
        while level < self._levels - 1 and self._quantum_steps << level < steps:
            level += 1
        self._turns[task.key] = self._join(level, now_s)

    def _join(self, level: int, now_s: float) -> _Turn:
        self._joins += 1
        return _Turn(level, self._joins, now_s)

    def _serve(self, key: SequenceKey, tokens: int, now_s: float) -> None:
        """Count service. Only answer tokens use the quantum, so a recomputation keeps its place."""
        turn = self._turns[key]
        turn.served_s = now_s
        turn.tokens += tokens
        if turn.tokens >= self._quantum_steps << turn.level and turn.level < self._levels - 1:
            self._turns[key] = self._join(turn.level + 1, now_s)

    def _raise_starved(self, now_s: float) -> None:
        """Move starved sequences to the end of the top level."""
        while (job := self._neglected.first()) is not None and self._is_starved(job, now_s):
            self._dequeue(job)
            self._turns[job.task.key] = self._join(0, now_s)
            self._enqueue(job)
        for job in self._running:
            if self._turns[job.task.key].level > 0 and self._is_starved(job, now_s):
                self._turns[job.task.key] = self._join(0, now_s)
        self._sort_running()

    def _is_starved(self, job: Job, now_s: float) -> bool:
        return now_s - self._turns[job.task.key].served_s >= self._starve_s
