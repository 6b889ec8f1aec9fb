"""`sync_coupled`: starts sequences of equal predicted length together, prompt and answer in one allocation.

The group of the earliest arrival goes first, as many members as fit; no other group starts before it is done.
Source: papers/003 §2.2 (SyncCoupled), algorithms.md §1; `foresight.py` allocates.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

from services.scheduler.policy.batch_builder import BatchBuilder, Job, JobStage
from services.scheduler.policy.contract import PolicySettings, WorkerShape
from services.scheduler.policy.research.foresight import ExactPolicy
from services.scheduler.policy.waiting_queue import Line
from shared.messages.sequence import SequenceKey


class SyncCoupledPolicy(ExactPolicy):
    """`sync_coupled`: waiting sequences stand in groups by predicted length; one group starts at a time."""

    name = "sync_coupled"
    defaults: ClassVar[dict[str, int]] = {"group_tokens": 32}

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._groups: dict[tuple[int, int], Line[Job]] = {}
        """Waiting sequences that can fit, by priority and predicted length."""
        self._numbers: dict[SequenceKey, tuple[int, int]] = {}
        """Group of each of them."""
        self._heads: Line[tuple[int, int]] = Line(self._head_order)
        """Groups by their earliest arrival."""
        self._chosen: list[SequenceKey] = []
        """Members of the latest group that have not started, in order."""
        super().__init__(shape, settings)
        self._group_tokens = int(self._options["group_tokens"])

    def check_integrity(self) -> None:
        """Raises AssertionError when the accounts do not balance."""
        super().check_integrity()
        startable = {job.task.key for job in self._startable()}
        assert self._numbers.keys() == startable >= set(self._chosen)
        assert sum(len(group) for group in self._groups.values()) == len(startable)
        assert sorted(self._heads) == sorted(self._groups)
        self._heads.check_integrity()

    def _head_order(self, number: tuple[int, int]) -> Any:
        first = self._groups[number].first()
        assert first is not None
        return first.task.order

    def _enqueue(self, job: Job) -> None:
        super()._enqueue(job)
        if self._table.is_oversized(job):
            return
        length = -(-(self._length_tokens(job) - job.generated_tokens) // self._group_tokens)
        number = (job.task.priority, length)
        if number in self._groups:
            self._heads.remove(number)
        self._groups.setdefault(number, Line(self._rank)).add(job)
        self._heads.add(number)
        self._numbers[job.task.key] = number

    def _dequeue(self, job: Job) -> None:
        super()._dequeue(job)
        number = self._numbers.pop(job.task.key, None)
        if number is None:
            return
        if job.task.key in self._chosen:
            self._chosen.remove(job.task.key)
        self._heads.remove(number)
        self._groups[number].remove(job)
        if len(self._groups[number]):
            self._heads.add(number)
        else:
            del self._groups[number]

    def _candidates(self, batch: BatchBuilder) -> Iterator[Job]:
        """Yield the rest of the latest group, then others, until one does not fit, lower priorities first."""
        head = self._heads.first()
        if self._chosen and head is not None and head[0] < self._numbers[self._chosen[0]][0]:
            self._chosen.clear()
        for key in list(self._chosen):
            yield self._table.jobs[key]
        for number in list(self._heads):
            most = len(batch.prefills) + self._settings.max_batch_sequences + 1
            first = list(islice(self._groups[number], most))
            open_to = [job for job in first if job.task.key not in batch.prefills]
            members = self._fitting(batch, open_to)
            self._chosen += [job.task.key for job in members]
            yield from members
            if len(members) < len(open_to):
                return

    def _fitting(self, batch: BatchBuilder, group: list[Job]) -> list[Job]:
        """Return the first members that fit the free blocks and the batch."""
        free_blocks = self._table.free_blocks
        running = sum(job.missing_tokens > 0 for job in self._running)
        starting = sum(self._table.jobs[key].stage is JobStage.WAITING for key in batch.prefills)
        places = self._settings.max_batch_sequences - running - starting
        members: list[Job] = []
        for job in group:
            free_blocks -= self._exact_blocks(job)
            if free_blocks < 0 or len(members) >= places:
                break
            members.append(job)
        return members
