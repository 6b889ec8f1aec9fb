"""Borrowed blocks from grant to use, and home or lost between two steps, with a real creditor."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from services.worker import door
from services.worker.door import Door
from services.worker.engine.contract import Row
from services.worker.engine_thread import Runner
from services.worker.kv.core.block_manager import Tiers
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.kv.core.load_policy import CostGate
from services.worker.kv.core.prefix_cache import PrefixCache
from services.worker.kv.core.tier_copier import BlockMover
from services.worker.kv.tiers.records import CRC, Records
from services.worker.kv.transfers import TransferEngine
from services.worker.peers.attention.borrower import Borrower, Homecoming
from services.worker.peers.attention.debtor import AttendingDebtor
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.lending.core.debts import GrantKey
from services.worker.peers.migration.source import BLOCKS, BlockSource, GivenBlocks, WantedBlocks
from services.worker.peers.transport.base import Peer
from services.worker.peers.transport.link import PeerLink
from shared.blocks import chain, root
from shared.clock import monotonic_s
from shared.errors import CreditorLost, NoResponder, Overloaded
from shared.messages.base import decode
from shared.messages.lending import Grant, KvTier
from shared.messages.sequence import pack_tokens
from tests.services.worker.builders import core_of
from tests.services.worker.peers.attention.rig import (
    BLOCK_TOKENS,
    DEBTOR,
    GRANT,
    HOST_GRANT,
    Lender,
    lender,
    make_debtor,
    make_engine,
)
from tests.services.worker.peers.lending.builders import grant

OWN = 2


class Dialler:
    """Dials one lender under any name."""

    def __init__(self, owner: Lender) -> None:
        self.owner = owner
        self.dialled = 0
        self.is_away = False

    async def dial(self, worker_id: str, incarnation: int) -> PeerLink:
        if self.is_away:
            raise NoResponder("as told")
        self.dialled += 1
        return self.owner.dial()


class World:
    """A borrower with an engine's thread."""

    def __init__(self, owner: Lender, engine: Any) -> None:
        self.owner = owner
        self.name = owner.desk.own.worker_id
        self.plane = Dialler(owner)
        self.engine = engine
        self.failed: list[str] = []
        self.pool = ExtendedPool(BlockPool(OWN, BLOCK_TOKENS), OWN)
        self.debtor = AttendingDebtor(
            engine.attention, q_heads=4, own_blocks=OWN, block_tokens=BLOCK_TOKENS, staging_blocks=2
        )
        self.door = Door(core_of(self.pool), monotonic_s, lambda _: None)
        registry: Any = self.plane
        self.transfers = TransferEngine(lambda: None)
        parts = self.door, registry, engine.pools, self.transfers, self.failed.append
        self.borrower = Borrower(self.debtor, self.pool, *parts)
        self.runner = Runner(self.door, engine, on_broken=lambda _: None)

    def grant(self, blocks: tuple[int, ...], ref: GrantRef = GRANT) -> Grant:
        tier = KvTier.HOST if ref == HOST_GRANT else KvTier.DEVICE
        return grant(
            self.name, *blocks, grant_id=ref.grant_id, generation=ref.generation, tier=tier, lease_s=5.0
        )

    def admit(self, blocks: tuple[int, ...], ids: list[int], ref: GrantRef = GRANT) -> bool:
        """Borrow these blocks of the lender as `ids`."""
        return asyncio.run(self.borrower.admit(self.grant(blocks, ref), ids))

    def step(self, blocks: list[int], first_token: int = 0) -> None:
        """Run one step that fills the blocks."""
        tokens = range(first_token, first_token + len(blocks) * BLOCK_TOKENS)
        assert self.engine.step([Row(list(tokens), 0, blocks, None)]) == [None]

    def bytes_of(self, engine: Any, block: int) -> bytes:
        row = np.zeros(Records(engine.pools).record_bytes, dtype=np.uint8)
        Records(engine.pools).read([block], [row])
        return row.tobytes()

    def recall_one(self, block: int) -> bytes:
        """Bring a block home; return its bytes there."""
        assert asyncio.run(self.borrower.recall([block], 1, keep_blocks=0)) == [block]
        free = self.pool.own.allocate(self.pool.own.free_blocks)
        (home,) = {0, 1} - set(free)
        return self.bytes_of(self.engine, home)

    def use(self, borrowed: int) -> list[int]:
        """Let a sequence fill all own blocks and so many others; return them. The own ones are free then."""
        blocks = self.pool.allocate(OWN + borrowed)
        self.step(blocks)
        self.pool.release(blocks[:OWN])
        return blocks

    def place_at_home(self) -> int:
        """Let a sequence use all blocks, then free one own block for a borrowed one."""
        blocks = self.pool.allocate(self.pool.free_blocks)
        self.pool.own.release(blocks[:OWN])
        (home,) = self.pool.own.allocate(1)
        self.pool.own.withdraw([home])
        return home


