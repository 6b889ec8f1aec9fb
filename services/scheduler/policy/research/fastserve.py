"""`fastserve`: a multi-level feedback queue, with blocks for the longest answer.

Five levels; the quantum of each is twice that of the one above it. A sequence joins the highest level whose
quantum covers its first iteration (skip-join: a long prompt does not start at the top), and goes one level
down when it has generated as many tokens as its level's quantum. Within a level: in the order of joining. One
that was not served for `starve_s` returns to the top level. Lengths are not predicted. How a batch is filled
by rank, and what becomes of those that lose their place, is in `ranked.py`: they pause with their blocks, or,
where blocks are short, are computed again. (FastServe itself moves their KV to the host; a plan has no such
mode.)

Options: `levels`, `quantum_steps` (of the top level), `starve_s`. Source: FastServe (arXiv 2305.05920) §4 as
papers/003 §2 uses it, with max-allocation; algorithms.md §1.
"""

from dataclasses import dataclass
from typing import Any

from services.scheduler.policy.batch_builder import Job, JobStage
from services.scheduler.policy.contract import (
    Holding,
    PlannedBatch,
    PolicySettings,
    Task,
    WorkerShape,
    read_options,
)
from services.scheduler.policy.research.ranked import RankedPolicy
from services.scheduler.policy.waiting_queue import Line
from shared.messages.sequence import SequenceKey

_DEFAULTS = {"levels": 5, "quantum_steps": 8, "starve_s": 10.0}


@dataclass(slots=True)
class _Turn:
    """Where a sequence stands in the levels."""

    level: int
    joined: int
    """Counts joins to any level: smaller comes first within one."""
    served_s: float
    tokens: int = 0
    """Generated at this level."""


class FastServePolicy(RankedPolicy):
    """`fastserve`: ranked by level, and within a level by when it was joined."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        options = read_options("fastserve", settings.options, _DEFAULTS)
        self._levels = int(options["levels"])
        self._quantum_steps = int(options["quantum_steps"])
        self._starve_s: float = options["starve_s"]
        self._turns: dict[SequenceKey, _Turn] = {}
        self._joins = 0
        self._step_prefill_tokens = float(settings.token_budget)
        """Prompt tokens that take as long as one decode step."""
        self._neglected: Line[Job] = Line(self._neglect)
        """Those that wait below the top level, the longest unserved first."""
        super().__init__(shape, settings)

    def on_arrival(self, task: Task, now_s: float) -> None:
        if task.key not in self._table.jobs:
            self._turns[task.key] = self._join(self._first_level(task), now_s)
            super().on_arrival(task, now_s)

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        if task.key not in self._table.jobs:
            self._turns[task.key] = self._join(self._first_level(task), now_s)
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
        """Raises AssertionError when the books do not balance."""
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

    def _first_level(self, task: Task) -> int:
        steps = (task.prompt_tokens + task.generated_tokens) / self._step_prefill_tokens
        level = 0
        while level < self._levels - 1 and self._quantum_steps << level < steps:
            level += 1
        return level

    def _join(self, level: int, now_s: float) -> _Turn:
        self._joins += 1
        return _Turn(level, self._joins, now_s)

    def _serve(self, key: SequenceKey, tokens: int, now_s: float) -> None:
        """Only tokens of the answer count: whoever has to be computed again keeps its place meanwhile."""
        turn = self._turns[key]
        turn.served_s = now_s
        turn.tokens += tokens
        if turn.tokens >= self._quantum_steps << turn.level and turn.level < self._levels - 1:
            self._turns[key] = self._join(turn.level + 1, now_s)

    def _raise_starved(self, now_s: float) -> None:
        """Back to the top, behind those that are there."""
        job = self._neglected.first()
        while job is not None and self._is_starved(job, now_s):
            self._dequeue(job)
            self._turns[job.task.key] = self._join(0, now_s)
            self._enqueue(job)
            job = self._neglected.first()
        for job in self._running:
            if self._turns[job.task.key].level > 0 and self._is_starved(job, now_s):
                self._turns[job.task.key] = self._join(0, now_s)
        self._sort_running()

    def _is_starved(self, job: Job, now_s: float) -> bool:
        return now_s - self._turns[job.task.key].served_s >= self._starve_s
