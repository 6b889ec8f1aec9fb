"""Workers that lend over a real bus, with a real ledger and no engine; settlements and recalls."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import msgspec
import pytest
import pytest_asyncio

from services.ledger.config import LedgerConfig
from services.ledger.service import HANDLERS as LEDGER_HANDLERS
from services.ledger.service import Ledger
from services.worker.core.settings import LendingConfig
from services.worker.kv.core.block_pool import BlockPool
from services.worker.peers.lending.core.borrowing import CreditorPressure
from services.worker.peers.lending.core.debts import BlockState, Debts, Repayment
from services.worker.peers.lending.core.grants import Grants, Terms
from services.worker.peers.lending.debtor import Debtor, Owner
from services.worker.peers.lending.recalls import Recalls
from services.worker.peers.lending.service import loans, section
from services.worker.peers.lending.stock import Stock
from shared import subjects
from shared.bus import Bus
from shared.clock import monotonic_s
from shared.errors import CreditorLost, NoResponder
from shared.messages.lending import (
    BlocksReturned,
    BorrowReply,
    Grant,
    KvTier,
    LeasesRenewed,
    Refusal,
    Settle,
    SettlePhase,
)
from shared.messages.reports import Capacity
from tests.conftest import ConnectBus
from tests.patience import until
from tests.services.ledger.builders import report
from tests.services.worker.peers.lending.builders import (
    BLOCKS,
    KV,
    LendingWorker,
    borrow,
    grant,
    open_door,
    renew,
)

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


async def test_blocks_lost_while_their_creditor_is_dialled_are_not_used() -> None:
    """Sequences used lost blocks, whose lease was never renewed, and which were never returned."""
    user, bus = Losing(), cast(Bus, None)
    owner, numbers = Owner("w", 1, 10, 10, 16, KV), itertools.count(1)
    debtor = Debtor(bus, LENDS, owner, user, numbers, monotonic_s, first_id=10, rest_s=9.0)
    user.debts = debtor.debts
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
    names = ("peer", "lent_blocks", "borrowed_blocks")
    rows = [dict(zip(names, row, strict=True)) for row in (("c", 0, 3), ("d", 2, 0), ("e", 3, 0))]
    wanted = {"lent_blocks": 5, "borrowed_blocks": 3, "host_lent_blocks": 3, "host_borrowed_blocks": 1}
    assert loans(debts, grants, {}) == wanted | {"loans": rows}


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


OWN = 10


class Engine:
    """Records its calls. Sequences use all borrowed blocks except `unused`."""

    def __init__(self) -> None:
        self.apart: set[int] = set()
        self.unused: set[int] = set()
        self.copied: list[tuple[int, int]] = []
        self.swapped: list[tuple[int, int]] = []
        self.is_creditor_dead = False
        self.gate = asyncio.Event()
        self.gate.set()

    async def set_apart(self, logical: Sequence[int], most_blocks: int) -> list[int]:
        chosen = list(logical)[:most_blocks]
        self.apart.update(chosen)
        return chosen

    def rejoin(self, logical: Sequence[int]) -> None:
        self.apart.difference_update(logical)

    async def copy_home(self, pairs: Sequence[tuple[int, int]]) -> bool:
        self.copied += pairs
        return not self.is_creditor_dead

    async def swap_home(self, pairs: Sequence[tuple[int, int]]) -> list[int] | None:
        if self.is_creditor_dead:
            return None
        self.swapped += pairs
        return [own for there, own in pairs if there in self.unused]

    async def recall(self, logical: Sequence[int], most_blocks: int, keep_blocks: int) -> list[int]:
        await self.gate.wait()
        return [number for number in logical if number not in self.unused][:most_blocks]


class World:
    """A worker that owes `c` four blocks and is owed three by `d`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.grants, self.debts = Grants("w", 1, Terms(most_blocks=5), OWN), Debts("w", OWN, 1)
        self.pool, self.engine = BlockPool(OWN, 16), Engine()
        self.stock = Stock(open_door(), self.pool, 0, 0)
        taken = self.pool.withdraw(self.pool.allocate(3))
        self.grants.lend(borrow("d", blocks=3), taken, 0.0)
        self.there = self.debts.on_granted(grant("c", 20, 21, 22, 23, lease_s=99.0), 0.0)
        self.debts.use(self.there)
        self.repaid: list[Repayment] = []
        borrower: Any = self.engine
        parts = self.debts, self.grants, borrower, self.stock, 2, self.repay
        self.recalls = Recalls(*parts, lambda: self.now_s)

    async def repay(self, repayment: Repayment) -> bool:
        self.repaid.append(repayment)
        self.debts.on_returned(repayment, BlocksReturned(generation=2))
        return True

    async def ask(self, phase: SettlePhase, blocks: int = 2, round: int = 0) -> int:
        step = Settle(settlement="s", phase=phase, round=round, blocks=blocks, creditor_id="c", debtor_id="d")
        return (await self.recalls.settle(step)).blocks

    async def freeze(self, blocks: int = 2) -> int:
        """Wait for bounce blocks, then settle."""
        await self.recalls.tick()
        return await self.ask(SettlePhase.FREEZE, blocks)

    def bounce(self) -> object:
        return self.recalls.details()["bounce_blocks"]

    def is_settling(self) -> object:
        return self.recalls.details()["is_settling"]


