"""What policies that serve first come, first served have in common: how a batch is put together, in order.

Decodes first, oldest first; then prompts that are partly prefilled; then waiting prompts, in order, while
the token budget, the batch and the free blocks last. With `chunked_prefill` a prompt is cut to the budget
that is left; without, prompts go whole, and one longer than the budget goes when no other prompt does.
While nothing waits and nothing prefills, batches reach several steps ahead.

How many blocks a sequence is given, and when a waiting one may start, is each policy's own rule:
`_target_blocks`, `_can_start`. Knows nothing of predictions and deadlines. Source: papers/003 §2, the rivals.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.scheduler.policy.contract import (
    Holding,
    PlannedBatch,
    PlannedDecode,
    PlannedPreemption,
    PlannedPrefill,
    PolicySettings,
    Task,
    WorkerShape,
    read_options,
)
from services.scheduler.policy.progress import Projection, TaskEntry, TaskStage
from shared.messages.sequence import SequenceKey


@dataclass(slots=True)
class BatchDraft:
    """A batch in the making; except for preemptions nothing is projected until it is committed."""

    decodes: dict[SequenceKey, int]
    """Blocks each holds after the batch."""
    prefills: dict[SequenceKey, tuple[int, int]]
    """End of the chunk, blocks held after the batch."""
    preempted: dict[SequenceKey, PlannedPreemption]
    budget_tokens: int
    free_blocks: int
    start_tokens: int = 0

    def blocks_of(self, entry: TaskEntry) -> int:
        """What `entry` holds once this batch is applied."""
        key = entry.task.key
        if key in self.prefills:
            return self.prefills[key][1]
        return self.decodes.get(key, entry.allocated_blocks)


class FirstComePolicy(Projection, ABC):
    """One worker's batches, but for `plan`. A subclass fulfils `contract.BatchPolicy`."""

    @abstractmethod
    def _target_blocks(self, entry: TaskEntry, tokens: int) -> int:
        """What `entry` should hold before `tokens` of its tokens are in the cache; at least enough for
        those."""

    @abstractmethod
    def _can_start(self, draft: BatchDraft, entry: TaskEntry) -> bool:
        """Whether the free blocks allow a waiting sequence to start now."""

    def _draft(self) -> BatchDraft:
        """What runs already, as far as it gets into the next batch."""
        draft = BatchDraft({}, {}, {}, self._settings.token_budget, self._capacity_blocks - self._used_blocks)
        self._shed(draft)
        for entry in [entry for entry in self._running if entry.stage is TaskStage.DECODING]:
            self._draft_decode(draft, entry)
        for entry in [entry for entry in self._running if entry.stage is TaskStage.PREFILLING]:
            self._draft_chunk(draft, entry)
        return draft

    def _shed(self, draft: BatchDraft) -> None:
        """Give back what a shrunken worker no longer has, newest first."""
        while draft.free_blocks < 0:
            victim = self._newest()
            if victim is None:
                return
            self._preempt(draft, victim)

    def _draft_decode(self, draft: BatchDraft, entry: TaskEntry) -> None:
        if entry.stage is TaskStage.DECODING and self._has_room(draft):
            blocks = self._secure(draft, entry, entry.computed_tokens + 1)
            if blocks is not None:
                draft.decodes[entry.task.key] = blocks
                draft.budget_tokens -= 1

    def _draft_chunk(self, draft: BatchDraft, entry: TaskEntry) -> None:
        chunk = self._chunk(draft, entry.prefill_tokens - entry.computed_tokens)
        if entry.stage is not TaskStage.PREFILLING or chunk == 0 or not self._has_room(draft):
            return
        end = entry.computed_tokens + chunk
        blocks = self._secure(draft, entry, end)
        if blocks is not None:
            draft.prefills[entry.task.key] = (end, blocks)
            draft.budget_tokens -= chunk

    def _has_room(self, draft: BatchDraft) -> bool:
        """More may run than a batch holds: after an adoption, or when a batch that would have ended some
        was cut."""
        return len(draft.decodes) + len(draft.prefills) < self._settings.max_batch_sequences

    def _chunk(self, draft: BatchDraft, rest: int) -> int:
        """Tokens of a prompt with `rest` to go that this step may compute; 0 is none."""
        if self._settings.chunked_prefill:
            return max(0, min(rest, draft.budget_tokens))
        return rest if rest <= draft.budget_tokens or not draft.prefills else 0

    def _secure(self, draft: BatchDraft, entry: TaskEntry, tokens: int) -> int | None:
        """Blocks that `entry` holds after the batch: its target where that is free, else what `tokens` need.

        For the latter newer ones are preempted, or in the end itself (None). While blocks of complete
        sequences are about to be free it waits for those instead (None).
        """
        held = entry.allocated_blocks
        target = max(held, self._target_blocks(entry, tokens))
        if target - held > draft.free_blocks:
            target = max(held, self._blocks(tokens))
        while target - held > draft.free_blocks:
            victim = self._newest()
            if target - held <= draft.free_blocks + self._releasing_blocks() or victim is None:
                return None
            self._preempt(draft, victim)
            if victim is entry:
                return None
        draft.free_blocks -= target - held
        return target

    def _newest(self) -> TaskEntry | None:
        return next(
            (entry for entry in reversed(self._running) if entry.stage is not TaskStage.COMPLETE), None
        )

    def _preempt(self, draft: BatchDraft, victim: TaskEntry) -> None:
        """Preemptions are projected at once: a victim is nobody's item any more."""
        key = victim.task.key
        draft.free_blocks += draft.blocks_of(victim)
        if draft.decodes.pop(key, None) is not None:
            draft.budget_tokens += 1
        elif key in draft.prefills:
            draft.budget_tokens += draft.prefills.pop(key)[0] - victim.computed_tokens
        draft.preempted[key] = PlannedPreemption(key, victim.allocated_blocks, victim.computed_tokens)
        self._release(victim)

    def _admit(self, draft: BatchDraft) -> None:
        """Start waiting prompts in order; the first that does not fit now holds back the rest."""
        batch = sum(entry.stage is not TaskStage.COMPLETE for entry in self._running)
        for entry in self._candidates(draft):
            if batch >= self._settings.max_batch_sequences or not self._draft_start(draft, entry):
                return
            batch += 1

    def _draft_start(self, draft: BatchDraft, entry: TaskEntry) -> bool:
        """The first chunk of one that waits. False when nobody else may start after it."""
        total = entry.prefill_tokens
        chunk = self._chunk(draft, total)
        text_fits = draft.start_tokens == 0 or draft.start_tokens + total <= self._settings.start_tokens
        if chunk == 0 or not text_fits or not self._can_start(draft, entry):
            return False
        blocks = self._target_blocks(entry, chunk)
        draft.prefills[entry.task.key] = (chunk, blocks)
        draft.free_blocks -= blocks
        draft.budget_tokens -= chunk
        draft.start_tokens += total
        return chunk == total

    def _candidates(self, draft: BatchDraft) -> Iterator[TaskEntry]:
        """Who is to start next, as the draft stands when the next one is asked for."""
        return self._startable()

    def _startable(self) -> Iterator[TaskEntry]:
        """Waiting entries in order, without those that can never fit: they must not hold anybody up."""
        return (
            entry for entry in self._waiting if self._blocks(entry.task.limit_tokens) <= self._capacity_blocks
        )

    def _commit(self, draft: BatchDraft) -> PlannedBatch | None:
        """Project the draft and put it into words; None when there is nothing in it."""
        if not (draft.decodes or draft.prefills or draft.preempted):
            return None
        steps = self._steps(draft)
        prefills, decodes = [], []
        for key, (end, blocks) in draft.prefills.items():
            entry = self._entries[key]
            prefills.append(PlannedPrefill(key, entry.computed_tokens, end, blocks))
            if entry.stage is TaskStage.WAITING:
                self._start(entry)
            self._grow(entry, end, blocks, 1 if end == entry.prefill_tokens else 0)
        for key, blocks in draft.decodes.items():
            entry = self._entries[key]
            tokens = min(steps, entry.missing_tokens)
            decodes.append(PlannedDecode(key, tokens, blocks))
            self._grow(entry, entry.computed_tokens + tokens, blocks, tokens)
        return PlannedBatch(
            steps=steps,
            preemptions=tuple(draft.preempted.values()),
            prefills=tuple(prefills),
            decodes=tuple(decodes),
        )

    def _steps(self, draft: BatchDraft) -> int:
        """The most steps for which nothing can change and the blocks last; the allocations in the draft
        grow with it."""
        if draft.prefills or draft.preempted or any(True for _ in self._startable()):
            return 1
        entries = [self._entries[key] for key in draft.decodes]
        most = min(self._settings.max_steps, max(entry.missing_tokens for entry in entries))
        for steps in range(most, 1, -1):
            grown = {entry.task.key: self._grown_blocks(draft, entry, steps) for entry in entries}
            if sum(grown.values()) - sum(draft.decodes.values()) <= draft.free_blocks:
                draft.decodes = grown
                return steps
        return 1

    def _grown_blocks(self, draft: BatchDraft, entry: TaskEntry, steps: int) -> int:
        tokens = entry.computed_tokens + min(steps, entry.missing_tokens)
        return max(draft.blocks_of(entry), self._blocks(tokens))