@pytest.fixture
def here(llama: Any) -> Iterator[World]:
    with lender(llama, 6, host_blocks=3) as owner:
        made = World(owner, make_engine(llama, OWN))
        made.runner.start()
        yield made
        assert made.runner.stop(5.0)
        assert made.transfers.halt(5.0)
        made.borrower.close()


def test_borrowed_blocks_are_used_and_retired(here: World) -> None:
    assert here.admit((4, 1, 3), [10, 11, 12]) and here.admit((0,), [13])
    assert here.plane.dialled == 1
    assert (here.pool.borrowed_blocks, here.pool.total_blocks) == (4, OWN + 4)
    blocks = here.pool.allocate(4)
    assert blocks[OWN:] == [10, 11]
    here.step(blocks)
    assert here.owner.engine.pools[0][0][4].any() and not here.owner.engine.pools[0][0][5].any()
    assert asyncio.run(here.borrower.retire(5)) == [13, 12]
    here.pool.release(blocks)
    assert sorted(asyncio.run(here.borrower.retire(5))) == [10, 11]
    assert here.pool.borrowed_blocks == 0


def test_memory_of_both_tiers_of_a_creditor_is_lost_together(here: World) -> None:
    assert here.admit((4,), [10]) and here.admit((2, 0), [11, 12], HOST_GRANT)
    assert here.plane.dialled == 2, "each tier has a link of its own"
    blocks = here.pool.allocate(OWN + 3)
    here.step(blocks)
    assert here.owner.host is not None
    k_pool, _ = here.owner.host.pools[0]
    assert k_pool[2].any() and k_pool[0].any() and not k_pool[1].any()
    lost = CreditorLost("as told", creditor_id=here.name)
    assert here.borrower.lose_creditor(lost) == {10, 11, 12} and here.failed == [here.name]
    assert here.borrower.lose_creditor(lost) == set()
    here.plane.is_away = True
    assert not here.admit((4,), [20])
    here.plane.is_away = False
    assert here.admit((4,), [21]) and here.plane.dialled == 3


def test_an_ended_lease_loses_its_blocks(here: World) -> None:
    assert here.admit((4, 1), [10, 11])
    here.borrower.lose([10])
    assert here.door.ask(lambda core, now_s: here.pool.borrowed_blocks).result(5.0) == 1
    with pytest.raises(ValueError, match="nobody holds block 10"):
        here.step([0, 1, 10])
    here.step([0, 1, 11])


def test_blocks_come_home_from_the_event_loop(here: World) -> None:
    assert here.admit((4, 1, 3), [10, 11, 12])
    here.use(2)
    assert asyncio.run(here.borrower.recall([10, 11, 12], 9, keep_blocks=2)) == [], "that much stays free"
    assert asyncio.run(here.borrower.recall([10, 11, 12], 1, keep_blocks=0)) == [10]
    assert asyncio.run(here.borrower.set_apart([11, 12], 9)) == [11, 12]
    home = here.pool.own.allocate(1)
    here.pool.own.withdraw(home)
    pairs = [(11, home[0])]
    assert asyncio.run(here.borrower.copy_home(pairs))
    assert asyncio.run(here.borrower.swap_home(pairs)) == []
    here.borrower.rejoin([12])
    assert here.door.ask(lambda core, now_s: here.pool.borrowed_free_blocks).result(5.0) == 1
    assert here.pool.borrowed_blocks == 1


