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


CreditorQuestion = FindCreditors | AskCreditor
"""A question to the ledger, or to one creditor."""
LenderCandidate = tuple[str, KvTier]
"""A worker and a tier of its memory."""


class Borrowing:
    """Search of one incarnation of a worker. Call exactly one `on_…` method after each question."""

    def __init__(
        self,
        debtor_id: str,
        incarnation: int,
        block_tokens: int,
        fingerprint: bytes = b"",
        requests: Iterator[int] | None = None,
        *,
        most_rounds: int = 3,
        rest_s: float = 0.5,
        for_cache: bool = False,
    ) -> None:
        """`requests` numbers all questions of this incarnation, by any search. `for_cache`: the blocks are
        for the prefix cache, which uses host memory only."""
        self._debtor_id = debtor_id
        self._incarnation = incarnation
        self._block_tokens = block_tokens
        self._fingerprint = fingerprint
        self._requests = itertools.count(1) if requests is None else requests
        self._most_rounds, self._rest_s, self._for_cache = most_rounds, rest_s, for_cache
        self._missing_blocks = 0
        self._candidates: deque[LenderCandidate] = deque()
        self._refused: dict[LenderCandidate, None] = {}
        self._tier = KvTier.DEVICE
        """Tier of the last question."""
        self._rounds = 0
        self._rests_until_s = 0.0

    def may_start(self, now_s: float) -> bool:
        """Return whether no search is running or resting."""
        return not self._missing_blocks and now_s >= self._rests_until_s

    def start(self, blocks: int) -> CreditorQuestion:
        """Begin a search. Raises ValueError when one is running, or for less than one block."""
        if self._missing_blocks or blocks < 1:
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
        self._missing_blocks = 0
        self._candidates.clear()
        self._rests_until_s = now_s + self._rest_s

    def on_reply(self, creditor_id: str, reply: BorrowReply | None, now_s: float) -> CreditorQuestion | None:
        """Take in a creditor's reply, None for a timeout; return the next question, None at the end."""
        granted = 0 if reply is None or reply.grant is None else len(reply.grant.blocks)
        if granted < self._missing_blocks:  # It has no more to lend.
            self._refused[creditor_id, self._tier] = None
        self._missing_blocks = max(0, self._missing_blocks - granted)
        if self._missing_blocks == 0:
            self._candidates.clear()
            return None
        return self._next(now_s)

    def check_integrity(self) -> None:
        """Raise AssertionError when a finished search left candidates."""
        assert self._missing_blocks or not self._candidates
        assert self._rounds <= self._most_rounds

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
        if self._rounds < self._most_rounds and self._refused:
            return self._ask_ledger()
        self.on_no_ledger(now_s)
        return None

    def _ask_ledger(self) -> FindCreditors:
        return FindCreditors(
            debtor_id=self._debtor_id,
            tokens=self._missing_blocks * self._block_tokens,
            refused_by=tuple(name for name, tier in self._refused if tier is KvTier.DEVICE),
            refused_host_by=tuple(name for name, tier in self._refused if tier is KvTier.HOST),
            for_cache=self._for_cache,
        )
