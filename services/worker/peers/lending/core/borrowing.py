"""How a worker that is short of memory finds a creditor. Pure: sends nothing itself.

One search runs at a time. It asks the ledger for candidates, and each candidate for memory of the tier that
the ledger names. A partial grant counts, and the next candidate is asked for the rest. After `most_rounds`
rounds, or a round without candidates, the search rests for `rest_s`.
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
    """Next question: ask the ledger for creditors."""

    question: FindCreditors


@dataclass(frozen=True, slots=True)
class AskCreditor:
    """Next question: ask one creditor for memory."""

    creditor_id: str
    question: BorrowBlocks


def is_answer(grant: Grant, asked: AskCreditor) -> bool:
    """Return whether a grant fits its question: creditor, tier, number of distinct blocks, lease."""
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
"""A worker and a tier of its memory."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How persistently a worker searches."""

    most_rounds: int = 3
    rest_s: float = 0.5
    """Pause after a search that did not get everything."""


class Borrowing:
    """Search of one incarnation of a worker. Call exactly one `on_…` method after each question."""

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
        """`requests` numbers all questions of this incarnation, by any search. `for_cache`: the blocks are
        for the prefix cache, which uses host memory only."""
        self._debtor_id = debtor_id
        self._incarnation = incarnation
        self._block_tokens = block_tokens
        self._fingerprint = fingerprint
        self._manners = manners or Manners()
        self._missing_blocks = 0
        self._candidates: deque[LenderCandidate] = deque()
        self._refused: dict[LenderCandidate, None] = {}
        self._tier = KvTier.DEVICE
        """Tier of the last question."""
        self._rounds = 0
        self._requests = itertools.count(1) if requests is None else requests
        self._for_cache = for_cache
        self._rests_until_s = 0.0
        self.refusals = 0
        """Number of refusals since the start."""

    @property
    def is_busy(self) -> bool:
        """Whether a search is running."""
        return self._missing_blocks > 0

    def may_start(self, now_s: float) -> bool:
        return not self.is_busy and now_s >= self._rests_until_s

    def start(self, blocks: int) -> CreditorQuestion:
        """Begin a search. Raises ValueError when one is running, or for less than one block."""
        if self.is_busy or blocks < 1:
            raise ValueError(f"{blocks} blocks wanted, {self._missing_blocks} already looked for")
        self._missing_blocks, self._rounds = blocks, 0
        self._refused.clear()
        return self._ask_ledger()

    def on_candidates(self, answer: CreditorCandidates, now_s: float) -> CreditorQuestion | None:
        """Take in the ledger's answer; return the next question, None at the end of the search."""
        self._rounds += 1
        self._candidates.extend(
            (one.worker_id, one.tier)
            for one in answer.candidates
            if one.worker_id != self._debtor_id and not (self._for_cache and one.tier is KvTier.DEVICE)
        )
        self._refused.clear()
        return self._next(now_s)

    def on_no_ledger(self, now_s: float) -> None:
        """End the search: the ledger did not answer. A later search asks it again."""
        self._stop(now_s)

    def on_reply(self, creditor_id: str, reply: BorrowReply | None, now_s: float) -> CreditorQuestion | None:
        """Take in a creditor's reply, None for a timeout; return the next question, None at the end."""
        granted = 0 if reply is None or reply.grant is None else len(reply.grant.blocks)
        if granted < self._missing_blocks:  # It has no more to lend.
            self._refused[creditor_id, self._tier] = None
        self.refusals += not granted
        self._missing_blocks = max(0, self._missing_blocks - granted)
        if self._missing_blocks == 0:
            self._candidates.clear()
            return None
        return self._next(now_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when a finished search left candidates."""
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
