"""A search over a real bus: a ledger that knows a creditor, a creditor that grants a part."""

from services.worker.lending.borrowing import Borrowing, Manners
from services.worker.lending.debts import Debts
from services.worker.lending.search import Search
from services.worker.lending.table import RBlockTable
from shared import subjects
from shared.bus import Endpoint
from shared.clock import monotonic_s
from shared.messages.commands import Creditor, CreditorCandidates, FindCreditors
from shared.messages.lending import BorrowBlocks, BorrowReply, Refusal
from tests.conftest import ConnectBus
from tests.services.worker.lending.builders import grant


class Ledger:
    """Names the same two, whoever asks."""

    async def find(self, asked: FindCreditors) -> CreditorCandidates:
        named = ("c0", "c1") if not asked.refused_by else ()
        return CreditorCandidates(
            candidates=tuple(Creditor(worker_id=name, free_tokens=64, distance=0) for name in named)
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
