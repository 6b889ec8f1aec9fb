"""A search over a real bus: a ledger that knows a creditor, a creditor that grants a part."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.worker.peers.lending.core.borrowing import AskCreditor, Borrowing, Manners, is_answer
from services.worker.peers.lending.core.debts import Debts
from services.worker.peers.lending.core.table import RBlockTable
from services.worker.peers.lending.service import Search
from shared import subjects
from shared.bus import Endpoint
from shared.clock import monotonic_s
from shared.messages.commands import CreditorCandidate, CreditorCandidates, FindCreditors
from shared.messages.lending import BorrowBlocks, BorrowReply, Grant, KvTier, Refusal
from tests.conftest import ConnectBus
from tests.services.worker.peers.lending.builders import grant


class Ledger:
    """Names the same two, whoever asks."""

    async def find(self, asked: FindCreditors) -> CreditorCandidates:
        named = ("c0", "c1") if not asked.refused_by else ()
        return CreditorCandidates(
            candidates=tuple(CreditorCandidate(worker_id=name, free_tokens=64, distance=0) for name in named)
        )


class Lender:
    def __init__(self, reply: BorrowReply) -> None:
        self.reply = reply
        self.asked: list[int] = []

    async def borrow(self, asked: BorrowBlocks) -> BorrowReply:
        self.asked.append(asked.blocks)
        return self.reply


async def test_refused_by_one_granted_a_part_by_the_next(connect_bus: ConnectBus) -> None:
    refusing = Lender(BorrowReply(refusal=Refusal.AT_CAP))
    granting = Lender(BorrowReply(grant=grant("c1", 4, 5)))
    for name, lender in (("c0", refusing), ("c1", granting)):
        bus = await connect_bus("worker", name)
        await bus.attach((Endpoint(subjects.worker_borrow.to, BorrowBlocks, "borrow"),), lender)
    ledger = await connect_bus("ledger", "ledger-0")
    await ledger.attach((Endpoint(subjects.ANY_LEDGER_CANDIDATES, FindCreditors, "find"),), Ledger())
    debts = Debts(RBlockTable("w", 10), 1)
    search = Search(
        await connect_bus("worker", "w"),
        debts,
        Borrowing("w", 1, 16, manners=Manners(most_rounds=2, rest_s=9.0)),
        None,
        monotonic_s,
    )
    await search.run(3)
    assert (refusing.asked, granting.asked) == ([3], [3])
    assert debts.free_blocks == 2
    assert not search.may_start(monotonic_s()), "it rests"


async def test_without_a_ledger_it_rests(connect_bus: ConnectBus) -> None:
    debts = Debts(RBlockTable("w", 10), 1)
    search = Search(await connect_bus("worker", "w"), debts, Borrowing("w", 1, 16), None, monotonic_s)
    await search.run(3)
    assert debts.borrowed_blocks == 0 and not search.may_start(monotonic_s())


class Losing:
    """A borrower whose creditor fails while it is dialled."""

    def __init__(self, debts: Debts) -> None:
        self.debts = debts
        self.admitted: list[int] = []
        self.lost: list[int] = []

    async def admit(self, grant: Grant, logical: Sequence[int]) -> bool:
        self.debts.on_creditor_gone(grant.creditor_id)
        self.admitted += logical
        return True

    def lose(self, logical: Sequence[int]) -> None:
        self.lost += logical


async def test_blocks_lost_while_their_creditor_is_dialled_are_nobodys() -> None:
    """Sequences got them: no lease was renewed for them, and they were never returned."""
    debts = Debts(RBlockTable("w", 10), 1)
    nowhere: Any = None
    losing: Any = Losing(debts)
    search = Search(nowhere, debts, Borrowing("w", 1, 16), losing, monotonic_s)
    granted = grant("c1", 4, 5)
    await search._admit(granted, debts.on_granted(granted, 0.0))
    assert losing.lost == losing.admitted and len(losing.lost) == 2


@pytest.mark.parametrize(
    "granted",
    [
        grant("w", 4),
        grant("c9", 4),
        grant("c1", 4, 4),
        grant("c1", -1),
        grant("c1", 4, 5, 6, 7),
        grant("c1", 4, tier=KvTier.HOST),
        grant("c1", 4, lease_s=float("nan")),
        grant("c1", 4, lease_s=-1.0),
    ],
)
def test_a_grant_of_something_else_is_none(granted: Grant) -> None:
    """One of the debtor's own memory ended the debtor; two numbers for one block are two sequences in it."""
    asked = BorrowBlocks(debtor_id="w", debtor_incarnation=1, request=1, blocks=3)
    assert not is_answer(granted, AskCreditor("c1", asked))
    assert is_answer(grant("c1", 4, 5), AskCreditor("c1", asked))