class VllmPolicy(FirstComePolicy):
    """One worker's batches. Implements `contract.BatchPolicy`."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        read_options("vllm", settings.options, {})
        super().__init__(shape, settings)

    def plan(self, now_s: float) -> PlannedBatch | None:
        draft = self._draft()
        if not draft.preempted:
            self._admit(draft)
        return self._commit(draft)

    def _target_blocks(self, entry: TaskEntry, tokens: int) -> int:
        return self._blocks(tokens)

    def _can_start(self, draft: BatchDraft, entry: TaskEntry) -> bool:
        """The headroom is left to those that run, so that a start is not followed by a preemption at
        once."""
        headroom_blocks = self._capacity_blocks // 100 if draft.decodes or draft.prefills else 0
        return self._blocks(entry.prefill_tokens) <= draft.free_blocks - headroom_blocks


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

    def _target_blocks(self, entry: TaskEntry, tokens: int) -> int:
        return max(self._blocks(tokens), self._maximum_blocks(entry))

    def _can_start(self, draft: BatchDraft, entry: TaskEntry) -> bool:
        return self._maximum_blocks(entry) <= draft.free_blocks

    def _maximum_blocks(self, entry: TaskEntry) -> int:
        """Clamped to what an otherwise empty worker gives: one that was adopted may be larger than that."""
        return min(self._blocks(entry.task.limit_tokens), self._capacity_blocks)

    def _is_anyone_short(self, draft: BatchDraft) -> bool:
        """An adopted sequence that needs more blocks than it has comes before all that wait."""
        return any(
            draft.blocks_of(entry) < self._maximum_blocks(entry)
            for entry in self._running
            if entry.stage is not TaskStage.COMPLETE and entry.task.key in self._adopted
        )


class FastGenPolicy(FirstComePolicy):
    """One worker's batches. Implements `contract.BatchPolicy`."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        options = read_options("fastgen", settings.options, {"tfs_tokens": settings.token_budget})
        size_tokens = min(int(options["tfs_tokens"]), settings.token_budget)
        super().__init__(shape, replace(settings, chunked_prefill=True, token_budget=size_tokens))

    def plan(self, now_s: float) -> PlannedBatch | None:
        draft = self._draft()
        if not draft.preempted:
            self._admit(draft)
        return self._commit(draft)

    def _target_blocks(self, entry: TaskEntry, tokens: int) -> int:
        return self._blocks(tokens)

    def _can_start(self, draft: BatchDraft, entry: TaskEntry) -> bool:
        return self._blocks(self._chunk(draft, entry.prefill_tokens)) <= draft.free_blocks
