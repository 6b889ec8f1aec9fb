"""Blocks in lent host memory over real links: unchanged, for the debtor only, during the loan."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import monotonic

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from services.worker.kv.tiers.records import RecordRow, Records
from services.worker.peers.attention.creditor import LentGrants
from services.worker.peers.keeping.keeper import KEEP, KEPT, Keeper, LentSlot
from services.worker.peers.keeping.ways import PeerWays, SlotPlace
from services.worker.peers.lending.core.grants import Freed, Grants, Terms
from services.worker.peers.lending.core.table import RBlockTable
from services.worker.peers.transport.base import Peer, PeerLink, bytes_of
from services.worker.peers.transport.plane import PeerAddress, Plane
from services.worker.peers.transport.tcp import TcpTransport
from shared.errors import InvalidMessage, KvasirError, NoResponder, StaleEpoch
from shared.messages.lending import KvTier
from tests.services.worker.peers.lending.builders import KV, borrow

SLOTS, BYTES = 6, 200_000
"""More than `INLINE_BYTES`."""


class Creditor:
    """Lends host memory on a plane of its own."""

    def __init__(self) -> None:
        self.plane = Plane(Peer("creditor", 1), "here", [TcpTransport()])
        self.rows = np.zeros((SLOTS, BYTES), dtype=np.uint8)
        self.table = RBlockTable("creditor", 4, SLOTS)
        terms = Terms(0, 60.0, 0.5, KV, most_host_blocks=SLOTS)
        self.grants = Grants(self.table, 1, terms, threading.RLock())
        self.freed: list[Freed] = []
        lent = LentGrants(self.grants, self.table, self.freed.append, lambda: 0.0)
        self.keeper = Keeper(Records([(self.rows,)]), lent)
        for kind, receiver in self.keeper.receivers.items():
            self.plane.desk.serve(kind, receiver)
        self.plane.open()

    def lend(self, *blocks: int, request: int = 1) -> list[SlotPlace]:
        asked = borrow("debtor", request=request, blocks=len(blocks), tier=KvTier.HOST)
        grant = self.grants.lend(msgspec.structs.replace(asked, for_cache=True), blocks, 0.0).grant
        assert grant is not None
        self.grants.check_integrity()
        return [
            SlotPlace(("creditor", 1), LentSlot(grant.grant_id, grant.generation, at)) for at in grant.blocks
        ]


@dataclass
class World:
    """One creditor, and the links of one debtor. `is_there`: the creditor can be dialled."""

    creditor: Creditor
    plane: Plane
    links: list[PeerLink] = field(default_factory=list)
    failed: list[tuple[tuple[str, int], int | None]] = field(default_factory=list)
    is_there: bool = True

    async def dial(self, worker_id: str, incarnation: int) -> PeerLink:
        if not self.is_there:
            raise NoResponder(f"{worker_id} is not there")
        desk = self.creditor.plane.desk

        async def issue() -> bytes:
            return desk.issue(self.plane.own, valid_for_s=5.0)

        to = PeerAddress(Peer(worker_id, incarnation), "here", self.creditor.plane.addresses)
        self.links.append(await self.plane.connect(to, issue, deadline_s=2.0))
        return self.links[-1]

    def note(self, creditor: tuple[str, int], grant_id: int | None) -> None:
        self.failed.append((creditor, grant_id))


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    creditor, plane = Creditor(), Plane(Peer("debtor", 1), "there", [TcpTransport()])
    made = World(creditor, plane)
    yield made
    for link in made.links:
        link.close()
    await asyncio.to_thread(plane.close)
    await asyncio.to_thread(creditor.plane.close)


@pytest_asyncio.fixture
async def ways(world: World) -> AsyncIterator[PeerWays]:
    made = PeerWays(world, asyncio.get_running_loop(), 2.0, world.note)
    yield made
    made.close()


def row_of(seed: int) -> RecordRow:
    return np.random.default_rng(seed).integers(0, 256, BYTES, dtype=np.uint8)


async def write(ways: PeerWays, number: int, row: RecordRow) -> bool:
    return await asyncio.to_thread(ways.write, number, row)


async def read(ways: PeerWays, number: int) -> RecordRow | None:
    row = np.zeros(BYTES, dtype=np.uint8)
    return row if await asyncio.to_thread(ways.read, number, row) else None


async def test_blocks_come_back_as_they_were_sent(world: World, ways: PeerWays) -> None:
    places = world.creditor.lend(2, 5)
    assert await ways.reach(places[0], BYTES) > 0, "timed with the first grant"
    assert await ways.reach(places[1], BYTES) == 0.0
    ways.admit(dict(enumerate(places)))
    assert await write(ways, 0, row_of(1)) and await write(ways, 1, row_of(2))
    assert np.array_equal(world.creditor.rows[2], row_of(1))
    for number in (0, 1):
        found = await read(ways, number)
        assert found is not None and np.array_equal(found, row_of(number + 1))
    assert len(world.links) == 2, "one for each thread that copies"
    assert not world.failed


async def test_only_the_debtor_accesses_its_lent_slots(world: World) -> None:
    (place,) = world.creditor.lend(2)
    link = await world.dial("creditor", 1)

    def ask(slot: LentSlot) -> None:
        row = np.zeros(BYTES, dtype=np.uint8)
        link.ask(KEPT, msgspec.msgpack.encode(slot), into=[bytes_of(row)], deadline_s=2.0)

    await asyncio.to_thread(ask, place.slot)
    for wrong in (LentSlot(1, 1, 3), LentSlot(2, 1, 2), LentSlot(1, 2, 2), LentSlot(1, 1, SLOTS)):
        with pytest.raises(StaleEpoch):
            await asyncio.to_thread(ask, wrong)
    for senseless in (LentSlot(1, 1, -1), LentSlot(1, 1, 1 << 40)):
        with pytest.raises(InvalidMessage):
            await asyncio.to_thread(ask, senseless)
    assert not world.creditor.freed
    world.creditor.grants.check_integrity()


async def test_a_block_of_another_size_is_refused(world: World) -> None:
    (place,) = world.creditor.lend(2)
    link = await world.dial("creditor", 1)
    header = msgspec.msgpack.encode(place.slot)
    with pytest.raises(InvalidMessage, match="where a block has"):
        await asyncio.to_thread(link.ask, KEEP, header, [bytes_of(bytes(BYTES - 1))], deadline_s=2.0)
    assert not world.creditor.rows.any()


async def test_an_ended_grant_loses_no_other_grant(world: World, ways: PeerWays) -> None:
    """A sequence needed the memory; the creditor itself is healthy."""
    first, second = world.creditor.lend(0), world.creditor.lend(1, 2, request=2)
    ways.admit(dict(enumerate([*first, *second])))
    assert await write(ways, 0, row_of(1)) and await write(ways, 1, row_of(2))
    (freed,) = world.creditor.grants.give_way(KvTier.HOST, 1)
    assert freed.blocks == (1, 2), "the last one first, and whole"
    assert await read(ways, 1) is None
    assert world.failed == [(("creditor", 1), second[0].slot.grant_id)]
    assert await read(ways, 2) is None and len(world.failed) == 1, "not asked for again"
    found = await read(ways, 0)
    assert found is not None and np.array_equal(found, row_of(1))


async def test_a_closed_link_is_dialled_again(world: World, ways: PeerWays) -> None:
    """The creditor closed a link that was idle for ten minutes."""
    ways.admit(dict(enumerate(world.creditor.lend(0))))
    assert await write(ways, 0, row_of(1))
    world.links[-1].close()
    assert await write(ways, 0, row_of(2))
    assert (len(world.links), world.failed) == (2, [])


async def test_a_lost_creditor_fails_once_for_all_its_slots(world: World, ways: PeerWays) -> None:
    ways.admit(dict(enumerate(world.creditor.lend(0, 1, 2))))
    assert await write(ways, 0, row_of(1))
    world.is_there = False
    assert await asyncio.to_thread(world.creditor.plane.close)
    assert await read(ways, 0) is None
    assert not await write(ways, 1, row_of(1))
    assert await read(ways, 2) is None
    assert world.failed == [(("creditor", 1), None)]


async def test_a_hanging_creditor_delays_one_copy_by_one_deadline(
    world: World,
) -> None:
    """A stopped process keeps its sockets open and does not answer."""
    ways = PeerWays(world, asyncio.get_running_loop(), 0.2, world.note)
    ways.admit(dict(enumerate(world.creditor.lend(0, 1))))
    with world.creditor.keeper.copying:
        began_s = monotonic()
        assert await read(ways, 0) is None
        assert await read(ways, 1) is None
        assert monotonic() - began_s < 2.0
    assert world.failed == [(("creditor", 1), None)]
    ways.close()


async def test_an_unreachable_creditor_lends_nothing(world: World, ways: PeerWays) -> None:
    (place,) = world.creditor.lend(0)
    world.is_there = False
    with pytest.raises(KvasirError):
        await ways.reach(place, BYTES)


async def test_after_close_nothing_is_sent_and_no_creditor_fails(world: World, ways: PeerWays) -> None:
    ways.admit(dict(enumerate(world.creditor.lend(0))))
    ways.close()
    assert await read(ways, 0) is None
    assert not world.failed and not world.links
