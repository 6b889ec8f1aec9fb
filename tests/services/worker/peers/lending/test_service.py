"""Workers that lend over a real bus, with a real ledger and pools without an engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from services.ledger.config import LedgerConfig
from services.ledger.service import HANDLERS as LEDGER_HANDLERS
from services.ledger.service import Ledger
from services.worker.peers.lending.core.borrowing import AskCreditor, Borrowing, Manners, is_answer
from services.worker.peers.lending.core.debts import Debts
from services.worker.peers.lending.core.grants import Grants, Terms
from services.worker.peers.lending.core.interfaces import Owner
from services.worker.peers.lending.core.settings import LendingConfig
from services.worker.peers.lending.core.table import BlockState, LentRow, RBlockTable
from services.worker.peers.lending.debtor import Search
from services.worker.peers.lending.service import Lending, loans, section
from shared import subjects
from shared.bus import Bus, Endpoint
from shared.clock import monotonic_s
from shared.errors import NoResponder
from shared.messages.commands import CreditorCandidate, CreditorCandidates, FindCreditors
from shared.messages.lending import BorrowBlocks, BorrowReply, Grant, KvTier, LeasesRenewed, Refusal
from shared.messages.reports import Capacity
from tests.conftest import ConnectBus
from tests.patience import until
from tests.services.ledger.builders import report
from tests.services.worker.peers.lending.builders import BLOCKS, PlainVault, borrow, grant, renew
from tests.shared.messages.builders import worker_report

LENDS = LendingConfig(lease_s=2.0, grace_s=0.1, rest_s=0.05)


class Worker:
    """Lending with heartbeats, on a bus of its own."""

    def __init__(self, bus: Bus, config: LendingConfig) -> None:
        self.bus = bus
        self.vault = PlainVault()
        self.lost: list[int] = []
        owner = Owner(bus.instance, bus.incarnation, BLOCKS, BLOCKS, 16, b"f")
        self.lending = Lending(bus, config, owner, self.vault, on_lost=self.lost.extend)
        self.task = asyncio.create_task(self.serve())
        self.beats = 0

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.lending.serve())
            tasks.create_task(self.beat())

    async def beat(self) -> None:
        while True:
            self.beats += 1
            pool = self.vault.pool
            capacity = Capacity(
                total_blocks=pool.total_blocks,
                free_blocks=pool.free_blocks,
                lent_blocks=pool.withdrawn_blocks,
            )
            report = worker_report(
                self.bus.instance,
                incarnation=self.bus.incarnation,
                seq=self.beats,
                capacity=capacity,
                fingerprint=b"f",
            )
            told = msgspec.structs.replace(report, **self.lending.section(capacity))
            await self.bus.publish(subjects.worker_reported(self.bus.instance), told)
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])

    def check(self) -> None:
        self.lending.table.check_integrity()
        self.lending.grants.check_integrity()
        self.lending.debts.check_integrity()


@dataclass
class Pair:
    """A ledger, and two workers: one may borrow from the other."""

    debtor: Worker
    creditor: Worker


@pytest_asyncio.fixture
async def pair(connect_bus: ConnectBus) -> AsyncIterator[Pair]:
    ledger = await connect_bus("ledger", "ledger-0")
    await ledger.attach(LEDGER_HANDLERS, Ledger(ledger, LedgerConfig()))
    borrows = LENDS.model_copy(update={"borrow": True, "low_fraction": 0.2, "high_fraction": 0.4})
    debtor = Worker(await connect_bus("worker", "w0"), borrows)
    creditor = Worker(await connect_bus("worker", "w1"), LENDS)
    yield Pair(debtor, creditor)
    await debtor.stop()
    await creditor.stop()


async def test_borrows_when_short_renews_and_returns(pair: Pair) -> None:
    debtor, creditor = pair.debtor, pair.creditor
    debtor.lending.want(0, may_borrow_ahead=False)
    held = debtor.vault.pool.allocate(18)
    await asyncio.sleep(0.5)
    assert debtor.lending.debts.borrowed_blocks == 0, "something else is cheaper"
    debtor.lending.want(0)
    await until(lambda: debtor.lending.debts.borrowed_blocks == 4)
    assert creditor.vault.pool.total_blocks == BLOCKS - 4
    used = debtor.lending.debts.take(4)
    await asyncio.sleep(2.5)
    assert debtor.lending.debts.borrowed_blocks >= 4, "renewed beyond the first lease"
    assert debtor.lending.table.in_state(BlockState.USED) == used and not debtor.lost
    debtor.lending.debts.release(used)
    debtor.vault.pool.release(held)
    await until(lambda: creditor.vault.pool.free_blocks == BLOCKS)
    await until(lambda: debtor.lending.debts.borrowed_blocks == 0)
    debtor.check()
    creditor.check()


async def test_blocks_of_a_lost_creditor_are_lost_within_the_lease(pair: Pair) -> None:
    debtor = pair.debtor
    debtor.vault.pool.allocate(18)
    await until(lambda: debtor.lending.debts.borrowed_blocks == 4)
    used = debtor.lending.debts.take(4)
    await pair.creditor.stop()
    await until(lambda: sorted(debtor.lost) == used)
    debtor.check()


async def test_a_silent_debtors_blocks_come_back(pair: Pair) -> None:
    creditor = pair.creditor
    pair.debtor.vault.pool.allocate(18)
    await until(lambda: creditor.vault.pool.withdrawn_blocks == 4)
    await pair.debtor.stop()
    await until(lambda: creditor.lending.grants.lent_blocks == 0)
    await until(lambda: creditor.vault.pool.free_blocks == BLOCKS)


async def test_a_restarted_debtor_loses_its_old_grants(connect_bus: ConnectBus) -> None:
    creditor = Worker(await connect_bus("worker", "w1"), LendingConfig())
    client = await connect_bus("worker", "w0")

    async def ask(incarnation: int, blocks: int, debtor: str = "w0", kv: bytes = b"f") -> BorrowReply:
        question = borrow(debtor, incarnation=incarnation, blocks=blocks, fingerprint=kv)
        subject = subjects.worker_borrow("w1", debtor)
        return await client.request(subject, question, BorrowReply, deadline_s=5.0)

    try:
        while True:
            try:
                first = await ask(1, 9)
                break
            except NoResponder:  # not attached yet
                await asyncio.sleep(0.02)
        assert first.grant is not None and len(first.grant.blocks) == 9
        second = await ask(2, 9)
        assert second.grant is not None and len(second.grant.blocks) == 9, "the cap is 10"
        third = await ask(3, 99)
        assert third.grant is not None and len(third.grant.blocks) == 10
        renewed = await client.request(
            subjects.worker_renew("w1", "w0"),
            renew("w0", first.grant.grant_id, creditor_incarnation=first.grant.creditor_incarnation),
            LeasesRenewed,
            deadline_s=5.0,
        )
        assert renewed.held == ()
        assert (await ask(1, 1, "w9", b"g")).refusal is Refusal.OTHER_KV
        creditor.check()
    finally:
        await creditor.stop()


class NamesTwo:
    """A ledger that names the same two creditors to every debtor."""

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


async def test_a_refusal_and_a_partial_grant_continue_the_search(connect_bus: ConnectBus) -> None:
    refusing = Lender(BorrowReply(refusal=Refusal.AT_CAP))
    granting = Lender(BorrowReply(grant=grant("c1", 4, 5)))
    for name, lender in (("c0", refusing), ("c1", granting)):
        bus = await connect_bus("worker", name)
        await bus.attach((Endpoint(subjects.worker_borrow.to, BorrowBlocks, "borrow"),), lender)
    ledger = await connect_bus("ledger", "ledger-0")
    await ledger.attach((Endpoint(subjects.ANY_LEDGER_CANDIDATES, FindCreditors, "find"),), NamesTwo())
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


async def test_a_search_without_a_ledger_rests(connect_bus: ConnectBus) -> None:
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


async def test_blocks_lost_while_their_creditor_is_dialled_are_not_used() -> None:
    """Sequences used lost blocks, whose lease was never renewed, and which were never returned."""
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
def test_a_grant_that_does_not_fit_the_request_is_ignored(granted: Grant) -> None:
    """A grant of own memory stopped the debtor; a repeated block would hold two sequences."""
    asked = borrow("w", blocks=3)
    assert not is_answer(granted, AskCreditor("c1", asked))
    assert is_answer(grant("c1", 4, 5), AskCreditor("c1", asked))


def test_heartbeats_separate_tiers_and_frozen_workers_offer_nothing() -> None:
    table = RBlockTable("w", 20, 5)
    grants = Grants(table, 1, Terms(6, most_host_blocks=5))
    table.add(grant("c", 1, 2))
    table.add(grant("c", 1, grant_id=2, tier=KvTier.HOST))
    table.lend(KvTier.DEVICE, [3, 4], LentRow("d", 1))
    table.lend(KvTier.HOST, [0, 1, 2], LentRow("e", 2))
    before = report("w")
    lent = section(before.capacity, table, grants, spare_blocks=9, host_free_blocks=2)
    told = msgspec.structs.replace(before, **lent)
    capacity = told.capacity
    assert (capacity.lent_blocks, capacity.host_lent_blocks, capacity.host_blocks) == (2, 3, 5)
    assert (capacity.lendable_blocks, capacity.host_lendable_blocks, capacity.loanable_blocks) == (4, 2, 6)
    assert (capacity.most_lent_blocks, capacity.borrowed_blocks) == (11, 3)
    assert (told.lent_to_blocks, told.host_lent_to_blocks) == ({"d": 2}, {"e": 3})
    assert (told.borrowed_from_blocks, told.host_borrowed_from_blocks) == ({"c": 2}, {"c": 1})
    grants.frozen = True
    assert section(before.capacity, table, grants, 9, 2)["capacity"].loanable_blocks == 0
    assert loans(table) == {
        "lent_blocks": 5,
        "borrowed_blocks": 3,
        "host_lent_blocks": 3,
        "host_borrowed_blocks": 1,
        "loans": [
            {"peer": "c", "lent_blocks": 0, "borrowed_blocks": 3},
            {"peer": "d", "lent_blocks": 2, "borrowed_blocks": 0},
            {"peer": "e", "lent_blocks": 3, "borrowed_blocks": 0},
        ],
    }


async def test_host_memory_of_caches_yields_to_a_sequence(connect_bus: ConnectBus) -> None:
    bus = await connect_bus("worker", "w1")
    owner = Owner(bus.instance, bus.incarnation, BLOCKS, BLOCKS, 16, b"f", host_blocks=4)
    lending = Lending(bus, LENDS, owner, PlainVault())

    def asked(debtor: str, blocks: int, kv: bytes = b"f", *, for_cache: bool) -> BorrowBlocks:
        question = borrow(debtor, blocks=blocks, tier=KvTier.HOST, fingerprint=kv)
        return msgspec.structs.replace(question, for_cache=for_cache)

    cached = await lending.borrow(asked("d0", 3, for_cache=True))
    assert cached.grant is not None and len(cached.grant.blocks) == 3
    assert (await lending.borrow(asked("d1", 3, for_cache=True))).grant is not None, "what is left"
    capacity = lending.section(Capacity(total_blocks=BLOCKS, free_blocks=BLOCKS))["capacity"]
    assert (capacity.host_lendable_blocks, capacity.host_yielding_blocks) == (0, 4)
    assert (await lending.borrow(asked("d2", 3, for_cache=True))).refusal is Refusal.AT_CAP
    assert (await lending.borrow(asked("d2", 3, b"g", for_cache=False))).refusal is Refusal.OTHER_KV
    assert lending.grants.yielding_blocks(KvTier.HOST) == 4, "a request that is refused anyway ends no grant"
    sequences = await lending.borrow(asked("d2", 1, for_cache=False))
    assert sequences.grant is not None and len(sequences.grant.blocks) == 1
    assert lending.grants.yielding_blocks(KvTier.HOST) == 3, "the last grant goes first, and it is enough"
    assert await lending.borrow(asked("d2", 1, for_cache=False)) == sequences, "asked again, the same"
    assert lending.grants.yielding_blocks(KvTier.HOST) == 3
    lending.grants.check_integrity()


def test_host_memory_for_caches_only_is_not_offered_to_sequences() -> None:
    """With vLLM workers, a native worker would announce a longer context than it can hold."""
    table = RBlockTable("w", 20, 5)
    grants = Grants(table, 1, Terms(0, most_host_blocks=5, is_host_for_caches=True))
    table.lend(KvTier.HOST, [0], LentRow("e", 1))
    capacity = section(report("w").capacity, table, grants, spare_blocks=0, host_free_blocks=4)["capacity"]
    assert (capacity.host_blocks, capacity.host_lendable_blocks, capacity.is_host_for_caches) == (5, 4, True)
    assert capacity.most_lent_blocks == capacity.loanable_blocks == 0
