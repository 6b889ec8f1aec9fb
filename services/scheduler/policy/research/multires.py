"""`multires`: starts the sequence whose demand is closest to the free resources, in compute and KV.

A demand is (prompt tokens this step may compute, blocks of prompt and predicted answer), as shares. Waiting
sequences stand in rows of similar prompt length, by blocks; the closest of a row is the largest that fits.
Source: papers/003 §2.1 (MultiRes), algorithms.md §1; `foresight.py` allocates.
"""

from collections.abc import Iterator
from math import inf, log2
from typing import Any

from services.scheduler.policy.batch_builder import BatchBuilder, Job
from services.scheduler.policy.contract import PolicySettings, WorkerShape
from services.scheduler.policy.research.foresight import ExactPolicy
from services.scheduler.policy.waiting_queue import Line
from shared.messages.sequence import SequenceKey

_ROWS_PER_OCTAVE = 4


class MultiResPolicy(ExactPolicy):
    """`multires`: waiting sequences stand in rows; the closest of all rows starts."""

    name = "multires"

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._rows: dict[tuple[int, int], Line[SequenceKey]] = {}
        """Waiting sequences that can fit, by priority and the logarithm of their prompt."""
        self._places: dict[SequenceKey, tuple[Any, ...]] = {}
        """(row, negative block demand, arrival, key) of each of them."""
        super().__init__(shape, settings)

    def check_integrity(self) -> None:
        """Raises AssertionError when the accounts do not balance."""
        super().check_integrity()
        startable = {job.task.key for job in self._startable()}
        assert self._places.keys() == startable
        assert sum(len(row) for row in self._rows.values()) == len(startable)
        for number, row in self._rows.items():
            row.check_integrity()
            assert len(row) and all(self._places[key][0] == number for key in row)

    def _enqueue(self, job: Job) -> None:
        super()._enqueue(job)
        if self._table.is_oversized(job):
            return
        number = (job.task.priority, int(log2(max(1, job.prefill_tokens)) * _ROWS_PER_OCTAVE))
        key = job.task.key
        self._places[key] = (number, -self._exact_blocks(job), *job.task.order)
        self._rows.setdefault(number, Line(self._in_row)).add(key)

    def _dequeue(self, job: Job) -> None:
        super()._dequeue(job)
        key = job.task.key
        if key in self._places:
            row = self._rows[self._places[key][0]]
            row.remove(key)
            if not len(row):
                del self._rows[self._places[key][0]]
            del self._places[key]

    def _in_row(self, key: SequenceKey) -> Any:
        return self._places[key][1:]

    def _candidates(self, batch: BatchBuilder) -> Iterator[Job]:
        job = self._closest(batch)
        while job is not None:
            yield job
            job = self._closest(batch)

    def _closest(self, batch: BatchBuilder) -> Job | None:
        best: Job | None = None
        least: tuple[int, float, Any] = (0, inf, None)
        for row in self._rows.values():
            for key in row.irange_key((-self._table.free_blocks,)):
                if key in batch.prefills:
                    continue
                job = self._table.jobs[key]
                found = (job.task.priority, self._distance(batch, job), job.task.order)
                if found[1] < inf and (best is None or found < least):
                    best, least = job, found
                break
        return best

    def _distance(self, batch: BatchBuilder, job: Job) -> float:
        """Return the squared distance in shares of budget and capacity; infinite if it does not fit."""
        tokens = batch.chunk_tokens(job)
        if tokens == 0:
            return inf
        budget_share = max(0, batch.budget_tokens - tokens) / self._settings.token_budget
        blocks_share = (self._table.free_blocks - self._exact_blocks(job)) / self._table.capacity_blocks
        return float(budget_share**2 + blocks_share**2)
