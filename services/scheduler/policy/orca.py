"""`orca`: first come, first served, every sequence given the blocks of its longest possible answer at once.

Scheduling is by iteration, up to the batch cap, as with `vllm`; but a prompt starts only where prompt +
max_tokens fits into the free blocks, and all of those are reserved from its first chunk to its end. So
nothing that started here ever runs out of blocks, and nothing is preempted.

Two things can come from outside: sequences adopted with less than their maximum (another policy's
allocations), and a worker that shrinks. Adopted ones are topped up to their maximum, oldest first, as soon
as it is free; until then they take blocks on demand, with the newest preempted where there is none, and
nobody else starts.

Source: algorithms.md §1 and papers/003 §2 for the policy as a rival; how batches are put together is in
`first_come.py`.
"""

from services.scheduler.policy.contract import Holding, PlannedBatch, PolicySettings, Task, WorkerShape
from services.scheduler.policy.first_come import Draft, FirstComePolicy
from services.scheduler.policy.options import read_options
from services.scheduler.policy.progress import Entry, Stage
from shared.messages.sequence import SequenceKey


class OrcaPolicy(FirstComePolicy):
    """One worker's batches. Implements `contract.BatchPolicy`."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        read_options("orca", settings.options, {})
        super().__init__(shape, settings)
        self._adopted: set[SequenceKey] = set()
        """Those that may hold less than their maximum."""

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        super().on_adopted(task, holding, now_s)
        if self._entries[task.key].allocated_blocks < self._blocks(task.limit_tokens):
            self._adopted.add(task.key)

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        super().on_ended(key, now_s, answer_tokens)
        self._adopted.discard(key)

    def plan(self, now_s: float) -> PlannedBatch | None:
        draft = self._draft()
        if not draft.preempted and not self._is_anyone_short(draft):
            self._admit(draft)
        return self._commit(draft)

    def check_integrity(self) -> None:
        """Raises AssertionError when the books do not balance, or what started here could run out."""
        super().check_integrity()
        assert self._adopted <= self._entries.keys()
        for entry in self._running:
            has_maximum = entry.allocated_blocks >= self._blocks(entry.task.limit_tokens)
            assert has_maximum or entry.task.key in self._adopted, "started with less than its maximum"

    def _target_blocks(self, entry: Entry, tokens: int) -> int:
        return max(self._blocks(tokens), self._maximum_blocks(entry))

    def _can_start(self, draft: Draft, entry: Entry) -> bool:
        return self._maximum_blocks(entry) <= draft.free_blocks

    def _maximum_blocks(self, entry: Entry) -> int:
        """Clamped to what an otherwise empty worker gives: one that was adopted may be larger than that."""
        return min(self._blocks(entry.task.limit_tokens), self._capacity_blocks)

    def _is_anyone_short(self, draft: Draft) -> bool:
        """An adopted sequence that needs more blocks than it has comes before all that wait."""
        return any(
            draft.blocks_of(entry) < self._maximum_blocks(entry)
            for entry in self._running
            if entry.stage is not Stage.COMPLETE and entry.task.key in self._adopted
        )