async def test_blocks_that_become_spare_during_a_loan_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two own blocks stayed withdrawn, and a sequence too long for the rest waited forever."""
    world = World()
    lend = world.stock.lend

    async def lend_late(most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
        assert world.recalls.take_spare() == [], "what was spare goes back"
        world.recalls._spare += [17]  # as a swap does that ends meanwhile
        return await lend(most_blocks, least_blocks, keep_blocks)

    monkeypatch.setattr(world.stock, "lend", lend_late)
    await world.recalls.tick()
    assert (world.bounce(), world.recalls.take_spare()) == (2, [17])


async def test_a_settlement_from_end_to_end() -> None:
    world = World()
    assert await world.ask(SettlePhase.FREEZE) == 0, "nothing to copy into yet"
    assert world.engine.apart == set(), "and nothing stays apart"
    await world.recalls.tick()
    assert (world.bounce(), world.pool.withdrawn_blocks) == (2, 5)
    assert await world.ask(SettlePhase.FREEZE, 3) == 3
    assert world.engine.apart == set(world.there[:3]) and world.is_settling()
    assert await world.ask(SettlePhase.COPY) == 2
    world.engine.unused = {world.there[1]}
    assert await world.ask(SettlePhase.COMMIT) == 2
    assert [one.message.blocks for one in world.repaid] == [(20, 21)]
    assert world.debts.borrowed_blocks == 2
    assert (world.bounce(), world.recalls.settled_blocks) == (1, 1), "one had no sequence"
    assert await world.ask(SettlePhase.UNFREEZE) == 0
    assert world.engine.apart == set() and not world.is_settling()


async def test_a_settlement_waits_for_memory_and_for_a_recall_to_end() -> None:
    world = World()
    freezing = asyncio.create_task(world.ask(SettlePhase.FREEZE, 3))
    await asyncio.sleep(0.05)
    assert not freezing.done()
    await world.recalls.tick()
    assert await freezing == 3
    await world.ask(SettlePhase.UNFREEZE)
    world.engine.gate.clear()
    recalling = asyncio.create_task(world.recalls.recall({}, free_blocks=7, keep_blocks=5))
    await asyncio.sleep(0)
    freezing = asyncio.create_task(world.ask(SettlePhase.FREEZE, 4))
    await asyncio.sleep(0.05)
    assert not freezing.done() and not world.is_settling()
    world.engine.gate.set()
    await recalling
    assert await freezing == 2, "of four, two are at home already"


async def test_a_copy_waits_for_blocks_that_a_debtor_returned() -> None:
    world = World()
    await world.freeze(3)
    await world.ask(SettlePhase.COPY)
    await world.ask(SettlePhase.COMMIT)
    assert world.bounce() == 0
    copying = asyncio.create_task(world.ask(SettlePhase.COPY, 1, round=1))
    await asyncio.sleep(0.05)
    assert not copying.done()
    assert world.recalls.keep([0, 1, 2]) == [2]
    assert await copying == 1


async def test_a_creditor_that_dies_before_the_commit_loses_no_own_block() -> None:
    world = World()
    await world.freeze()
    world.engine.is_creditor_dead = True
    assert await world.ask(SettlePhase.COPY) == 0
    world.engine.is_creditor_dead = False
    assert await world.ask(SettlePhase.COPY, round=1) == 2
    world.engine.is_creditor_dead = True
    with pytest.raises(CreditorLost):
        await world.ask(SettlePhase.COMMIT, round=1)
    assert world.bounce() == 2 and not world.recalls.is_swapping and not world.repaid


async def test_a_settlement_without_messages_times_out() -> None:
    world = World()
    await world.freeze()
    assert world.engine.apart
    assert not world.recalls.may_recall()
    world.now_s = 5.1
    await world.recalls.tick()
    assert not world.engine.apart and not world.is_settling()
    assert len(world.debts.used_at("c", KvTier.DEVICE)) == 4


async def test_a_recall_brings_used_blocks_home() -> None:
    world = World()
    world.engine.unused = {world.there[0]}
    idle = world.debts.on_granted(grant("b", *range(30, 36), grant_id=2, lease_s=99.0), 0.0)
    world.debts.use(idle)
    world.engine.unused.update(idle)
    assert world.recalls.may_recall()
    await world.recalls.recall({"b": CreditorPressure(short_blocks=1)}, free_blocks=7, keep_blocks=5)
    assert [one.message.blocks for one in world.repaid] == [(21, 22)]
    assert (world.recalls.recalled_blocks, world.debts.borrowed_blocks) == (2, 8), "b waits"
    assert len(world.debts.used_at("c", KvTier.DEVICE)) == 2, "the rest is as it was"
    await world.recalls.recall({}, free_blocks=5, keep_blocks=5)
    assert len(world.debts.used_at("c", KvTier.DEVICE)) == 2 and world.recalls.may_recall()
    world.debts.check_integrity()
