"""`vllm`: first come, first served, blocks allocated on demand, the newest preempted by recomputation.

Decodes first, oldest first; then the prompt that is partly prefilled; then waiting prompts, in order, while
the token budget, the batch and the free blocks last. With `chunked_prefill` a prompt is cut to the budget
that is left; without, prompts go whole, and one longer than the budget goes when no other prompt does. A
prompt starts only where all of it fits. While nothing waits and nothing prefills, plans reach several steps
ahead.

Knows nothing of predictions and deadlines. The rival that papers/003 measures against, in its present
chunked form.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.policy.contract import (
    Holding,
    PlannedBatch,
    PlannedDecode,
    PlannedPreemption,
    PlannedPrefill,
    PolicySettings,
    Task,
    WorkerShape,
)
from services.scheduler.policy.progress import Entry, Stage, order_of
from shared.messages.commands import LengthPrediction
from shared.messages.sequence import SequenceKey


@dataclass(slots=True)
class Draft:
    """A batch in the making; nothing is projected until it is committed."""

    decodes: dict[SequenceKey, int]
    """Blocks each holds after the batch."""
    prefills: dict[SequenceKey, tuple[int, int]]
    """End of the chunk, blocks held after the batch."""
    preempted: list[SequenceKey]
    budget_tokens: int
    free_blocks: int
    start_tokens: int = 0


class VllmPolicy:
    """One worker's batches. Implements `contract.BatchPolicy`."""

    def __init__(self, shape: WorkerShape, settings: PolicySettings) -> None:
        self._block_tokens = shape.block_tokens
        self._capacity_blocks = shape.capacity_blocks
        self._settings = settings
        self._entries: dict[SequenceKey, Entry] = {}
        self._waiting: list[Entry] = []
        self._running: list[Entry] = []
        self._used_blocks = 0

    def on_arrival(self, task: Task, now_s: float) -> None:
        if task.key not in self._entries:
            entry = self._entries[task.key] = Entry(task, task.generated_tokens)
            insort(self._waiting, entry, key=order_of)

    def on_adopted(self, task: Task, holding: Holding, now_s: float) -> None:
        if task.key in self._entries:
            return
        entry = Entry(
            task, task.generated_tokens, Stage.WAITING, holding.computed_tokens, holding.allocated_blocks
        )
        self._entries[task.key] = entry
        if holding.decoding:
            entry.stage = Stage.DECODING if entry.missing_tokens > 0 else Stage.COMPLETE
        elif holding.computed_tokens or holding.allocated_blocks:
            entry.stage = Stage.PREFILLING
        self._used_blocks += entry.allocated_blocks
        insort(self._waiting if entry.stage is Stage.WAITING else self._running, entry, key=order_of)

    def on_ended(self, key: SequenceKey, now_s: float) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_blocks -= entry.allocated_blocks
            (self._waiting if entry.stage is Stage.WAITING else self._running).remove(entry)

    def on_short(self, key: SequenceKey, missing_tokens: int, now_s: float) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.stage in (Stage.DECODING, Stage.COMPLETE):
            entry.generated_tokens -= missing_tokens
            entry.computed_tokens -= missing_tokens
            entry.stage = Stage.DECODING if entry.missing_tokens > 0 else Stage.COMPLETE

    def on_resized(self, capacity_blocks: int, now_s: float) -> None:
        self._capacity_blocks = capacity_blocks

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, now_s: float) -> None:
        """Speeds change nothing here."""

    def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        """Predictions change nothing here."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        draft = Draft({}, {}, [], self._settings.token_budget, self._capacity_blocks - self._used_blocks)
        self._shed(draft)
        for entry in [entry for entry in self._running if entry.stage is Stage.DECODING]:
            self._draft_decode(draft, entry)
        for entry in [entry for entry in self._running if entry.stage is Stage.PREFILLING]:
            self._draft_chunk(draft, entry)
        if not draft.preempted:
            self._admit(draft)
        if not (draft.decodes or draft.prefills or draft.preempted):
            return None
        return self._commit(draft, self._steps(draft))

    def check_integrity(self) -> None:
        entries = list(self._entries.values())
        assert self._used_blocks == sum(entry.allocated_blocks for entry in entries)
        assert {id(entry) for entry in entries} == {id(entry) for entry in self._waiting + self._running}
        assert len(entries) == len(self._waiting) + len(self._running)
        for line in (self._waiting, self._running):
            assert line == sorted(line, key=order_of), "out of order"
        for entry in entries:
            task = entry.task
            assert 0 <= entry.generated_tokens <= task.max_tokens
            assert entry.computed_tokens <= entry.allocated_blocks * self._block_tokens
            assert (entry in self._waiting) == (entry.stage is Stage.WAITING)
            if entry.stage is Stage.WAITING:
                assert entry.computed_tokens == entry.allocated_blocks == 0
            if entry.stage in (Stage.DECODING, Stage.COMPLETE):
                assert entry.computed_tokens == entry.prefill_tokens - 1
            assert (entry.stage is Stage.COMPLETE) == (
                entry.stage is not Stage.WAITING and entry.missing_tokens == 0
            )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

    def _shed(self, draft: Draft) -> None:
        """Give back what a shrunken worker no longer has, newest first."""
        while draft.free_blocks < 0:
            victim = self._newest()
            if victim is None:
                return
            self._preempt(draft, victim)

    def _draft_decode(self, draft: Draft, entry: Entry) -> None:
        if entry.stage is Stage.DECODING and self._has_room(draft):
            blocks = self._blocks(entry.computed_tokens + 1)
            if self._secure(draft, entry, blocks):
                draft.decodes[entry.task.key] = max(blocks, entry.allocated_blocks)
                draft.budget_tokens -= 1

    def _draft_chunk(self, draft: Draft, entry: Entry) -> None:
        rest = entry.prefill_tokens - entry.computed_tokens
        chunk = self._chunk(draft, rest)
        if entry.stage is not Stage.PREFILLING or chunk == 0 or not self._has_room(draft):
            return
        blocks = self._blocks(entry.computed_tokens + chunk)
        if self._secure(draft, entry, blocks):
            end = entry.computed_tokens + chunk
            draft.prefills[entry.task.key] = (end, max(blocks, entry.allocated_blocks))
            draft.budget_tokens -= chunk

    def _has_room(self, draft: Draft) -> bool:
        """More may run than a batch holds: after an adoption, or when a batch that would have ended some
        was cut."""
        return len(draft.decodes) + len(draft.prefills) < self._settings.max_batch_sequences

    def _chunk(self, draft: Draft, rest: int) -> int:
        """Tokens of a prompt with `rest` to go that this step may compute; 0 is none."""
        if self._settings.chunked_prefill:
            return max(0, min(rest, draft.budget_tokens))
        return rest if rest <= draft.budget_tokens or not draft.prefills else 0

    def _secure(self, draft: Draft, entry: Entry, blocks: int) -> bool:
        """Take what `entry` lacks of `blocks` from the draft, preempting newer ones for it, or in the end
        itself.

        While blocks of complete sequences are about to be free it waits for those instead.
        """
        lacking = max(0, blocks - entry.allocated_blocks)
        while lacking > draft.free_blocks:
            releasing = sum(
                other.allocated_blocks for other in self._running if other.stage is Stage.COMPLETE
            )
            if lacking <= draft.free_blocks + releasing:
                return False
            victim = self._newest()
            if victim is None:
                return False
            self._preempt(draft, victim)
            if victim is entry:
                return False
        draft.free_blocks -= lacking
        return True

    def _newest(self) -> Entry | None:
        return next((entry for entry in reversed(self._running) if entry.stage is not Stage.COMPLETE), None)

    def _preempt(self, draft: Draft, victim: Entry) -> None:
        """Preemptions are projected at once: a victim is nobody's item any more."""
        key, held = victim.task.key, victim.allocated_blocks
        if key in draft.decodes:
            draft.free_blocks += draft.decodes.pop(key)
            draft.budget_tokens += 1
        elif key in draft.prefills:
            end, blocks = draft.prefills.pop(key)
            draft.free_blocks += blocks
            draft.budget_tokens += end - victim.computed_tokens
        else:
            draft.free_blocks += held
        draft.preempted.append(key)
        self._used_blocks -= held
        victim.stage, victim.computed_tokens, victim.allocated_blocks = Stage.WAITING, 0, 0
        self._running.remove(victim)
        insort(self._waiting, victim, key=order_of)

    def _admit(self, draft: Draft) -> None:
        """Start waiting prompts in order; the first that does not fit now holds back the rest."""
        batch = sum(entry.stage is not Stage.COMPLETE for entry in self._running)
        for entry in self._startable():
            total = entry.prefill_tokens
            chunk = self._chunk(draft, total)
            fits = self._blocks(total) <= draft.free_blocks - self._headroom_blocks(draft)
            text_fits = draft.start_tokens == 0 or draft.start_tokens + total <= self._settings.start_tokens
            if batch >= self._settings.max_batch_sequences or chunk == 0 or not fits or not text_fits:
                return
            blocks = self._blocks(chunk)
            draft.prefills[entry.task.key] = (chunk, blocks)
            draft.free_blocks -= blocks
            draft.budget_tokens -= chunk
            draft.start_tokens += total
            batch += 1
            if chunk < total:
                return

    def _startable(self) -> Iterator[Entry]:
        """Waiting entries in order, without those that can never fit: they must not hold anybody up."""
        return (
            entry for entry in self._waiting if self._blocks(entry.task.limit_tokens) <= self._capacity_blocks
        )

    def _headroom_blocks(self, draft: Draft) -> int:
        """Left to those that run, so that a start is not followed by a preemption at once."""
        return self._capacity_blocks // 100 if draft.decodes or draft.prefills else 0

    def _steps(self, draft: Draft) -> int:
        """The most steps for which nothing can change and the blocks last; the allocations in the draft
        grow with it."""
        if draft.prefills or draft.preempted or any(True for _ in self._startable()):
            return 1
        entries = [self._entries[key] for key in draft.decodes]
        most = min(self._settings.max_steps, max(entry.missing_tokens for entry in entries))
        for steps in range(most, 1, -1):
            grown = {entry.task.key: self._grown_blocks(entry, steps) for entry in entries}
            if sum(grown.values()) - sum(draft.decodes.values()) <= draft.free_blocks:
                draft.decodes = grown
                return steps
        return 1

    def _grown_blocks(self, entry: Entry, steps: int) -> int:
        tokens = entry.computed_tokens + min(steps, entry.missing_tokens)
        return max(entry.allocated_blocks, self._blocks(tokens))

    def _commit(self, draft: Draft, steps: int) -> PlannedBatch:
        """Project the draft and put it into words."""
        prefills, decodes = [], []
        for key, (end, blocks) in draft.prefills.items():
            entry = self._entries[key]
            prefills.append(PlannedPrefill(key, entry.computed_tokens, end, blocks))
            if entry.stage is Stage.WAITING:
                self._waiting.remove(entry)
                insort(self._running, entry, key=order_of)
                entry.stage = Stage.PREFILLING
            self._grow(entry, end, blocks, 1 if end == entry.prefill_tokens else 0)
        for key, blocks in draft.decodes.items():
            entry = self._entries[key]
            tokens = min(steps, entry.missing_tokens)
            decodes.append(PlannedDecode(key, tokens, blocks))
            self._grow(entry, entry.computed_tokens + tokens, blocks, tokens)
        return PlannedBatch(
            steps=steps,
            preemptions=tuple(PlannedPreemption(key) for key in draft.preempted),
            prefills=tuple(prefills),
            decodes=tuple(decodes),
        )

    def _grow(self, entry: Entry, computed_tokens: int, blocks: int, new_tokens: int) -> None:
        self._used_blocks += blocks - entry.allocated_blocks
        entry.computed_tokens, entry.allocated_blocks = computed_tokens, blocks
        entry.generated_tokens += new_tokens
        if new_tokens:
            entry.stage = Stage.DECODING if entry.missing_tokens > 0 else Stage.COMPLETE
