"""`multires`: whoever's demand comes closest to what is free, in compute and in KV at once.

The demand of a sequence is (tokens of its prompt that this step may compute, blocks of prompt and predicted
answer); what is free is (the budget left, the blocks left). Both are measured as shares of the whole, and the
one with the least Euclidean distance that fits starts; then again, until nobody fits. The paper compares
with every request that waits, O(n) for each start. Here those that wait stand in rows of nearly equal prompts
(a quarter of an octave), each in the order of blocks; the closest of a row is the largest that fits, so that
one start costs one search in each row (some 50), and the choice is exact in blocks and, in tokens, up to the
width of a row. Ties: the earlier arrival.

Nothing ages: a demand that never fits best waits. What has no prediction counts as long as it may get.
Source: papers/003 §2.1 (MultiRes), algorithms.md §1; allocation and the rest are in `foresight.py`.
"""

from collections.abc import Iterator
from math import inf, log2
from typing import Any

from services.scheduler.policy.batch_builder import BatchBuilder, Job
from services.scheduler.policy.contract import PolicySettings, WorkerShape, read_options
from services.scheduler.policy.research.foresight import ExactPolicy
from services.scheduler.policy.waiting_queue import Line
from shared.messages.sequence import SequenceKey

_ROWS_PER_OCTAVE = 4


class MultiResPolicy(ExactPolicy):
    """`multires`: who waits stands in rows of like prompts; the closest of all rows starts."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        read_options("multires", settings.options, {})
        self._rows: dict[tuple[int, int], Line[SequenceKey]] = {}
        """Those that wait and can ever fit, by priority and the logarithm of their prompt."""
        self._places: dict[SequenceKey, tuple[Any, ...]] = {}
        """(row, negative of the blocks asked for, arrival, key) of each of them."""
        super().__init__(shape, settings)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance."""
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
            for key in row.starting_at((-self._table.free_blocks,)):
                if key in batch.prefills:
                    continue
                job = self._table.jobs[key]
                found = (job.task.priority, self._distance(batch, job), job.task.order)
                if found[1] < inf and (best is None or found < least):
                    best, least = job, found
                break
        return best

    def _distance(self, batch: BatchBuilder, job: Job) -> float:
        """Squared, in shares of the token budget and of the capacity; infinite where it does not fit."""
        tokens = batch.chunk_tokens(job)
        if tokens == 0:
            return inf
        budget_share = max(0, batch.budget_tokens - tokens) / self._settings.token_budget
        blocks_share = (self._table.free_blocks - self._exact_blocks(job)) / self._table.capacity_blocks
        return float(budget_share**2 + blocks_share**2)
