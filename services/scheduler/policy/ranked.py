"""What preemptive policies have in common: at every step those of highest rank run, whoever ran before.

Each sequence gets the blocks of its longest possible answer at once (max-allocation), so nothing that started
here runs out. The batch is filled by rank from those that run and those that wait. One that runs and is not
among the first pauses and keeps its blocks; where the first that waits lacks blocks, those of lower rank give
up theirs, lowest first, and are computed again later; none does where even all of them would not be enough.
Within the budget decodes go first, then prompts by rank.

A rank is `_rank`: constant while a sequence waits, and such that whoever is first stays so until it gained a
token, but for those that arrive. Then every plan brings the first one closer to its end, and nothing wedges.
Sequences found at the worker with less than their maximum are served before anybody starts. Source:
papers/003 §2 (its FastServe and SRTF); algorithms.md §1.
"""

from itertools import islice
from typing import Any

from services.scheduler.policy.contract import PlannedBatch, PolicySettings, WorkerShape, read_options
from services.scheduler.policy.first_come import BatchDraft, FirstComePolicy
from services.scheduler.policy.foresight import Foreseeing
from services.scheduler.policy.progress import TaskEntry, TaskStage
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class RankedPolicy(FirstComePolicy):
    """One worker's batches, but for `_rank`. A subclass fulfils `contract.BatchPolicy`."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        draft = BatchDraft({}, {}, {}, self._settings.token_budget, self._capacity_blocks - self._used_blocks)
        self._shed(draft)
        chosen = self._choose(draft)
        for entry in chosen:
            self._draft_decode(draft, entry)
        may_start = True
        for entry in chosen:
            if entry.task.key in draft.preempted:
                continue
            if entry.stage is TaskStage.WAITING:
                may_start = may_start and self._draft_start(draft, entry)
            else:
                self._draft_chunk(draft, entry)
        self._fill(draft)
        batch = self._commit(draft)
        self._sort_running()
        return batch

    def _fill(self, draft: BatchDraft) -> None:
        """Places of those that could not start after all go to decodes, by rank."""
        for entry in list(self._running):
            drafted = entry.task.key in draft.decodes
            if draft.budget_tokens > 0 and not drafted:
                self._draft_decode(draft, entry)

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        super().on_short(key, missing_tokens, now_s)
        self._sort_running()

    def _choose(self, draft: BatchDraft) -> list[TaskEntry]:
        """Who is in the batch, by rank, as many as it holds. Makes room for the first that starts."""
        limit = self._settings.max_batch_sequences
        running = [entry for entry in self._running if entry.stage is not TaskStage.COMPLETE]
        waiting: list[TaskEntry] = []
        if not draft.preempted and all(self._has_maximum(entry) for entry in running):
            waiting = list(islice(self._startable(), limit))
        free_blocks = draft.free_blocks
        may_evict = True
        chosen: list[TaskEntry] = []
        while len(chosen) < limit and (running or waiting):
            if not waiting or (running and self._rank(running[0]) < self._rank(waiting[0])):
                may_evict = may_evict and running[0].stage is TaskStage.DECODING
                chosen.append(running.pop(0))
                continue
            missing_blocks = self._maximum_blocks(waiting[0]) - free_blocks
            if missing_blocks > 0 and not (may_evict and self._make_room(draft, missing_blocks, running)):
                waiting = []
                continue
            chosen.append(waiting.pop(0))
            free_blocks = draft.free_blocks - sum(
                self._maximum_blocks(entry) for entry in chosen if entry.stage is TaskStage.WAITING
            )
            may_evict = False
        return chosen

    def _make_room(self, draft: BatchDraft, missing_blocks: int, outranked: list[TaskEntry]) -> bool:
        """Take blocks from `outranked`, the last first. It waits (False) for blocks about to be free."""
        if missing_blocks <= self._releasing_blocks():
            return False
        if missing_blocks > sum(entry.allocated_blocks for entry in outranked):
            return False
        while missing_blocks > 0:
            victim = outranked.pop()
            missing_blocks -= victim.allocated_blocks
            self._preempt(draft, victim)
        return True

    def _target_blocks(self, entry: TaskEntry, tokens: int) -> int:
        return max(self._blocks(tokens), self._maximum_blocks(entry))

    def _can_start(self, draft: BatchDraft, entry: TaskEntry) -> bool:
        return self._maximum_blocks(entry) <= draft.free_blocks

    def _maximum_blocks(self, entry: TaskEntry) -> int:
        """Clamped to what an otherwise empty worker gives: one that was found there may be larger."""
        return min(self._blocks(entry.task.limit_tokens), self._capacity_blocks)

    def _has_maximum(self, entry: TaskEntry) -> bool:
        return entry.allocated_blocks >= self._maximum_blocks(entry)


class SrtfPolicy(Foreseeing, RankedPolicy):
    """One worker's batches. Implements `contract.BatchPolicy`."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        read_options("srtf", settings.options, {})
        super().__init__(shape, settings)

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        super().on_predicted(key, prediction, now_s)
        self._sort_running()

    def plan(self, now_s: float) -> PlannedBatch | None:
        return self._with_questions(super().plan(now_s))

    def _rank(self, entry: TaskEntry) -> Any:
        prefill_tokens = 0
        if entry.stage in (TaskStage.WAITING, TaskStage.PREFILLING):
            prefill_tokens = entry.prefill_tokens - entry.computed_tokens
        steps = self._foresight.remaining_tokens(entry) + prefill_tokens / self._settings.token_budget
        return (steps, entry.task.order)