def test_a_creditor_that_fails_while_blocks_come_home(here: World) -> None:
    assert here.admit((4, 1), [10, 11])
    home = here.place_at_home()
    here.owner.book.grants.on_incarnation(DEBTOR.worker_id, 8)  # Its grants were ended.
    assert not asyncio.run(here.borrower.copy_home([(10, home)]))
    assert here.failed == [here.name]
    assert here.pool.borrowed_blocks == 0, "all of that creditor is lost"
    assert asyncio.run(here.borrower.swap_home([(10, home)])) == [home], "it is not needed"


@pytest.mark.parametrize("lacking", ["a link", "a turn"])
def test_a_failed_copy_does_not_blame_the_creditor_and_the_swap_fetches_it(here: World, lacking: str) -> None:
    """The swap fetches blocks that were not copied, over the link that steps use."""
    assert here.admit((4,), [10])
    here.use(1)
    if lacking == "a link":
        here.plane.is_away = True
    else:
        assert here.transfers.halt(5.0)
    home = here.recall_one(10)
    assert any(home) and home == here.bytes_of(here.owner.engine, 4)
    assert here.failed == [] and here.pool.borrowed_blocks == 0


def test_steps_go_on_while_blocks_come_home(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block written during the copy is fetched again, so the copy equals the original."""
    assert here.admit((4,), [10])
    blocks = here.use(1)
    fetches, fetch = 0, AttendingDebtor.fetch

    def fetch_and_step(self: AttendingDebtor, *given: Any) -> None:
        nonlocal fetches
        fetch(self, *given)
        fetches += 1
        if fetches == 1:  # The second is between two steps.
            here.door.ask(lambda core, now_s: here.step(blocks, first_token=1)).result(5.0)

    monkeypatch.setattr(AttendingDebtor, "fetch", fetch_and_step)
    assert here.recall_one(10) == here.bytes_of(here.owner.engine, 4) and fetches == 2


def test_messages_name_the_latest_known_generation(here: World) -> None:
    """Messages always named generation 0."""
    assert here.admit((4, 1), [10, 11])
    blocks = here.pool.allocate(OWN + 1)
    here.step(blocks)
    asyncio.run(here.borrower.retire(1))
    here.owner.book.give_back(GRANT.grant_id, 0)
    here.borrower.rename(GrantKey(here.name, 1, GRANT.grant_id), 2)
    here.borrower.rename(GrantKey(here.name, 1, GRANT.grant_id), 1)  # late
    here.borrower.rename(GrantKey(here.name, 2, GRANT.grant_id), 9)  # another life's
    here.door.ask(lambda core, now_s: here.step(blocks)).result(5.0)
    assert here.failed == [] and here.debtor._lendings[1].grants == (GrantRef(GRANT.grant_id, 2),)


def test_an_agreed_swap_is_never_refused(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused swap left sequences with blocks that were already being returned."""
    assert here.admit((4,), [10])
    home = here.place_at_home()
    monkeypatch.setattr(door, "_MAX_WAITING", 0)
    with pytest.raises(Overloaded):
        asyncio.run(here.borrower.copy_home([(10, home)]))
    here.pool.set_apart([10], 1)
    assert asyncio.run(here.borrower.swap_home([(10, home)])) == []
    assert here.pool.borrowed_blocks == 0


def test_loans_begin_and_end_while_the_engines_queue_is_full(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that ran out while the engine's queue was full stopped the worker."""
    monkeypatch.setattr(door, "_MAX_WAITING", 0)
    assert here.admit((4, 1, 3), [10, 11, 12])
    assert asyncio.run(here.borrower.retire(1)) == [12]
    here.borrower.lose([10, 11])
    assert asyncio.run(here.borrower.retire(3)) == []
    assert here.pool.borrowed_blocks == 0


def test_a_cancelled_caller_does_not_interrupt_a_loan(here: World) -> None:
    """The blocks would belong to no sequence, and their lease would be renewed forever."""

    async def give_up() -> None:
        admitting = asyncio.create_task(here.borrower.admit(here.grant((4, 1)), [10, 11]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        admitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await admitting

    long_step = threading.Event()
    here.door.give(lambda core, now_s: long_step.wait(5.0))
    asyncio.run(give_up())
    long_step.set()
    borrowed = here.door.give(lambda core, now_s: here.pool.borrowed_blocks)
    assert borrowed.result(5.0) == 2


def test_borrowed_blocks_are_given_to_the_worker_that_takes_the_sequence(here: World) -> None:
    """Own blocks come first, then both tiers of a creditor, each with its bytes."""
    assert here.admit((4,), [10]) and here.admit((2, 0), [11, 12], HOST_GRANT)
    blocks = here.pool.allocate(OWN + 3)
    here.step(blocks)
    cache = PrefixCache(BlockPool(OWN, BLOCK_TOKENS), Tiers(), cast(BlockMover, None), CostGate())
    cache.allocate(OWN)
    names = chain(root(b"f"), pack_tokens(range(5 * BLOCK_TOKENS)), BLOCK_TOKENS)
    for block, name, parent in zip(blocks, names, [None, *names], strict=False):
        assert cache.publish(block, name, parent)

    records = Records(here.engine.pools)
    store: Any = SimpleNamespace(cache=cache, transfers=here.transfers, fingerprint=b"f", sums=CRC)
    source = BlockSource(here.door, store, records, here.borrower)
    wanted = msgspec.msgpack.encode(WantedBlocks(b"f", tuple(names)))
    reply = source.receivers[BLOCKS](Peer("another", 1), wanted, []).commit()

    assert here.owner.host is not None
    own, lent, host = records, Records(here.owner.engine.pools), Records(here.owner.host.pools)
    places = [(own, blocks[0]), (own, blocks[1]), (lent, 4), (host, 2), (host, 0)]
    rows = np.zeros((5, records.record_bytes), dtype=np.uint8)
    for row, (there, block) in zip(rows, places, strict=True):
        there.read([block], [row])
    assert [bytes(buffer) for buffer in reply.buffers] == [row.tobytes() for row in rows]
    assert len(decode(reply.header, GivenBlocks).checksums) == 5 and all(row.any() for row in rows)


def test_blocks_of_a_failed_creditor_are_lost_and_not_given(here: World) -> None:
    assert here.admit((4, 1), [10, 11])
    blocks = here.pool.allocate(OWN + 2)
    here.step(blocks)
    here.owner.listener.close(5.0)
    rows = np.zeros((2, Records(here.engine.pools).record_bytes), dtype=np.uint8)
    read = here.door.ask(lambda core, now_s: here.borrower.read(core, now_s, [10, 11], rows))
    assert read.result(10.0) == 0 and here.failed == [here.name]
    assert here.pool.borrowed_blocks == 0


HOME_BLOCKS = 5


def test_a_dead_creditor_does_not_pin_blocks_of_another(llama: Any) -> None:
    """Blocks of the living creditor stayed set apart: never free again, and renewed forever."""
    with lender(llama, 2) as lives, lender(llama, 2) as dies:
        engine = make_engine(llama, HOME_BLOCKS)
        debtor = make_debtor(engine, [lives, dies], 2)
        pool = ExtendedPool(BlockPool(HOME_BLOCKS, BLOCK_TOKENS), HOME_BLOCKS)
        pool.admit(range(HOME_BLOCKS, HOME_BLOCKS + 4))
        rest, there = pool.own.allocate(HOME_BLOCKS), pool.allocate(4)
        pool.own.release(rest)
        forgotten: list[int] = []
        dies.listener.close(5.0)
        with pytest.raises(CreditorLost):
            coming = Homecoming(debtor, pool, forgotten.extend)
            coming.end_recall(coming.begin_recall(there, 9, keep_blocks=0))
        pool.lose(there[2:])
        pool.release(there)
        assert sorted(pool.retire(9)) == there[:2], "free, so that they can be returned"
        assert pool.own.free_blocks == HOME_BLOCKS and forgotten == []
        debtor.close()
