"""Workers that lend over a real bus: real subjects, a real ledger, pools without an engine."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from services.ledger.config import LedgerConfig
from services.ledger.service import HANDLERS as LEDGER_HANDLERS
from services.ledger.service import Ledger
from services.worker.kv.core.block_pool import BlockPool
from services.worker.peers.lending.core.interfaces import Owner
from services.worker.peers.lending.core.lendable_memory import lend
from services.worker.peers.lending.core.settings import LendingConfig
from services.worker.peers.lending.core.table import BlockState
from services.worker.peers.lending.service import Lending
from shared import subjects
from shared.bus import Bus
from shared.errors import NoResponder, Overloaded
from shared.messages.lending import BorrowBlocks, BorrowReply, LeasesRenewed, Refusal
from shared.messages.reports import Capacity
from tests.conftest import ConnectBus
from tests.services.worker.peers.lending.builders import grant, renew
from tests.shared.messages.builders import worker_report

BLOCKS = 20
LENDS = LendingConfig(lease_s=2.0, grace_s=0.1, rest_s=0.05)


@dataclass
class PlainVault:
    """A pool on the loop's own thread, which can be told to be overloaded."""

    pool: BlockPool = field(default_factory=lambda: BlockPool(BLOCKS, 16))
    overloaded: bool = False

    async def lend(self, most_blocks: int, least_blocks: int, keep_blocks: int) -> list[int]:
        return lend(self.pool, most_blocks, least_blocks, keep_blocks)

    async def readmit(self, blocks: Sequence[int]) -> None:
        if self.overloaded:
            raise Overloaded("not now")
        self.pool.readmit(blocks)


class Worker:
    """Lending with heartbeats, on a bus of its own."""

    def __init__(self, bus: Bus, config: LendingConfig) -> None:
        self.bus = bus
        self.vault = PlainVault()
        self.lost: list[int] = []
        owner = Owner(bus.instance, bus.incarnation, BLOCKS, 16, b"f")
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


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that within 10 s")


async def make_ledger(connect_bus: ConnectBus) -> None:
    bus = await connect_bus("ledger", "ledger-0")
    await bus.attach(LEDGER_HANDLERS, Ledger(bus, LedgerConfig()))


@pytest.fixture
def borrows() -> LendingConfig:
    return LENDS.model_copy(update={"borrow": True, "low_fraction": 0.2, "high_fraction": 0.4})


async def test_borrows_when_short_renews_and_returns(connect_bus: ConnectBus, borrows: LendingConfig) -> None:
    await make_ledger(connect_bus)
    debtor = Worker(await connect_bus("worker", "w0"), borrows)
    creditor = Worker(await connect_bus("worker", "w1"), LENDS)
    try:
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
    finally:
        await debtor.stop()
        await creditor.stop()


async def test_a_creditor_that_is_gone_takes_blocks_along_within_the_lease(
    connect_bus: ConnectBus, borrows: LendingConfig
) -> None:
    await make_ledger(connect_bus)
    debtor = Worker(await connect_bus("worker", "w0"), borrows)
    creditor = Worker(await connect_bus("worker", "w1"), LENDS)
    try:
        debtor.vault.pool.allocate(18)
        await until(lambda: debtor.lending.debts.borrowed_blocks == 4)
        used = debtor.lending.debts.take(4)
        await creditor.stop()
        await until(lambda: sorted(debtor.lost) == used)
        debtor.check()
    finally:
        await debtor.stop()
        await creditor.stop()


async def test_a_silent_debtors_blocks_come_back_even_if_the_engine_is_busy_then(
    connect_bus: ConnectBus, borrows: LendingConfig
) -> None:
    await make_ledger(connect_bus)
    debtor = Worker(await connect_bus("worker", "w0"), borrows)
    creditor = Worker(await connect_bus("worker", "w1"), LENDS)
    try:
        debtor.vault.pool.allocate(18)
        await until(lambda: creditor.vault.pool.withdrawn_blocks == 4)
        creditor.vault.overloaded = True
        await debtor.stop()
        await until(lambda: creditor.lending.grants.lent_blocks == 0)
        assert creditor.vault.pool.withdrawn_blocks == 4
        creditor.vault.overloaded = False
        await until(lambda: creditor.vault.pool.free_blocks == BLOCKS)
    finally:
        await debtor.stop()
        await creditor.stop()


async def test_a_new_life_of_a_debtor_ends_the_old_ones_grants(connect_bus: ConnectBus) -> None:
    creditor = Worker(await connect_bus("worker", "w1"), LendingConfig())
    client = await connect_bus("worker", "w0")

    async def borrow(incarnation: int, blocks: int) -> BorrowReply:
        question = BorrowBlocks(
            debtor_id="w0", debtor_incarnation=incarnation, request=1, blocks=blocks, fingerprint=b"f"
        )
        subject = subjects.worker_borrow("w1", "w0")
        return await client.request(subject, question, BorrowReply, deadline_s=5.0)

    try:
        while True:
            try:
                first = await borrow(1, 9)
                break
            except NoResponder:  # not attached yet
                await asyncio.sleep(0.02)
        assert first.grant is not None and len(first.grant.blocks) == 9
        second = await borrow(2, 9)
        assert second.grant is not None and len(second.grant.blocks) == 9, "the cap is 10"
        third = await borrow(3, 99)
        assert third.grant is not None and len(third.grant.blocks) == 10
        renewed = await client.request(
            subjects.worker_renew("w1", "w0"),
            renew("w0", first.grant.grant_id, creditor_incarnation=first.grant.creditor_incarnation),
            LeasesRenewed,
            deadline_s=5.0,
        )
        assert renewed.held == ()
        question = BorrowBlocks(debtor_id="w9", debtor_incarnation=1, request=1, blocks=1, fingerprint=b"g")
        subject = subjects.worker_borrow("w1", "w9")
        other = await client.request(subject, question, BorrowReply, deadline_s=5.0)
        assert other.refusal is Refusal.OTHER_KV
        creditor.check()
    finally:
        await creditor.stop()


async def test_a_busy_engine_hears_of_lost_blocks_later_and_nothing_ends() -> None:
    """A lease that runs out while the engine's thread takes no more commands ended the worker once."""
    told: list[int] = []
    now_s, has_room = 0.0, False

    def on_lost(logical: Sequence[int]) -> None:
        if not has_room:
            raise Overloaded("as told")
        told.extend(logical)

    owner = Owner("w0", 1, BLOCKS, 16, b"f")
    nowhere: Any = None
    lending = Lending(nowhere, LENDS, owner, PlainVault(), on_lost=on_lost, clock=lambda: now_s)
    lost = lending.debts.on_granted(grant("c", 1, 2), 0.0)
    now_s = 10.0
    await lending.tick()
    lending.on_creditor_failed("nobody")
    assert told == [] and lending.debts.borrowed_blocks == 0
    has_room = True
    await lending.tick()
    await lending.tick()
    assert told == lost, "once"
