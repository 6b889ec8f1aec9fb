"""Guessed tokens in a worker's steps: each is an item of its own, and what they bring is reported. Pure."""

from collections import Counter

from services.worker.core.decodes import DecodeBatch
from services.worker.core.drafts import Drafts, SoFar
from services.worker.core.plans import StepWork, WorkItem
from services.worker.core.sequence import HeldSequence
from services.worker.core.sequences import SequenceTable
from services.worker.kv.core.borrowed_pool import ExtendedPool
from shared.messages.sequence import SequenceRef

_LEAST_FREE = 8
"""One of so many blocks stays free for plans."""


class Guessing:
    """Adds guesses to steps. Sequences may then be ahead of their plans, and need blocks before these do."""

    def __init__(self, drafts: Drafts, table: SequenceTable, gains: Counter[SequenceRef]) -> None:
        """`gains` counts tokens beyond one for each step, for the next report."""
        self.drafts, self._gains = drafts, gains
        pool = table.pool
        self._own = pool.own if isinstance(pool, ExtendedPool) else pool
        self._own_ids = pool.own_blocks if isinstance(pool, ExtendedPool) else None
        self._block_tokens = pool.block_tokens
        table.make_room = self._make_room

    def take_out(
        self, batch: DecodeBatch, items: list[WorkItem], revision: int
    ) -> tuple[DecodeBatch | None, bool]:
        """Add items for the sequences of a batch that have a draft. Return the rest of the batch, and whether
        that is all of it."""
        sequences, rest = batch.group.sequences, list[int]()
        found = self.drafts.make(
            [SoFar(item.sequence.ref, item.sequence.tokens, 0) for item in items]
            + [SoFar(each.ref, each.tokens, self._most(each)) for each in sequences]
        )
        for row, (sequence, guesses) in enumerate(zip(sequences, found[len(items) :], strict=True)):
            first = sequence.computed_tokens
            if not guesses or not self._make_room(sequence, first + 1 + len(guesses)):
                rest.append(row)
                continue
            items += [
                WorkItem(sequence, first + at, first + at + 1, True, True, tuple(guesses[:at]))
                for at in range(len(guesses) + 1)
            ]
        if len(rest) == len(sequences):
            return batch, True
        return batch.only(rest, revision) if rest else None, False

    def learn(self, work: StepWork, step_s: float) -> int:
        """Note what became of a step's guesses; return the number of wrong ones."""
        guessed = {id(item.sequence): item for item in work.others if item.guessed}
        drafts, before = self.drafts, self.drafts.wrong
        for item in guessed.values():
            sequence, tokens = item.sequence, len(item.guessed)
            kept = max(0, len(sequence.tokens) - (item.first_token - tokens) - 2)
            drafts.kept, drafts.wrong = drafts.kept + kept, drafts.wrong + tokens - kept
            if sequence.alive:
                sequence.begun_tokens = sequence.computed_tokens
                if kept:
                    self._gains[sequence.ref] += kept
        if not work.prefilled_tokens:
            drafts.on_step(work.decoded_tokens, step_s)
        return drafts.wrong - before

    def _most(self, sequence: HeldSequence) -> int:
        """Return how many tokens may be guessed: up to one before the limit, and none with a grammar or with
        blocks of other workers."""
        is_all_own = self._own_ids is None or max(sequence.blocks, default=0) < self._own_ids
        if sequence.sampling.grammar or not is_all_own:
            return 0
        return sequence.limit_tokens - sequence.computed_tokens - 2

    def _make_room(self, sequence: HeldSequence, tokens: int) -> bool:
        """Return whether so many of a sequence's tokens have blocks, which it gets while enough are free."""
        pool, missing = self._own, -(-tokens // self._block_tokens) - len(sequence.blocks)
        if missing > 0:
            if pool.free_blocks - missing < pool.total_blocks // _LEAST_FREE:
                return False
            sequence.blocks.extend(pool.allocate(missing))
        return True
