"""Blocks of a prefix cache in host memory that another worker lends, over real links."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from functools import cache
from time import monotonic
from typing import cast

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from services.ledger.config import LedgerConfig
from services.ledger.service import HANDLERS as LEDGER_HANDLERS
from services.ledger.service import Ledger
from services.worker.core.settings import LendingConfig, PrefixCacheConfig
from services.worker.core.steps import StepCore
from services.worker.door import Door
from services.worker.kv.tiers.records import RecordRow, Records
from services.worker.peers.attention.creditor import LentGrants
from services.worker.peers.keeping import loans as loans_module
from services.worker.peers.keeping.loans import KEEP, KEPT, CacheLoans, Keeper, LentSlot, PeerWays, SlotPlace
from services.worker.peers.lending.core.grants import Freed, Grants, Terms
from services.worker.peers.lending.debtor import Owner
from services.worker.peers.transport.base import Peer, bytes_of
from services.worker.peers.transport.plane import Plane
from services.worker.peers.transport.tcp import TcpTransport
from shared.bus import Bus
from shared.clock import monotonic_s
from shared.errors import InvalidMessage, KvasirError, StaleEpoch
from shared.messages.lending import KvTier
from tests.conftest import ConnectBus
from tests.patience import until
from tests.services.worker.peers.lending.builders import KV, LendingWorker, borrow
from tests.services.worker.peers.rig import Dialler
from tests.services.worker.prefix_rig import BLOCK_TOKENS, PrefixRig, make_engine

SLOTS, BYTES = 6, 200_000
"""More than `INLINE_BYTES`."""


def make_plane(name: str, incarnation: int) -> Plane:
    return Plane(Peer(name, incarnation), "here", [TcpTransport()])


class Creditor:
    """Lends host memory on a plane of its own."""

    def __init__(self) -> None:
        self.plane = make_plane("creditor", 1)
        self.rows = np.zeros((SLOTS, BYTES), dtype=np.uint8)
        terms = Terms(0, 60.0, 0.5, KV, most_host_blocks=SLOTS)
        self.grants = Grants("creditor", 1, terms, 4, SLOTS, threading.RLock())
        self.freed: list[Freed] = []
        self.keeper = Keeper(Records([(self.rows,)]), LentGrants(self.grants, self.freed.append, lambda: 0.0))
        self.plane.desk.serve(self.keeper.receivers)
        self.plane.open()

    def lend(self, *blocks: int, request: int = 1) -> list[SlotPlace]:
        asked = borrow("debtor", request=request, tier=KvTier.HOST, for_cache=True)
        grant = self.grants.lend(asked, blocks, 0.0).grant
        assert grant is not None
        return [SlotPlace(("creditor", 1), LentSlot(grant.grant_id, 1, at)) for at in grant.blocks]


class World:
    def __init__(self, answer_s: float = 2.0) -> None:
        self.creditor = Creditor()
        self.dialler = Dialler(make_plane("debtor", 1), {"creditor": self.creditor.plane})
        self.failed: list[tuple[tuple[str, int], int | None]] = []
        self.ways = PeerWays(
            self.dialler.registry, asyncio.get_running_loop(), answer_s, lambda *of: self.failed.append(of)
        )

    async def write(self, number: int, seed: int) -> bool:
        return await asyncio.to_thread(self.ways.write, number, row_of(seed))

    async def has(self, number: int, seed: int) -> bool:
        """Whether a slot can be read. It must have the row of this seed."""
        row = np.zeros(BYTES, dtype=np.uint8)
        is_read = await asyncio.to_thread(self.ways.read, number, row)
        assert not is_read or np.array_equal(row, row_of(seed))
        return is_read

    async def close(self) -> None:
        self.ways.close()
        await self.dialler.close()


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.close()


def row_of(seed: int) -> RecordRow:
    return np.random.default_rng(seed).integers(0, 256, BYTES, dtype=np.uint8)


async def test_blocks_come_back_as_they_were_sent(world: World) -> None:
    places = world.creditor.lend(2, 5)
    assert await world.ways.reach(places[0], BYTES) > 0, "timed with the first grant"
    assert await world.ways.reach(places[1], BYTES) == 0.0
    world.ways.admit(dict(enumerate(places)))
    assert await world.write(0, 1) and await world.write(1, 2)
    assert np.array_equal(world.creditor.rows[2], row_of(1))
    assert await world.has(0, 1) and await world.has(1, 2)
    assert len(world.dialler.links) == 2, "one for each thread that copies"
    assert not world.failed


async def test_only_the_debtor_accesses_its_lent_slots_with_whole_blocks(world: World) -> None:
    (place,) = world.creditor.lend(2)
    link = await world.dialler.dial("creditor", 1)

    async def ask(slot: LentSlot) -> None:
        into = [bytes_of(np.zeros(BYTES, dtype=np.uint8))]
        header = msgspec.msgpack.encode(slot)
        await asyncio.to_thread(link.ask, KEPT, header, into=into, deadline_s=2.0)

    await ask(place.slot)
    for wrong in (LentSlot(1, 1, 3), LentSlot(2, 1, 2), LentSlot(1, 2, 2), LentSlot(1, 1, SLOTS)):
        with pytest.raises(StaleEpoch):
            await ask(wrong)
    for senseless in (LentSlot(1, 1, -1), LentSlot(1, 1, 1 << 40)):
        with pytest.raises(InvalidMessage):
            await ask(senseless)
    header = msgspec.msgpack.encode(place.slot)
    with pytest.raises(InvalidMessage, match="where a block has"):
        await asyncio.to_thread(link.ask, KEEP, header, [bytes_of(bytes(BYTES - 1))], deadline_s=2.0)
    assert not world.creditor.freed and not world.creditor.rows.any()
    world.creditor.grants.check_integrity()


async def test_an_ended_grant_loses_no_other_grant(world: World) -> None:
    """A sequence needed the memory; the creditor itself is healthy."""
    first, second = world.creditor.lend(0), world.creditor.lend(1, 2, request=2)
    world.ways.admit(dict(enumerate([*first, *second])))
    assert await world.write(0, 1) and await world.write(1, 2)
    (freed,) = world.creditor.grants.give_way(1)
    assert freed.blocks == (1, 2), "the last one first, and whole"
    assert not await world.has(1, 2)
    assert world.failed == [(("creditor", 1), second[0].slot.grant_id)]
    assert not await world.has(2, 2) and len(world.failed) == 1, "not asked for again"
    assert await world.has(0, 1)


async def test_a_closed_link_is_dialled_again(world: World) -> None:
    """The creditor closed a link that was idle for ten minutes."""
    world.ways.admit(dict(enumerate(world.creditor.lend(0))))
    assert await world.write(0, 1)
    world.dialler.links[-1].close()
    assert await world.write(0, 2)
    assert (len(world.dialler.links), world.failed) == (2, [])


async def test_a_lost_creditor_fails_once_for_all_its_slots(world: World) -> None:
    (place, *_) = places = world.creditor.lend(0, 1, 2)
    world.ways.admit(dict(enumerate(places)))
    assert await world.write(0, 1)
    world.dialler.is_away = True
    assert await asyncio.to_thread(world.creditor.plane.close)
    assert not await world.has(0, 1)
    assert not await world.write(1, 1) and not await world.has(2, 1)
    assert world.failed == [(("creditor", 1), None)]
    with pytest.raises(KvasirError):
        await world.ways.reach(place, BYTES)


async def test_a_hanging_creditor_delays_one_copy_by_one_deadline() -> None:
    """A stopped process keeps its sockets open and does not answer."""
    world = World(answer_s=0.2)
    world.ways.admit(dict(enumerate(world.creditor.lend(0, 1))))
    with world.creditor.keeper.copying:
        began_s = monotonic()
        assert not await world.has(0, 1) and not await world.has(1, 1)
        assert monotonic() - began_s < 2.0
    assert world.failed == [(("creditor", 1), None)]
    await world.close()


async def test_after_close_nothing_is_sent_and_no_creditor_fails(world: World) -> None:
    world.ways.admit(dict(enumerate(world.creditor.lend(0))))
    world.ways.close()
    assert not await world.has(0, 1)
    assert not world.failed and not world.dialler.links


# --- loans of a cache, with a real bus, ledger, lender and engine

LENDING = LendingConfig(lease_s=2.0, grace_s=0.1, rest_s=0.05)
HOST_BLOCKS, DEVICE = 64, 12
SMALL = PrefixCacheConfig(peer_blocks=HOST_BLOCKS, shadow_share=0.0, swap_share=0.0)
PROMPTS = [[seed + 1, *range(1, 17), seed % 3] for seed in range(10)]
"""Four full blocks each, and their answers: three times the device and host memory."""


class Borrower:
    """An engine with a small cache, and a lender. The event loop's thread runs the engine too."""

    def __init__(self, bus: Bus, lending_bus: Bus) -> None:
        self.rig = PrefixRig(make_engine(DEVICE), SMALL, host_blocks=8)
        store = self.rig.store
        assert store is not None and store.peers is not None and self.rig.prefixes is not None
        self.store, self.prefixes = store, self.rig.prefixes
        self.loop = asyncio.get_running_loop()
        self.lender = LendingWorker(
            lending_bus, LENDING, host_blocks=HOST_BLOCKS, fingerprint=store.fingerprint
        )
        there = make_plane(lending_bus.instance, lending_bus.incarnation)
        rows = np.zeros((HOST_BLOCKS, store.record_bytes), dtype=np.uint8)
        keeper = Keeper(Records([(rows,)]), LentGrants(self.lender.grants, self.free))
        there.desk.serve(keeper.receivers)
        there.open()
        self.lender.start()
        self.door = Door(cast(StepCore, None), monotonic_s, lambda effects: None)
        self.dialler = Dialler(make_plane(bus.instance, bus.incarnation), {lending_bus.instance: there})
        ways = PeerWays(self.dialler.registry, self.loop, 2.0, self.on_failed)
        owner = Owner(bus.instance, bus.incarnation, DEVICE, DEVICE, BLOCK_TOKENS, store.fingerprint)
        parts = store, store.peers, self.door, ways
        self.loans = CacheLoans(bus, LENDING, owner, *parts, itertools.count(1), monotonic_s)
        self.tasks = [asyncio.create_task(self.loans.serve()), asyncio.create_task(self.pump())]

    def free(self, freed: Freed) -> None:
        """Called on a link's thread."""
        self.loop.call_soon_threadsafe(self.lender.lending.free_later, freed)

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

    async def fill(self) -> list[list[int]]:
        await self.serve()
        await until(lambda: self.loans.debts.borrowed_blocks > 0)
        answers = await self.serve()
        await until(lambda: self.store.cache.peers.slots.used > 0)
        return answers

    def check(self) -> None:
        self.loans.debts.check_integrity()
        self.lender.check()
        held = [block for held in self.rig.table._held.values() for block in held.blocks]
        self.store.cache.check_integrity(held)

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        self.loans.close()
        await self.lender.stop()
        await self.dialler.close()
        assert self.store.close(5.0)


