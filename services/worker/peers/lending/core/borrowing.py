"""How a worker that is short finds a creditor: the ledger's candidates in turn, then the ledger again. Pure.

One search at a time. Each candidate is asked for memory of the tier that the ledger names. A part that is
granted counts, the rest is asked of the next one; after `most_rounds` rounds of candidates, or none at all,
the search rests for `rest_s`. Sends nothing itself.
Source: papers/001 §4.4; `algorithms.md` §4.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from shared.messages.commands import CreditorCandidates, FindCreditors
from shared.messages.lending import BorrowBlocks, BorrowReply, Grant, KvTier


@dataclass(frozen=True, slots=True)
class AskLedger:
    """To be asked next: the ledger, who could lend."""

    question: FindCreditors


@dataclass(frozen=True, slots=True)
class AskCreditor:
    """To be asked next: one creditor, whether it lends."""

    creditor_id: str
    question: BorrowBlocks


def is_answer(grant: Grant, asked: AskCreditor) -> bool:
    """Whether a grant is of that creditor's memory, as was asked for, and each block in it once."""
    blocks = set(grant.blocks)
    return (
        grant.creditor_id == asked.creditor_id
        and grant.tier is asked.question.tier
        and 0 < len(blocks) == len(grant.blocks) <= asked.question.blocks
        and min(blocks) >= 0
        and 0 < grant.lease_s < float("inf")
    )


CreditorQuestion = AskLedger | AskCreditor
LenderCandidate = tuple[str, KvTier]
"""A worker's memory of one tier."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How persistently a worker asks."""

    most_rounds: int = 3
    rest_s: float = 0.5
    """After a search that did not get everything."""


class Borrowing:
    """Of one worker, in one life of it. After each question exactly one of the `on_…` methods is due."""

    def __init__(
        self,
        debtor_id: str,
        incarnation: int,
        block_tokens: int,
        fingerprint: bytes = b"",
        manners: Manners | None = None,
        requests: Iterator[int] | None = None,
        *,
        for_cache: bool = False,
    ) -> None:
        """`requests` numbers what this life of the debtor asks of anybody, by this search or another one;
        `for_cache`: for blocks of its prefix cache, which only host memory takes."""
        self._debtor_id = debtor_id
        self._incarnation = incarnation
        self._block_tokens = block_tokens
        self._fingerprint = fingerprint
        self._manners = manners or Manners()
        self._missing_blocks = 0
        self._candidates: deque[LenderCandidate] = deque()
        self._refused: dict[LenderCandidate, None] = {}
        self._tier = KvTier.DEVICE
        """Asked for last."""
        self._rounds = 0
        self._requests = itertools.count(1) if requests is None else requests
        self._for_cache = for_cache
        self._rests_until_s = 0.0
        self.refusals = 0
        """Since the start."""

    @property
    def is_busy(self) -> bool:
        """A search is on."""
        return self._missing_blocks > 0

    def may_start(self, now_s: float) -> bool:
        return not self.is_busy and now_s >= self._rests_until_s

    def start(self, blocks: int) -> CreditorQuestion:
        """Begins a search for that many blocks. Raises ValueError when one is on, or for none."""
        if self.is_busy or blocks < 1:
            raise ValueError(f"{blocks} blocks wanted, {self._missing_blocks} being looked for")
        self._missing_blocks, self._rounds = blocks, 0
        self._refused.clear()
        return self._ask_ledger()

    def on_candidates(self, answer: CreditorCandidates, now_s: float) -> CreditorQuestion | None:
        """The ledger's answer; None ends the search."""
        self._rounds += 1
        self._candidates.extend(
            (one.worker_id, one.tier)
            for one in answer.candidates
            if one.worker_id != self._debtor_id and not (self._for_cache and one.tier is KvTier.DEVICE)
        )
        self._refused.clear()
        return self._next(now_s)

    def on_no_ledger(self, now_s: float) -> None:
        """It did not answer: later, it is asked again."""
        self._stop(now_s)

    def on_reply(self, creditor_id: str, reply: BorrowReply | None, now_s: float) -> CreditorQuestion | None:
        """A creditor's answer, None where none came in time; None ends the search."""
        granted = 0 if reply is None or reply.grant is None else len(reply.grant.blocks)
        if granted < self._missing_blocks:  # it has nothing more to lend
            self._refused[creditor_id, self._tier] = None
        self.refusals += not granted
        self._missing_blocks = max(0, self._missing_blocks - granted)
        if self._missing_blocks == 0:
            self._candidates.clear()
            return None
        return self._next(now_s)

    def check_integrity(self) -> None:
        """Raises AssertionError when a search that is over has left something."""
        assert self.is_busy or not self._candidates
        assert self._rounds <= self._manners.most_rounds

    def _next(self, now_s: float) -> CreditorQuestion | None:
        if self._candidates:
            creditor_id, self._tier = self._candidates.popleft()
            return AskCreditor(
                creditor_id,
                BorrowBlocks(
                    debtor_id=self._debtor_id,
                    debtor_incarnation=self._incarnation,
                    request=next(self._requests),
                    blocks=self._missing_blocks,
                    tier=self._tier,
                    fingerprint=self._fingerprint,
                    for_cache=self._for_cache,
                ),
            )
        if self._rounds < self._manners.most_rounds and self._refused:
            return self._ask_ledger()
        self._stop(now_s)
        return None

    def _ask_ledger(self) -> AskLedger:
        return AskLedger(
            FindCreditors(
                debtor_id=self._debtor_id,
                tokens=self._missing_blocks * self._block_tokens,
                refused_by=tuple(name for name, tier in self._refused if tier is KvTier.DEVICE),
                refused_host_by=tuple(name for name, tier in self._refused if tier is KvTier.HOST),
                for_cache=self._for_cache,
            )
        )

    def _stop(self, now_s: float) -> None:
        self._missing_blocks = 0
        self._candidates.clear()
        self._rests_until_s = now_s + self._manners.rest_s
