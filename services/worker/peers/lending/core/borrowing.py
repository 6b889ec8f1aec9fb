"""How many blocks a worker borrows or returns, from whom, and whose come home first. Pure.

One search runs at a time. It asks the ledger for candidates, and each candidate for memory of the tier that
the ledger names. A partial grant counts, and the next candidate is asked for the rest. After `most_rounds`
rounds, or a round without candidates, the search rests for `rest_s`.
Source: papers/001 §4.4; `algorithms.md` §4.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from services.worker.peers.core.neighbours import Neighbours
from shared.messages.commands import CreditorCandidates, FindCreditors
from shared.messages.lending import BorrowBlocks, BorrowReply, Grant, KvTier
from shared.messages.reports import Capacity

_REPORTS_UNTIL_SEEN = 2
"""The next report may be older than a change."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Marks in blocks that a worker could allocate at once, borrowed ones included."""

    low_blocks: int
    high_blocks: int

    @property
    def middle_blocks(self) -> int:
        return (self.low_blocks + self.high_blocks + 1) // 2


class Balance:
    """Blocks that a worker lacks or can return, by its latest report and its sequences' needs.

    Two marks with a gap between them prevent blocks from going back and forth. Below the low mark, the worker
    borrows up to the middle; above the high mark, it returns unused borrowed blocks. Source: `algorithms.md`
    §4 (rManager, repayment), §7 (borrowing is one rung of the ladder)."""

    def __init__(self, marks: Marks, capacity: Capacity) -> None:
        self.marks = marks
        self.capacity = capacity
        self.needed_blocks = 0
        """Total need of a sequence that is too long for this worker; 0: there is none."""
        self.wanted_blocks = 0
        """Part of this need that was missing at the last report."""
        self.may_borrow_ahead = True
        """Borrow at the low mark, without a sequence that is too long."""
        self._reports = self._shrink_from = 0

    @property
    def own_blocks(self) -> int:
        """Own blocks that are free or evictable."""
        return self.capacity.plannable_blocks - self.capacity.borrowed_free_blocks

    @property
    def keep_blocks(self) -> int:
        """Own free blocks not to be used for recalls."""
        return max(self.marks.middle_blocks, self.marks.low_blocks + self.wanted_blocks)

    @property
    def short_blocks(self) -> int:
        """Blocks that it wants back from its debtors."""
        return max(0, self.marks.low_blocks + self.wanted_blocks - self.capacity.plannable_blocks)

    def on_report(self, capacity: Capacity) -> None:
        """Take in the present state of the pool."""
        self.capacity, self._reports = capacity, self._reports + 1
        available = capacity.plannable_blocks
        lacking = self.needed_blocks - capacity.total_blocks  # Used blocks are not wanted again.
        wanted = lacking + available - self.marks.low_blocks
        self.wanted_blocks = max(0, wanted) if self.needed_blocks else 0

    def lacks(self, handed_blocks: int, idle_blocks: int) -> int:
        """Return how many blocks to borrow now; ahead of need only if own memory cannot grow.

        `handed_blocks` are borrowed and in the pool, `idle_blocks` borrowed and unused."""
        may_wait = not self.may_borrow_ahead or self.capacity.growable_blocks > 0
        if may_wait and not self.wanted_blocks:
            return 0
        available = self.own_blocks + self._unused(handed_blocks, idle_blocks)
        if available >= self.marks.low_blocks + self.wanted_blocks:
            return 0
        return max(0, self.marks.middle_blocks + self.wanted_blocks - available)

    def spares(self, handed_blocks: int, idle_blocks: int, wanted_back_blocks: int) -> int:
        """Return how many unused borrowed blocks to return now: down to the low mark for creditors that are
        short."""
        unused = self._unused(handed_blocks, idle_blocks)
        available = self.own_blocks + unused - self.wanted_blocks
        spare = min(unused, max(0, available - self.marks.low_blocks))
        return min(spare, max(0, available - self.marks.high_blocks, wanted_back_blocks))

    def may_shrink(self) -> bool:
        """Return whether the report includes the last blocks that were given up."""
        return self._reports >= self._shrink_from

    def on_shrunk(self) -> None:
        """Record that borrowed blocks left the pool."""
        self._shrink_from = self._reports + _REPORTS_UNTIL_SEEN

    def _unused(self, handed_blocks: int, idle_blocks: int) -> int:
        unseen = max(0, handed_blocks - self.capacity.borrowed_blocks)  # Since the last report.
        return idle_blocks + self.capacity.borrowed_free_blocks + unseen


@dataclass(frozen=True, slots=True)
class CreditorPressure:
    """Memory pressure of a creditor, as far as its debtor knows."""

    short_blocks: int = 0
    """Device blocks that it wants back."""
    free_fraction: float = 1.0
    """Share of its own memory that is free."""
    distance: int = 0


def in_order(
    lenders: Iterable[tuple[str, KvTier]], pressures: Mapping[str, CreditorPressure]
) -> list[tuple[str, KvTier]]:
    """Return creditors' memory, by tier, in the order in which to bring it home.

    First the device memory that creditors lack, then host memory, which is slower to read, then by pressure;
    at equal pressure, distant creditors first, since their blocks cost more to read."""
    nothing = CreditorPressure()

    def rank(lender: tuple[str, KvTier]) -> tuple[int, bool, float, int, str]:
        creditor, tier = lender
        pressure = pressures.get(creditor, nothing)
        is_device = tier is KvTier.DEVICE
        short_blocks = pressure.short_blocks if is_device else 0
        return -short_blocks, is_device, pressure.free_fraction, -pressure.distance, creditor

    return sorted(lenders, key=rank)


def pressures(
    neighbours: Neighbours, own_host: str, wanted_back: Mapping[str, int]
) -> dict[str, CreditorPressure]:
    """Return the pressure by creditor, from heartbeats and the blocks that creditors want back."""
    found = {
        name: CreditorPressure(free_fraction=one.free_fraction, distance=int(one.host != own_host))
        for name, one in neighbours.known.items()
    }
    for name, blocks in wanted_back.items():
        found[name] = replace(found.get(name, CreditorPressure()), short_blocks=blocks)
    return found


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
            question = BorrowBlocks(
                debtor_id=self._debtor_id,
                debtor_incarnation=self._incarnation,
                request=next(self._requests),
                blocks=self._missing_blocks,
                tier=self._tier,
                fingerprint=self._fingerprint,
                for_cache=self._for_cache,
            )
            return AskCreditor(creditor_id, question)
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
