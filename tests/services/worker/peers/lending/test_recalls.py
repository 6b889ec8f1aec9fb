"""Settlements and recalls on the event loop: calls to the engine's side, and owners of the memory."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from services.worker.kv.core.block_pool import BlockPool
from services.worker.peers.lending.core.borrowing import CreditorPressure
from services.worker.peers.lending.core.debts import Debts, Repayment
from services.worker.peers.lending.core.grants import Grants, Terms
from services.worker.peers.lending.recalls import Recalls
from services.worker.peers.lending.stock import Stock
from shared.errors import CreditorLost
from shared.messages.lending import BlocksReturned, KvTier, Settle, SettlePhase
from tests.services.worker.peers.lending.builders import borrow, grant, open_door

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
