"""`fastserve`: a multi-level feedback queue, with blocks for the longest answer.

Each level's quantum is twice that of the level above. A sequence joins the highest level whose quantum covers
its first iteration (skip-join), and drops a level after generating a quantum of tokens. After `starve_s`
without service it returns to the top. Source: FastServe (arXiv 2305.05920) §4; algorithms.md §1.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from services.scheduler.policy.batch_builder import Job, JobStage
from services.scheduler.policy.contract import Holding, PlannedBatch, PolicySettings, Task, WorkerShape
from services.scheduler.policy.research.ranked import RankedPolicy
from services.scheduler.policy.waiting_queue import Line
from shared.messages.sequence import SequenceKey


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
    """`fastserve`: ranked by level, then by time of joining."""

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
        """Raises AssertionError when the accounts do not balance."""
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
