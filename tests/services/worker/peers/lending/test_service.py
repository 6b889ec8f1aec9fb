"""Workers that lend over a real bus, with a real ledger and pools without an engine."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from services.ledger.config import LedgerConfig
from services.ledger.service import HANDLERS as LEDGER_HANDLERS
from services.ledger.service import Ledger
from services.worker.peers.lending.core.debts import BlockState, Debts
from services.worker.peers.lending.core.grants import Grants, Terms
from services.worker.peers.lending.debtor import Debtor, Owner
from services.worker.peers.lending.service import loans, section
from services.worker.peers.settings import LendingConfig
from shared import subjects
from shared.bus import Bus
from shared.clock import monotonic_s
from shared.errors import NoResponder
from shared.messages.lending import BorrowReply, Grant, KvTier, LeasesRenewed, Refusal
from shared.messages.reports import Capacity
from tests.conftest import ConnectBus
from tests.patience import until
from tests.services.ledger.builders import report
from tests.services.worker.peers.lending.builders import BLOCKS, KV, LendingWorker, borrow, grant, renew

LENDS = LendingConfig(lease_s=2.0, grace_s=0.1, rest_s=0.05)
BORROWS = LENDS.model_copy(update={"borrow": True, "low_fraction": 0.2, "high_fraction": 0.4})


@pytest_asyncio.fixture
async def pair(connect_bus: ConnectBus) -> AsyncIterator[tuple[LendingWorker, LendingWorker]]:
    """A debtor and a creditor, with a ledger."""
    ledger = await connect_bus("ledger", "ledger-0")
    await ledger.attach(LEDGER_HANDLERS, Ledger(ledger, LedgerConfig()))
    debtor = LendingWorker(await connect_bus("worker", "w0"), BORROWS)
    creditor = LendingWorker(await connect_bus("worker", "w1"), LENDS)
    debtor.start()
    creditor.start()
    yield debtor, creditor
    await debtor.stop()
    await creditor.stop()


Pair = tuple[LendingWorker, LendingWorker]


async def test_borrows_when_short_renews_and_returns(pair: Pair) -> None:
    debtor, creditor = pair
    debtor.lending.want(0, may_borrow_ahead=False)
    held = debtor.pool.allocate(18)
    await asyncio.sleep(0.3)
    assert debtor.debts.borrowed_blocks == 0, "something else is cheaper"
    debtor.lending.want(0)
    await until(lambda: debtor.debts.borrowed_blocks == 4)
    assert creditor.pool.total_blocks == BLOCKS - 4
    used = debtor.debts.take(4)
    first_ends_s = min(loan.ends_s for loan in debtor.debts.grants.values())
    await until(lambda: monotonic_s() > first_ends_s)
    assert debtor.debts.in_state(BlockState.USED) == used, "renewed beyond the first lease"
    debtor.debts.release(used)
    debtor.pool.release(held)
    await until(lambda: creditor.pool.free_blocks == BLOCKS)
    await until(lambda: debtor.debts.borrowed_blocks == 0)
    debtor.check()
    creditor.check()


@pytest.mark.parametrize("silent", ["creditor", "debtor"])
async def test_a_loan_ends_with_the_lease_when_either_side_falls_silent(pair: Pair, silent: str) -> None:
    debtor, creditor = pair
    debtor.pool.allocate(18)
    await until(lambda: debtor.debts.borrowed_blocks == 4 == creditor.pool.withdrawn_blocks)
    debtor.debts.take(4)
    await (creditor if silent == "creditor" else debtor).stop()
    if silent == "creditor":
        await until(lambda: not debtor.debts.blocks)
    else:
        await until(lambda: creditor.grants.lent_blocks() == 0 and creditor.pool.free_blocks == BLOCKS)
    debtor.check()
    creditor.check()


async def test_a_restarted_debtor_loses_its_old_grants(connect_bus: ConnectBus) -> None:
    creditor = LendingWorker(await connect_bus("worker", "w1"), LendingConfig())
    creditor.start()
    client = await connect_bus("worker", "w0")

    async def ask(incarnation: int, blocks: int, debtor: str = "w0", kv: bytes = KV) -> BorrowReply:
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
        again = renew("w0", first.grant.grant_id, creditor_incarnation=first.grant.creditor_incarnation)
        subject = subjects.worker_renew("w1", "w0")
        assert (await client.request(subject, again, LeasesRenewed, deadline_s=5.0)).held == ()
        assert (await ask(1, 1, "w9", b"g")).refusal is Refusal.OTHER_KV
        creditor.check()
    finally:
        await creditor.stop()


class Losing:
    """A user of blocks whose creditor fails while it is dialled."""

    debts: Debts

    def __init__(self) -> None:
        self.admitted: list[int] = []
        self.lost: list[int] = []

    async def admit(self, grant: Grant, logical: Sequence[int]) -> bool:
        self.debts.on_creditor_gone(grant.creditor_id)
        self.admitted += logical
        return True

    def lose(self, logical: Sequence[int], why: str) -> None:
        self.lost += logical


def searching(bus: Bus | Any, user: Losing) -> Debtor:
    owner = Owner("w", 1, 10, 10, 16, KV)
    debtor = Debtor(bus, LENDS, owner, user, itertools.count(1), monotonic_s, first_id=10, rest_s=9.0)
    user.debts = debtor.debts
    return debtor


async def test_a_search_without_a_ledger_rests(connect_bus: ConnectBus) -> None:
    debtor = searching(await connect_bus("worker", "w"), Losing())
    await debtor.search(3)
    assert not debtor.debts.blocks and not debtor.borrowing.may_start(monotonic_s())


async def test_blocks_lost_while_their_creditor_is_dialled_are_not_used() -> None:
    """Sequences used lost blocks, whose lease was never renewed, and which were never returned."""
    user = Losing()
    debtor = searching(None, user)
    granted = grant("c1", 4, 5)
    await debtor._admit(granted, debtor.debts.on_granted(granted, 0.0))
    assert user.lost == user.admitted == [10, 11]


def test_heartbeats_separate_tiers_and_frozen_workers_offer_nothing() -> None:
    debts, grants = Debts("w", 20, 1), Grants("w", 1, Terms(6, most_host_blocks=5), 20, 5)
    debts.on_granted(grant("c", 1, 2), 0.0)
    debts.on_granted(grant("c", 1, grant_id=2, tier=KvTier.HOST), 0.0)
    grants.lend(borrow("d"), [3, 4], 0.0)
    grants.lend(borrow("e", tier=KvTier.HOST), [0, 1, 2], 0.0)
    before = report("w")
    lent = section(before.capacity, debts, grants, spare_blocks=9, host_free_blocks=2)
    told = msgspec.structs.replace(before, **lent)
    capacity = told.capacity
    assert (capacity.lent_blocks, capacity.host_lent_blocks, capacity.host_blocks) == (2, 3, 5)
    assert (capacity.lendable_blocks, capacity.host_lendable_blocks, capacity.loanable_blocks) == (4, 2, 6)
    assert (capacity.most_lent_blocks, capacity.borrowed_blocks) == (11, 3)
    assert (told.lent_to_blocks, told.host_lent_to_blocks) == ({"d": 2}, {"e": 3})
    assert (told.borrowed_from_blocks, told.host_borrowed_from_blocks) == ({"c": 2}, {"c": 1})
    grants.frozen = True
    assert section(before.capacity, debts, grants, 9, 2)["capacity"].loanable_blocks == 0
    assert loans(debts, grants, {}) == {
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
    worker = LendingWorker(await connect_bus("worker", "w1"), LENDS, host_blocks=4)
    lending, grants = worker.lending, worker.grants

    async def ask(debtor: str, blocks: int, kv: bytes = KV, *, for_cache: bool) -> BorrowReply:
        asked = borrow(debtor, blocks=blocks, tier=KvTier.HOST, fingerprint=kv, for_cache=for_cache)
        return await lending.borrow(asked)

    cached = await ask("d0", 3, for_cache=True)
    assert cached.grant is not None and len(cached.grant.blocks) == 3
    assert (await ask("d1", 3, for_cache=True)).grant is not None, "what is left"
    capacity = lending.section(Capacity(total_blocks=BLOCKS, free_blocks=BLOCKS))["capacity"]
    assert (capacity.host_lendable_blocks, capacity.host_yielding_blocks) == (0, 4)
    assert (await ask("d2", 3, for_cache=True)).refusal is Refusal.AT_CAP
    assert (await ask("d2", 3, b"g", for_cache=False)).refusal is Refusal.OTHER_KV
    assert grants.yielding_blocks() == 4, "a request that is refused anyway ends no grant"
    sequences = await ask("d2", 1, for_cache=False)
    assert sequences.grant is not None and len(sequences.grant.blocks) == 1
    assert grants.yielding_blocks() == 3, "the last grant goes first, and it is enough"
    assert await ask("d2", 1, for_cache=False) == sequences, "asked again, the same"
    assert grants.yielding_blocks() == 3
    worker.check()


def test_host_memory_for_caches_only_is_not_offered_to_sequences() -> None:
    """With vLLM workers, a native worker would announce a longer context than it can hold."""
    grants = Grants("w", 1, Terms(0, most_host_blocks=5, is_host_for_caches=True), 20, 5)
    grants.lend(borrow("e", tier=KvTier.HOST), [0], 0.0)
    capacity = section(report("w").capacity, Debts("w", 20, 1), grants, 0, 4)["capacity"]
    assert (capacity.host_blocks, capacity.host_lendable_blocks, capacity.is_host_for_caches) == (5, 4, True)
    assert capacity.most_lent_blocks == capacity.loanable_blocks == 0
