"""A worker's part in settling a cycle of debts: it freezes blocks, copies them home, and uses the copies.

As a debtor, it recalls blocks from its creditor; as a creditor, it gives no new grants meanwhile. Each recall
happens completely or not at all: the original counts until the commit, and the copy after it. Pure.
Source: papers/001 §4.5; `algorithms.md` §4 (DGFM).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.worker.peers.lending.core.debts import BlockState, Debts, Repayment
from services.worker.peers.lending.core.grants import Grants
from shared.messages.lending import KvTier, Settle, Settled, SettlePhase


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy blocks home: (logical number, own block to copy into). Then call `on_copied`."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Swap:
    """Switch sequences to the copies: (old logical number, own block). Then send `repayments`, and `answer`
    once the creditor has confirmed them."""

    pairs: tuple[tuple[int, int], ...]
    repayments: tuple[Repayment, ...]
    answer: Settled


@dataclass(slots=True)
class _Part:
    """State of one settlement."""

    name: str
    frozen: list[int]
    """Logical numbers not recalled yet."""
    ends_s: float
    round: int = -1
    """Round of the last copy."""
    copied: dict[int, int] = field(default_factory=dict)
    """Logical number to own block, in this round."""
    committed: int = -1
    committed_blocks: int = 0
    """Blocks of the last committed round: the answer to a repeated commit."""


class Settling:
    """Settlements of one worker. It owns the `bounce` blocks: own blocks kept free to copy into."""

    def __init__(self, debts: Debts, grants: Grants) -> None:
        self._debts = debts
        self._grants = grants
        self.bounce: list[int] = []
        self._part: _Part | None = None

    @property
    def is_on(self) -> bool:
        return self._part is not None

    @property
    def frozen(self) -> frozenset[int]:
        """Logical numbers not recalled yet."""
        return frozenset(() if self._part is None else self._part.frozen)

    def on_settle(
        self, asked: Settle, now_s: float, among: Sequence[int] | None = None
    ) -> Settled | Copy | Swap:
        """Return the answer to send, or what to do before it.

        `among`: blocks that may be frozen, in order; None: all in use."""
        self.tick(now_s)
        if asked.phase is SettlePhase.FREEZE:
            return self._freeze(asked, now_s, among)
        part = self._part
        if part is None or part.name != asked.settlement:
            return _answer(asked)
        part.ends_s = now_s + asked.valid_for_s
        if asked.phase is SettlePhase.COPY:
            return self._copy(part, asked)
        if asked.phase is SettlePhase.COMMIT:
            return self._commit(part, asked)
        self._end()
        return _answer(asked)

    def on_copied(self, asked: Settle, *, whole: bool) -> Settled:
        """Take in a finished copy. Unless it is `whole`, none of it counts."""
        part = self._part
        if part is None or part.name != asked.settlement or part.round != asked.round:
            return _answer(asked)
        if not whole:
            part.copied = {}
        return _answer(asked, len(part.copied))

    def on_lost(self, logical: list[int]) -> None:
        """End the settlement when it loses blocks with their creditor."""
        if self._part is not None and not set(logical).isdisjoint(self._part.frozen):
            self._end()

    def tick(self, now_s: float) -> None:
        """Give up a settlement that timed out."""
        if self._part is not None and now_s >= self._part.ends_s:
            self._end()

    def check_integrity(self) -> None:
        """Raise AssertionError when frozen blocks, bounce blocks and the settlement disagree."""
        frozen = set(self._debts.in_state(BlockState.FROZEN))
        assert frozen == (set() if self._part is None else set(self._part.frozen))
        assert self._grants.frozen == (self._part is not None)
        assert len(set(self.bounce)) == len(self.bounce)
        if self._part is not None:
            assert set(self._part.copied) <= set(self._part.frozen)
            assert set(self._part.copied.values()) <= set(self.bounce)

    def _freeze(self, asked: Settle, now_s: float, among: Sequence[int] | None) -> Settled:
        part = self._part
        if part is not None and part.name == asked.settlement:
            return _answer(asked, len(part.frozen), len(self.bounce))
        owing = self._grants.lent_to(KvTier.DEVICE).get(asked.debtor_id, 0)
        used = self._debts.used_at(asked.creditor_id, KvTier.DEVICE)
        if among is not None:
            used = [number for number in among if number in set(used)]
        chosen = used[: min(asked.blocks, owing)]
        if part is not None or not chosen or not self.bounce:
            return _answer(asked)
        self._debts.freeze(chosen)
        self._grants.frozen = True
        self._part = _Part(asked.settlement, chosen, now_s + asked.valid_for_s)
        return _answer(asked, len(chosen), len(self.bounce))

    def _copy(self, part: _Part, asked: Settle) -> Settled | Copy:
        if asked.round == part.round and part.copied:
            return _answer(asked, len(part.copied))
        if asked.round <= part.committed or min(len(part.frozen), len(self.bounce)) < asked.blocks:
            return _answer(asked)
        part.round = asked.round
        part.copied = dict(zip(part.frozen[: asked.blocks], self.bounce, strict=False))
        return Copy(tuple(part.copied.items()))

    def _commit(self, part: _Part, asked: Settle) -> Settled | Swap:
        if asked.round == part.committed:
            return _answer(asked, part.committed_blocks)
        if asked.round != part.round or not part.copied:
            return _answer(asked)
        pairs, part.copied = tuple(part.copied.items()), {}
        part.committed, part.committed_blocks = asked.round, len(pairs)
        in_use = tuple(pair for pair in pairs if not self._debts.blocks[pair[0]].is_orphan)
        recalled, swapped = [number for number, _ in pairs], {own for _, own in in_use}
        self.bounce = [block for block in self.bounce if block not in swapped]
        part.frozen = [number for number in part.frozen if number not in set(recalled)]
        return Swap(in_use, tuple(self._debts.recalled(recalled)), _answer(asked, len(pairs)))

    def _end(self) -> None:
        part, self._part = self._part, None
        self._grants.frozen = False
        if part is not None:
            self._debts.thaw(part.frozen)


def _answer(asked: Settle, blocks: int = 0, bounce_blocks: int = 0) -> Settled:
    return Settled(
        settlement=asked.settlement,
        phase=asked.phase,
        round=asked.round,
        blocks=blocks,
        bounce_blocks=bounce_blocks,
    )
