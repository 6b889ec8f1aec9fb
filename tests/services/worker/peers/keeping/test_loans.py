"""A prefix cache that borrows host memory, with a real bus, ledger, lender, links and engine."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import cast

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from services.ledger.config import LedgerConfig
from services.ledger.service import HANDLERS as LEDGER_HANDLERS
from services.ledger.service import Ledger
from services.worker.core.steps import StepCore
from services.worker.door import Door
from services.worker.kv.core.settings import PrefixCacheConfig
from services.worker.kv.tiers.records import Records
from services.worker.peers.attention.creditor import LentGrants
from services.worker.peers.keeping import loans as loans_module
from services.worker.peers.keeping.keeper import Keeper
from services.worker.peers.keeping.loans import CacheLoans
from services.worker.peers.keeping.ways import PeerWays
from services.worker.peers.lending.core.grants import Freed
from services.worker.peers.lending.core.interfaces import Owner
from services.worker.peers.lending.core.settings import LendingConfig
from services.worker.peers.lending.service import Lending
from services.worker.peers.transport.base import Peer, PeerLink
from services.worker.peers.transport.plane import PeerAddress, Plane
from services.worker.peers.transport.tcp import TcpTransport
from shared import subjects
from shared.bus import Bus
from shared.clock import monotonic_s
from shared.messages.lending import KvTier
from shared.messages.reports import Capacity
from tests.conftest import ConnectBus
from tests.patience import until
from tests.services.worker.peers.lending.builders import BLOCKS, PlainVault, borrow
from tests.services.worker.prefix_rig import BLOCK_TOKENS, PrefixRig, make_engine
from tests.shared.messages.builders import worker_report

LENDING = LendingConfig(lease_s=1.0, grace_s=0.1, rest_s=0.05)
HOST_BLOCKS = 64
PROMPTS = [[seed + 1, *range(1, 17), seed % 3] for seed in range(10)]
"""Four full blocks each, and their answers: three times the device and host memory."""


class Lender:
    """A worker that lends host memory, with heartbeats."""

    def __init__(self, bus: Bus, fingerprint: bytes, record_bytes: int) -> None:
        self.bus = bus
        self.fingerprint = fingerprint
        self.loop = asyncio.get_running_loop()
        blocks = BLOCKS, BLOCKS, BLOCK_TOKENS
        owner = Owner(bus.instance, bus.incarnation, *blocks, fingerprint, host_blocks=HOST_BLOCKS)
        self.lending = Lending(bus, LENDING, owner, PlainVault())
        self.plane = Plane(Peer(bus.instance, bus.incarnation), "here", [TcpTransport()])
        self.rows = np.zeros((HOST_BLOCKS, record_bytes), dtype=np.uint8)
        lent = LentGrants(
            self.lending.grants,
            self.lending.table,
            self.free,
        )
        for kind, receiver in Keeper(Records([(self.rows,)]), lent).receivers.items():
            self.plane.desk.serve(kind, receiver)
        self.plane.open()
        self.task = asyncio.create_task(self.serve())

    def free(self, freed: Freed) -> None:
        """Called on a link's thread."""
        self.loop.call_soon_threadsafe(self.lending.free_later, freed)

    async def serve(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.lending.serve())
            tasks.create_task(self.beat())

    async def beat(self) -> None:
        for seq in itertools.count(1):
            capacity = Capacity(total_blocks=BLOCKS, free_blocks=BLOCKS)
            heard = worker_report(
                self.bus.instance, incarnation=self.bus.incarnation, seq=seq, fingerprint=self.fingerprint
            )
            told = msgspec.structs.replace(heard, **self.lending.section(capacity))
            await self.bus.publish(subjects.worker_reported(self.bus.instance), told)
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Stop heartbeats and handlers."""
        self.task.cancel()
        await asyncio.wait([self.task])


class Borrower:
    """An engine with a small cache. The event loop's thread runs the engine too."""

    def __init__(self, bus: Bus, lender: Lender | None, rig: PrefixRig) -> None:
        self.bus, self.rig, self.lender = bus, rig, lender
        store = rig.store
        assert store is not None and store.peers is not None and rig.prefixes is not None
        self.store, self.tier, self.prefixes = store, store.peers, rig.prefixes
        self.plane = Plane(Peer(bus.instance, bus.incarnation), "there", [TcpTransport()])
        self.door = Door(cast(StepCore, None), monotonic_s, lambda effects: None)
        self.loop = asyncio.get_running_loop()
        self.ways = PeerWays(self, self.loop, 2.0, self.on_failed)
        blocks = DEVICE, DEVICE, BLOCK_TOKENS
        owner = Owner(bus.instance, bus.incarnation, *blocks, store.fingerprint)
        parts = self.store, self.tier, self.door, self.ways
        self.loans = CacheLoans(bus, LENDING, owner, *parts, itertools.count(1))
        self.tasks = [asyncio.create_task(self.loans.serve()), asyncio.create_task(self.pump())]

    async def dial(self, worker_id: str, incarnation: int) -> PeerLink:
        assert self.lender is not None
        desk, addresses = self.lender.plane.desk, self.lender.plane.addresses

        async def issue() -> bytes:
            return desk.issue(self.plane.own, valid_for_s=5.0)

        to = PeerAddress(Peer(worker_id, incarnation), "here", addresses)
        return await self.plane.connect(to, issue, deadline_s=2.0)

    def on_failed(self, creditor: tuple[str, int], grant_id: int | None) -> None:
        self.loop.call_soon_threadsafe(self.loans.on_failed, creditor, grant_id)

    async def pump(self) -> None:
        """Run the engine thread's work between two steps."""
        while True:
            self.door.run_waiting(0)
            self.store.transfers.settle()
            self.prefixes.work_ahead()
            await asyncio.sleep(0.005)

    async def serve(self) -> list[list[int]]:
        """Return answers one by one, with pauses for background work."""
        answers = []
        for prompt in PROMPTS:
            answers += self.rig.serve([prompt])
            await asyncio.sleep(0.05)
        self.check()
        return answers

    def check(self) -> None:
        self.loans.table.check_integrity()
        self.loans.debts.check_integrity()
        held = [block for held in self.rig.table._held.values() for block in held.blocks]
        self.store.cache.check_integrity(held)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        self.loans.close()
        await asyncio.to_thread(self.plane.close)
        assert self.store.close(5.0)


