"""State of one simulated worker, and the rules that every plan must satisfy.

Every plan is checked before it runs, against the worker's real state: capacity, contiguous chunks, decodes
only after the prefill, a block for every token, token budget and batch size. A plan that breaks a rule raises
`PlanError`.
"""

from dataclasses import dataclass

from services.scheduler.policy.contract import PlannedBatch, PlannedPrefill, PolicySettings, WorkerShape
from shared.messages.sequence import SequenceKey
from sim.requests import ServedRecord


class PlanError(AssertionError):
    """A policy's plan contradicts the state of the worker."""


@dataclass(slots=True, eq=False)
class Held:
    """Real state of one sequence at the worker."""

    record: ServedRecord
    generated_tokens: int = 0
    computed_tokens: int = 0
    allocated_blocks: int = 0
    cached_tokens: int = 0
    """Leading tokens in the worker's cache; a chunk may begin up to here."""
    carried_tokens: int = 0
    """Tokens whose KV came along from another worker."""
    is_decoding: bool = False
    was_evicted: bool = False
    """Its next prefill computes evicted tokens again."""
    has_decoded: bool = False
    ran_until_s: float = -1.0
    """End of the last step that included it; -1 before the first."""
    token_s: float = -1.0
    """Time of its latest token; -1 before the first."""
    goes_to: int | None = None
    """Worker to hand it over to between two steps."""

    @property
    def remaining_tokens(self) -> int:
        """Tokens to its true end."""
        return self.record.request.output_tokens - self.generated_tokens

    @property
    def prefill_tokens(self) -> int:
        return self.record.request.prompt_tokens + self.generated_tokens


