"""How far a policy's tasks are, as it projects them: one worker's books of tokens and blocks.

`Projection` takes the events of `contract.BatchPolicy` that mean the same for every policy, holds the tasks
in two lines, those that wait and those that hold something, and checks that the books balance. Both stand in
the order of `_rank`, which is that of arrival unless a policy says otherwise. Those that wait may be many:
nothing here costs more than the logarithm of their number. Shared by policies; knows none of their rules.
"""

from bisect import insort
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.scheduler.policy.contract import Holding, PolicySettings, Task, WorkerShape
from services.scheduler.policy.line import Line
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


class TaskStage(StrEnum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    COMPLETE = "complete"
    """Planned to its limit: keeps its blocks until the end is confirmed."""


@dataclass(slots=True, eq=False)
class TaskEntry:
    """One task's projected progress."""

    task: Task
    generated_tokens: int
    stage: TaskStage = TaskStage.WAITING
    computed_tokens: int = 0
    allocated_blocks: int = 0

    @property
    def prefill_tokens(self) -> int:
        return self.task.prompt_tokens + self.generated_tokens

    @property
    def missing_tokens(self) -> int:
        return self.task.max_tokens - self.generated_tokens


class Projection:
    """Every task of one worker. A policy is one of these that also plans."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._block_tokens = shape.block_tokens
        self._capacity_blocks = shape.capacity_blocks
        self._settings = settings
        self._entries: dict[SequenceKey, TaskEntry] = {}
        self._waiting: Line[TaskEntry] = Line(self._rank)
        self._running: list[TaskEntry] = []
        self._used_blocks = 0

    def on_arrival(self, task: Task, now_s: float) -> None:
        if task.key not in self._entries:
            entry = self._entries[task.key] = TaskEntry(task, task.generated_tokens)
            self._enqueue(entry)

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        if task.key in self._entries:
            return
        entry = TaskEntry(
            task, task.generated_tokens, TaskStage.WAITING, holding.computed_tokens, holding.allocated_blocks
        )
        self._entries[task.key] = entry
        if holding.decoding:
            entry.stage = TaskStage.DECODING if entry.missing_tokens > 0 else TaskStage.COMPLETE
        elif holding.computed_tokens or holding.allocated_blocks:
            entry.stage = TaskStage.PREFILLING
        self._used_blocks += entry.allocated_blocks
        if entry.stage is TaskStage.WAITING:
            self._enqueue(entry)
        else:
            insort(self._running, entry, key=self._rank)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_blocks -= entry.allocated_blocks
            if entry.stage is TaskStage.WAITING:
                self._dequeue(entry)
            else:
                self._running.remove(entry)

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.stage in (TaskStage.DECODING, TaskStage.COMPLETE):
            entry.generated_tokens -= missing_tokens
            entry.computed_tokens -= missing_tokens
            entry.stage = TaskStage.DECODING if entry.missing_tokens > 0 else TaskStage.COMPLETE

    def on_prefix_hit(self, key: SequenceKey, cached_tokens: int, now_s: float) -> None:
        """As far as the free blocks reach: what is shared counts here as if it were its own."""
        entry = self._entries.get(key)
        if entry is None or entry.stage is not TaskStage.PREFILLING:
            return
        room_blocks = entry.allocated_blocks + max(0, self._capacity_blocks - self._used_blocks)
        cached_tokens = min(cached_tokens, entry.prefill_tokens - 1, room_blocks * self._block_tokens)
        if cached_tokens > entry.computed_tokens:
            blocks = max(entry.allocated_blocks, self._blocks(cached_tokens))
            self._grow(entry, cached_tokens, blocks, 0)

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        self._capacity_blocks = capacity_blocks

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, now_s: float) -> None:
        """Speeds change nothing here."""

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        """Predictions change nothing here."""

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance."""
        entries = list(self._entries.values())
        assert self._used_blocks == sum(entry.allocated_blocks for entry in entries)
        lines = [*self._waiting, *self._running]
        assert {id(entry) for entry in entries} == {id(entry) for entry in lines}
        assert len(entries) == len(lines)
        self._waiting.check_integrity()
        assert self._running == sorted(self._running, key=self._rank), "out of order"
        for entry in entries:
            task = entry.task
            assert 0 <= entry.generated_tokens <= task.max_tokens
            assert entry.computed_tokens <= entry.allocated_blocks * self._block_tokens
            assert (entry in self._waiting) == (entry.stage is TaskStage.WAITING)
            if entry.stage is TaskStage.WAITING:
                assert entry.computed_tokens == entry.allocated_blocks == 0
            if entry.stage in (TaskStage.DECODING, TaskStage.COMPLETE):
                assert entry.computed_tokens == entry.prefill_tokens - 1
            assert (entry.stage is TaskStage.COMPLETE) == (
                entry.stage is not TaskStage.WAITING and entry.missing_tokens == 0
            )

    def _rank(self, entry: TaskEntry) -> Any:
        """Who comes first: unique to each entry, and constant while it waits."""
        return entry.task.order

    def _enqueue(self, entry: TaskEntry) -> None:
        """Joins those that wait. A policy with an index of its own extends this and `_dequeue`."""
        self._waiting.add(entry)

    def _dequeue(self, entry: TaskEntry) -> None:
        self._waiting.remove(entry)

    def _sort_running(self) -> None:
        """After ranks of running entries changed."""
        self._running.sort(key=self._rank)

    def _releasing_blocks(self) -> int:
        """What is free as soon as the ends that were planned for are confirmed."""
        return sum(entry.allocated_blocks for entry in self._running if entry.stage is TaskStage.COMPLETE)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _start(self, entry: TaskEntry) -> None:
        """From waiting to running; nothing is held yet."""
        self._dequeue(entry)
        insort(self._running, entry, key=self._rank)
        entry.stage = TaskStage.PREFILLING

    def _release(self, entry: TaskEntry) -> None:
        """From running to waiting; all it held is free, and its tokens are to be computed again."""
        self._used_blocks -= entry.allocated_blocks
        entry.stage, entry.computed_tokens, entry.allocated_blocks = TaskStage.WAITING, 0, 0
        self._running.remove(entry)
        self._enqueue(entry)

    def _grow(self, entry: TaskEntry, computed_tokens: int, blocks: int, new_tokens: int) -> None:
        """A batch brings `entry` to that many tokens in the cache, blocks in all, and new answer tokens."""
        self._used_blocks += blocks - entry.allocated_blocks
        entry.computed_tokens, entry.allocated_blocks = computed_tokens, blocks
        entry.generated_tokens += new_tokens
        if new_tokens:
            entry.stage = TaskStage.DECODING if entry.missing_tokens > 0 else TaskStage.COMPLETE