@pytest_asyncio.fixture
async def borrower(connect_bus: ConnectBus) -> AsyncIterator[Borrower]:
    ledger = await connect_bus("ledger", "ledger-0")
    await ledger.attach(LEDGER_HANDLERS, Ledger(ledger, LedgerConfig()))
    expected()
    made = Borrower(await connect_bus("worker", "w0"), await connect_bus("worker", "w1"))
    yield made
    await made.stop()


@cache
def expected() -> list[list[int]]:
    """Return the answers without a cache. Computed before any lease runs."""
    rig = PrefixRig(make_engine(DEVICE), None)
    return [answer for prompt in PROMPTS for answer in rig.serve([prompt])]


async def test_borrowed_renewed_and_read_with_the_same_answers(borrower: Borrower) -> None:
    assert await borrower.fill() == expected()
    assert await borrower.serve() == expected()
    assert borrower.store.cache.counts["hits_peer"] > 0
    first_ends_s = max(loan.ends_s for loan in borrower.loans.debts.grants.values())
    await until(lambda: monotonic_s() > first_ends_s)
    owed, grants = borrower.loans.debts.borrowed_blocks, borrower.lender.grants
    assert owed == grants.lent_blocks() == grants.yielding_blocks() > 0
    assert borrower.loans.section() == {"w1": owed} == {"w1": grants.lent_to(KvTier.HOST)["w0"]}
    assert not borrower.store.cache.counts["lost_peer"]


async def test_another_workers_sequence_takes_the_memory(borrower: Borrower) -> None:
    await borrower.fill()
    asked = borrow("w9", blocks=HOST_BLOCKS, tier=KvTier.HOST, fingerprint=borrower.store.fingerprint)
    granted = await borrower.lender.lending.borrow(asked)
    assert granted.grant is not None and len(granted.grant.blocks) > HOST_BLOCKS // 2
    await until(lambda: borrower.store.cache.counts["lost_peer"] > 0)
    assert await borrower.serve() == expected()


async def test_empty_slots_are_returned(borrower: Borrower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans_module, "_IDLE_S", 0.2)
    await borrower.fill()
    grants, peers = borrower.lender.grants, borrower.store.cache.peers

    def owed() -> set[int]:
        return {grants.lent_blocks(), borrower.loans.debts.borrowed_blocks, peers.slots.total}

    # At one moment: a grant may still have been on its way when the others went back.
    await until(lambda: owed() == {peers.slots.used})
    borrower.check()