@dataclass(slots=True)
class WorkerBooks:
    """The sequences of one worker, and sums over them."""

    shape: WorkerShape
    settings: PolicySettings
    held: dict[SequenceKey, Held]
    over: set[SequenceKey]
    """Ended sequences; later plan items for them are skipped."""
    allocated_blocks: int = 0
    computed_tokens: int = 0

    def apply(self, batch: PlannedBatch) -> tuple[list[tuple[Held, PlannedPrefill]], list[Held]]:
        """Check a plan and allocate its blocks; return the prefills and decodes to run. Raises PlanError."""
        self._check_form(batch)
        for preemption in batch.preemptions:
            self._evict(preemption.key)
        over = self.over
        prefills = [(self._take_prefill(item), item) for item in batch.prefills if item.key not in over]
        decodes = self._take_decodes(batch)
        if self.allocated_blocks > self.shape.capacity_blocks:
            raise PlanError(f"{self.allocated_blocks} blocks given out of {self.shape.capacity_blocks}")
        return prefills, decodes

    def _check_form(self, batch: PlannedBatch) -> None:
        keys = {item.key for item in batch.decodes}
        keys.update([item.key for part in (batch.preemptions, batch.prefills) for item in part])
        if len(keys) != len(batch.preemptions) + len(batch.prefills) + len(batch.decodes):
            raise PlanError("a sequence is in two items of one plan")
        if batch.steps < 1:
            raise PlanError(f"a plan of {batch.steps} steps")
        if len(batch.prefills) + len(batch.decodes) > self.settings.max_batch_sequences:
            raise PlanError(f"{len(batch.prefills)} prefills and {len(batch.decodes)} decodes in one batch")
        if not batch.prefills:
            return
        chunks = [item.end_token - item.first_token for item in batch.prefills]
        is_whole_prompt = not self.settings.chunked_prefill and len(chunks) == 1
        if sum(chunks) + len(batch.decodes) > self.settings.token_budget and not is_whole_prompt:
            raise PlanError(
                f"{sum(chunks)} + {len(batch.decodes)} tokens, budget {self.settings.token_budget}"
            )

    def _find(self, key: SequenceKey) -> Held:
        held = self.held.get(key)
        if held is None:
            raise PlanError(f"{key} is not at this worker")
        return held

    def _allocate(self, held: Held, blocks: int, tokens: int) -> None:
        if blocks * self.shape.block_tokens < tokens:
            raise PlanError(f"{held.record.request.key}: {blocks} blocks for {tokens} tokens")
        if blocks < held.allocated_blocks:
            raise PlanError(f"{held.record.request.key}: {held.allocated_blocks} blocks shrink to {blocks}")
        self.allocated_blocks += blocks - held.allocated_blocks
        held.allocated_blocks = blocks

    def _take_prefill(self, item: PlannedPrefill) -> Held:
        held = self._find(item.key)
        begins = held.computed_tokens <= item.first_token <= max(held.computed_tokens, held.cached_tokens)
        is_chunk = begins and item.first_token < item.end_token <= held.prefill_tokens
        if held.is_decoding or not is_chunk:
            raise PlanError(
                f"{item.key}: chunk [{item.first_token}, {item.end_token}) of {held.prefill_tokens}, "
                f"{held.computed_tokens} computed, decoding: {held.is_decoding}"
            )
        self._allocate(held, item.allocated_blocks, item.end_token)
        return held

    def _take_decodes(self, batch: PlannedBatch) -> list[Held]:
        """A hot path: the inline check of blocks is `_allocate`'s where nothing grows."""
        found, steps, size, all_held = [], batch.steps, self.shape.block_tokens, self.held
        for item in batch.decodes:
            key, tokens, blocks = item.key, item.tokens, item.allocated_blocks
            held = all_held.get(key)
            if held is None:
                if key in self.over:
                    continue
                held = self._find(key)
            if not held.is_decoding:
                raise PlanError(f"{key}: decoded before its prefill is over")
            left = held.record.request.max_tokens - held.generated_tokens
            if tokens != (steps if steps < left else left):
                raise PlanError(f"{key}: {tokens} tokens in {steps} steps, {left} to its limit")
            if blocks != held.allocated_blocks or blocks * size < held.computed_tokens + tokens:
                self._allocate(held, blocks, held.computed_tokens + tokens)
            found.append(held)
        return found

    def _evict(self, key: SequenceKey) -> None:
        if key in self.over:
            return
        held = self._find(key)
        if held.ran_until_s < 0 and not held.allocated_blocks:
            raise PlanError(f"{key}: preempted before it ran")
        held.record.evictions += 1
        self._free(held)
        held.is_decoding, held.was_evicted = False, True

    def _free(self, held: Held) -> None:
        self.allocated_blocks -= held.allocated_blocks
        self.computed_tokens -= held.computed_tokens
        held.allocated_blocks = held.computed_tokens = 0

    def compute(self, held: Held, computed_tokens: int, new_tokens: int) -> None:
        """Set the number of tokens with KV and add `new_tokens` generated tokens."""
        self.computed_tokens += computed_tokens - held.computed_tokens
        held.computed_tokens = computed_tokens
        held.generated_tokens += new_tokens

    def take(self, held: Held) -> None:
        """Add a sequence, new or from another worker."""
        key = held.record.request.key
        self.held[key] = held
        self.over.discard(key)

    def end(self, held: Held) -> None:
        key = held.record.request.key
        self._free(held)
        del self.held[key]
        self.over.add(key)

    def check_integrity(self) -> None:
        """Raises AssertionError if the sums are wrong."""
        assert self.allocated_blocks == sum(held.allocated_blocks for held in self.held.values())
        assert self.computed_tokens == sum(held.computed_tokens for held in self.held.values())
        for held in self.held.values():
            assert held.computed_tokens <= held.allocated_blocks * self.shape.block_tokens


def spoken_for_blocks(books: WorkerBooks, block_tokens: int) -> int:
    """Return the blocks that the worker's sequences have, or need at least."""
    total = 0
    for held in books.held.values():  # a hot path
        needed = -(-(held.record.request.prompt_tokens + held.generated_tokens) // block_tokens)
        allocated = held.allocated_blocks
        total += allocated if allocated > needed else needed
    return total


def pending(books: WorkerBooks) -> int:
    """Return the number of prompt tokens at the worker still to compute."""
    held = (each for each in books.held.values() if not each.is_decoding)
    return sum(max(0, each.prefill_tokens - max(each.computed_tokens, each.cached_tokens)) for each in held)


def uncomputed(books: WorkerBooks) -> list[tuple[int, int]]:
    """Return the range of prompt tokens to compute of each sequence that has some, without the expected cache
    hits of sequences not yet begun."""
    found = []
    for held in books.held.values():
        if held.is_decoding:
            continue
        first, end = max(held.computed_tokens, held.cached_tokens), held.prefill_tokens
        if first == 0:
            first = min(held.record.expected_tokens, end - 1)
        if first < end:
            found.append((first, end))
    return found