DEVICE = 12
SMALL = PrefixCacheConfig(host_mb=0, host_blocks=8, peer_blocks=HOST_BLOCKS, shadow_share=0.0, swap_share=0.0)


@pytest_asyncio.fixture
async def borrower(connect_bus: ConnectBus) -> AsyncIterator[Borrower]:
    ledger = await connect_bus("ledger", "ledger-0")
    await ledger.attach(LEDGER_HANDLERS, Ledger(ledger, LedgerConfig()))
    rig = PrefixRig(make_engine(DEVICE), SMALL)
    assert rig.store is not None
    lender = Lender(await connect_bus("worker", "w1"), rig.store.fingerprint, rig.store.record_bytes)
    made = Borrower(await connect_bus("worker", "w0"), lender, rig)
    yield made
    await made.stop()
    await lender.stop()
    await asyncio.to_thread(lender.plane.close)


def expected() -> list[list[int]]:
    """Return the answer without a cache."""
    rig = PrefixRig(make_engine(DEVICE), None)
    return [answer for prompt in PROMPTS for answer in rig.serve([prompt])]


async def filled(borrower: Borrower) -> list[list[int]]:
    answers = await borrower.serve()
    await until(lambda: borrower.loans.debts.borrowed_blocks > 0)
    answers = await borrower.serve()
    await until(lambda: borrower.store.cache.peers.slots.used > 0)
    return answers


async def test_borrowed_renewed_and_read_with_the_same_answers(borrower: Borrower) -> None:
    assert await filled(borrower) == expected()
    assert borrower.lender is not None
    lending = borrower.lender.lending
    assert await borrower.serve() == expected()
    assert borrower.store.cache.counts["hits_peer"] > 0
    await asyncio.sleep(1.5 * LENDING.lease_s)
    owed = borrower.loans.debts.borrowed_blocks
    assert owed == lending.grants.lent_blocks == lending.grants.yielding_blocks(KvTier.HOST) > 0
    assert borrower.loans.section() == {"w1": owed} == {"w1": lending.table.lent_to(KvTier.HOST)["w0"]}
    assert not borrower.store.cache.counts["lost_peer"]
    lending.grants.check_integrity()


async def test_another_workers_sequence_takes_the_memory(borrower: Borrower) -> None:
    await filled(borrower)
    assert borrower.lender is not None
    lending = borrower.lender.lending
    asked = borrow("w9", blocks=HOST_BLOCKS, tier=KvTier.HOST, fingerprint=borrower.store.fingerprint)
    granted = await lending.borrow(asked)
    assert granted.grant is not None and len(granted.grant.blocks) > HOST_BLOCKS // 2
    await until(lambda: borrower.store.cache.counts["lost_peer"] > 0)
    assert await borrower.serve() == expected()
    lending.grants.check_integrity()


async def test_a_lender_that_falls_silent_is_a_miss(borrower: Borrower) -> None:
    await filled(borrower)
    assert borrower.lender is not None
    await borrower.lender.stop()
    await until(lambda: borrower.loans.debts.borrowed_blocks == 0)
    await until(lambda: borrower.store.cache.peers.slots.total == 0)
    assert borrower.loans.lost_blocks > 0
    assert await borrower.serve() == expected()


async def test_empty_slots_are_returned(borrower: Borrower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans_module, "_IDLE_S", 0.2)
    await filled(borrower)
    assert borrower.lender is not None
    lending, peers = borrower.lender.lending, borrower.store.cache.peers

    def owed() -> set[int]:
        return {lending.grants.lent_blocks, borrower.loans.debts.borrowed_blocks, peers.slots.total}

    # At one moment: a grant may still have been on its way when the others went back.
    await until(lambda: owed() == {peers.slots.used})
    borrower.check()
