"""A worker's part in settling a cycle of debts: blocks set apart, copied home, used from there. Pure.

As debtor it recalls its own blocks from its creditor; as creditor it lends nothing new meanwhile. Each recall
is whole or has not happened: until the commit the original counts, from then on the copy. Knows no bytes; the
caller copies and swaps. Source: papers/001 §4.5; `algorithms.md` §4 (DGFM).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.worker.peers.lending.core.debts import Debts, Repayment
from services.worker.peers.lending.core.grants import Grants
from services.worker.peers.lending.core.table import BlockState, RBlockTable
from shared.messages.lending import KvTier, Settle, Settled, SettlePhase


@dataclass(frozen=True, slots=True)
class Copy:
    """Bring these blocks home: (logical number there, own block to copy into). Then `on_copied`."""

    pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Swap:
    """Sequences use the copies from now on: (old logical number, own block). Then send `repayments`; `answer`
    is due when the creditor has confirmed them."""

    pairs: tuple[tuple[int, int], ...]
    repayments: tuple[Repayment, ...]
    answer: Settled


@dataclass(slots=True)
class _Part:
    """In one settlement."""

    name: str
    frozen: list[int]
    """Logical numbers, not recalled yet."""
    ends_s: float
    round: int = -1
    """Of the last copy asked for."""
    copied: dict[int, int] = field(default_factory=dict)
    """Logical → own block, of this round."""
    committed: int = -1
    committed_blocks: int = 0
    """Of the last committed round: what to answer when asked again."""


class Settling:
    """Of one worker. `bounce` are own blocks kept free for it; they are this object's."""

    def __init__(self, table: RBlockTable, debts: Debts, grants: Grants) -> None:
        self._table = table
        self._debts = debts
        self._grants = grants
        self.bounce: list[int] = []
        self._part: _Part | None = None

    @property
    def is_on(self) -> bool:
        return self._part is not None

    @property
    def frozen(self) -> frozenset[int]:
        """Logical numbers, not recalled yet."""
        return frozenset(() if self._part is None else self._part.frozen)

    def on_settle(
        self, asked: Settle, now_s: float, among: Sequence[int] | None = None
    ) -> Settled | Copy | Swap:
        """An answer to be sent, or what to do before there is one. `among`: of which blocks to freeze some,
        in that order; None: of all in use."""
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

    def on_copied(self, asked: Settle, copied: Copy, *, whole: bool) -> Settled:
        """The copies are there, checked; or not all of them, and then none counts."""
        part = self._part
        if part is None or part.name != asked.settlement or part.round != asked.round:
            return _answer(asked)
        if not whole:
            part.copied = {}
        return _answer(asked, len(part.copied))

    def on_lost(self, logical: list[int]) -> None:
        """These are gone with their creditor: nothing is left to recall."""
        if self._part is not None and not set(logical).isdisjoint(self._part.frozen):
            self._end()

    def tick(self, now_s: float) -> None:
        """Gives a settlement up that nobody goes on with."""
        if self._part is not None and now_s >= self._part.ends_s:
            self._end()

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks are frozen for nobody, or used and bounce blocks mix."""
        frozen = set(self._table.in_state(BlockState.FROZEN))
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
        owing = self._table.lent_to(KvTier.DEVICE).get(asked.debtor_id, 0)
        used = self._table.used_at(asked.creditor_id, KvTier.DEVICE)
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
        home = {own for _, own in pairs}
        recalled = {number for number, _ in pairs}
        self.bounce = [block for block in self.bounce if block not in home]
        part.frozen = [number for number in part.frozen if number not in recalled]
        orphans = {n for n in recalled if self._table.borrowed(n).is_orphan}
        self.bounce += [own for number, own in pairs if number in orphans]
        repayments = tuple(self._debts.recalled([number for number, _ in pairs]))
        in_use = tuple((number, own) for number, own in pairs if number not in orphans)
        return Swap(in_use, repayments, _answer(asked, len(pairs)))

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
