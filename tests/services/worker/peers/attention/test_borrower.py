"""From a grant to blocks that sequences get, and back, or lost; against a real creditor.

Blocks come home between two steps of a sequence, and its tokens are what they would have been.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from services.worker import door
from services.worker.core.reports import Identity
from services.worker.core.sampling import SamplePoint
from services.worker.core.sequences import SequenceTable
from services.worker.core.steps import StepCore
from services.worker.engine.engine import Row, TorchEngine
from services.worker.engine_thread import Runner
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.peers.attention.borrower import Borrower, Homecoming
from services.worker.peers.attention.debtor import Debtor
from services.worker.peers.attention.messages import GrantRef
from services.worker.peers.lending.core.table import GrantKey
from services.worker.peers.transport.base import PeerLink
from shared.clock import monotonic_s
from shared.errors import CreditorLost, NoResponder, Overloaded
from shared.messages.lending import Grant, KvTier
from shared.messages.sequence import Sampling
from tests.services.worker.builders import LIMITS
from tests.services.worker.conftest import ModelFactory
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

OWN = 2


class Dialler:
    """Dials one lender, which answers to any name."""

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
    """A borrower with its engine's thread."""

    def __init__(self, owner: Lender, engine: Any) -> None:
        self.owner = owner
        self.plane = Dialler(owner)
        self.engine = engine
        self.failed: list[str] = []
        self.pool = ExtendedPool(BlockPool(OWN, BLOCK_TOKENS), OWN)
        self.debtor = Debtor(
            engine.attention, q_heads=4, own_blocks=OWN, block_tokens=BLOCK_TOKENS, staging_blocks=2
        )
        plane: Any = self.plane
        self.borrower = Borrower(self.debtor, self.pool, plane, self.failed.append)
        core = StepCore(Identity("w", 1, "m", 64, "h"), SequenceTable(self.pool, LIMITS))
        self.runner = Runner(core, engine, monotonic_s, deliver=lambda _: None, on_broken=lambda _: None)
        self.borrower.attach(self.runner)

    def grant(self, grant_id: int, blocks: tuple[int, ...]) -> Grant:
        return Grant(
            creditor_id=self.owner.desk.own.worker_id,
            creditor_incarnation=1,
            grant_id=grant_id,
            generation=1,
            blocks=blocks,
            lease_s=5.0,
        )


@contextmanager
def world(make_model: ModelFactory) -> Iterator[World]:
    model = make_model("llama")
    with lender(model, 6) as owner:
        made = World(owner, make_engine(model, OWN))
        made.runner.start()
        yield made
        assert made.runner.stop(5.0)
        made.debtor.close()


def test_borrowed_blocks_are_used_and_given_up(make_model: ModelFactory) -> None:
    with world(make_model) as here:
        assert asyncio.run(here.borrower.admit(here.grant(GRANT.grant_id, (4, 1, 3)), [10, 11, 12]))
        assert asyncio.run(here.borrower.admit(here.grant(GRANT.grant_id, (0,)), [13]))
        assert here.plane.dialled == 1
        assert (here.pool.borrowed_blocks, here.pool.total_blocks) == (4, OWN + 4)
        blocks = here.pool.allocate(4)
        assert blocks[OWN:] == [10, 11]
        row = Row(list(range(3 * BLOCK_TOKENS)), 0, blocks, None)
        assert here.engine.step([row]) == [None]
        assert here.owner.engine.pools[0][0][4].any() and not here.owner.engine.pools[0][0][5].any()
        assert asyncio.run(here.borrower.retire(5)) == [13, 12]
        here.pool.release(blocks)
        assert sorted(asyncio.run(here.borrower.retire(5))) == [10, 11]
        assert here.pool.borrowed_blocks == 0


def test_memory_of_both_tiers_of_a_creditor_is_lost_together(make_model: ModelFactory) -> None:
    model = make_model("llama")
    with lender(model, 6, host_blocks=3) as owner:
        here = World(owner, make_engine(model, OWN))
        here.runner.start()
        assert asyncio.run(here.borrower.admit(here.grant(GRANT.grant_id, (4,)), [10]))
        host = msgspec.structs.replace(here.grant(HOST_GRANT.grant_id, (2, 0)), tier=KvTier.HOST)
        assert asyncio.run(here.borrower.admit(host, [11, 12]))
        assert here.plane.dialled == 2, "each tier has a link of its own"
        blocks = here.pool.allocate(OWN + 3)
        here.engine.step([Row(list(range(5 * BLOCK_TOKENS)), 0, blocks, None)])
        assert owner.host is not None
        k_pool, _ = owner.host.pools[0]
        assert k_pool[2].any() and k_pool[0].any() and not k_pool[1].any()
        lost = CreditorLost("as told", creditor_id=owner.desk.own.worker_id)
        assert here.borrower.lose_creditor(lost) == {10, 11, 12}
        assert here.runner.stop(5.0)
        here.debtor.close()


def test_a_creditor_that_cannot_be_dialled_lends_nothing(make_model: ModelFactory) -> None:
    with world(make_model) as here:
        here.plane.is_away = True
        assert not asyncio.run(here.borrower.admit(here.grant(1, (4,)), [10]))
        assert here.pool.borrowed_blocks == 0


def test_a_creditor_that_fails_takes_all_its_blocks_along(make_model: ModelFactory) -> None:
    with world(make_model) as here:
        assert asyncio.run(here.borrower.admit(here.grant(GRANT.grant_id, (4, 1)), [10, 11]))
        name = here.owner.desk.own.worker_id
        assert here.borrower.lose_creditor(CreditorLost("as told", creditor_id=name)) == {10, 11}
        assert here.failed == [name]
        assert here.borrower.lose_creditor(CreditorLost("again", creditor_id=name)) == set()
        assert asyncio.run(here.borrower.admit(here.grant(GRANT.grant_id, (4, 1)), [20, 21]))
        assert here.plane.dialled == 2


def test_leases_that_are_over_take_their_blocks_along(make_model: ModelFactory) -> None:
    with world(make_model) as here:
        assert asyncio.run(here.borrower.admit(here.grant(GRANT.grant_id, (4, 1)), [10, 11]))
        here.borrower.lose([10])
        assert here.runner.ask(lambda core, now_s: here.pool.borrowed_blocks).result(5.0) == 1


def test_blocks_come_home_from_the_event_loop(make_model: ModelFactory) -> None:
    with world(make_model) as here:
        assert asyncio.run(here.borrower.admit(here.grant(GRANT.grant_id, (4, 1, 3)), [10, 11, 12]))
        blocks = here.pool.allocate(OWN + 2)
        row = Row(list(range(2 * BLOCK_TOKENS)), 0, blocks, None)
        here.engine.step([row])
        here.pool.release(blocks[:OWN])
        assert asyncio.run(here.borrower.recall([10, 11, 12], 1, keep_blocks=0)) == [10]
        assert asyncio.run(here.borrower.set_apart([11, 12], 9)) == [11, 12]
        home = here.pool.own.allocate(1)
        here.pool.own.withdraw(home)
        pairs = [(11, home[0])]
        assert asyncio.run(here.borrower.copy_home(pairs))
        assert asyncio.run(here.borrower.swap_home(pairs)) == []
        here.borrower.rejoin([12])
        assert here.runner.ask(lambda core, now_s: here.pool.borrowed_free_blocks).result(5.0) == 1
        assert here.pool.borrowed_blocks == 1


def test_a_creditor_that_fails_while_blocks_come_home(make_model: ModelFactory) -> None:
    with world(make_model) as here:
        assert asyncio.run(here.borrower.admit(here.grant(GRANT.grant_id, (4, 1)), [10, 11]))
        blocks = here.pool.allocate(OWN + 1)
        here.pool.own.release(blocks[:OWN])
        home = here.pool.own.allocate(1)
        here.pool.own.withdraw(home)
        assert here.owner.listener.close(5.0)
        assert not asyncio.run(here.borrower.copy_home([(10, home[0])]))
        assert here.failed == [here.owner.desk.own.worker_id]
        assert here.pool.borrowed_blocks == 0, "all of that creditor is lost"
        assert asyncio.run(here.borrower.swap_home([(10, home[0])])) == home, "nobody needs it"


def test_messages_name_the_generation_that_is_known(make_model: ModelFactory) -> None:
    """They named generation 0, whatever had been granted or returned."""
    with world(make_model) as here:
        name = here.owner.desk.own.worker_id
        assert asyncio.run(here.borrower.admit(here.grant(GRANT.grant_id, (4, 1)), [10, 11]))
        blocks = here.pool.allocate(OWN + 1)
        row = Row(list(range(3 * BLOCK_TOKENS)), 0, blocks, None)
        here.engine.step([row])
        asyncio.run(here.borrower.retire(1))
        here.owner.book.grant(DEBTOR.worker_id, GrantRef(GRANT.grant_id, 2), range(6))
        here.borrower.rename(GrantKey(name, 1, GRANT.grant_id), 2)
        here.borrower.rename(GrantKey(name, 1, GRANT.grant_id), 1)  # late
        here.borrower.rename(GrantKey(name, 2, GRANT.grant_id), 9)  # another life's
        here.runner.ask(lambda core, now_s: here.engine.step([row])).result(5.0)
        assert here.failed == []


def test_an_exchange_that_was_agreed_on_is_never_refused(
    make_model: ModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The originals are on their way back by then: sequences went on with blocks that were returned."""
    with world(make_model) as here:
        assert asyncio.run(here.borrower.admit(here.grant(GRANT.grant_id, (4,)), [10]))
        blocks = here.pool.allocate(OWN + 1)
        here.pool.own.release(blocks[:OWN])
        home = here.pool.own.allocate(1)
        here.pool.own.withdraw(home)
        monkeypatch.setattr(door, "_MAX_WAITING", 0)
        with pytest.raises(Overloaded):
            asyncio.run(here.borrower.copy_home([(10, home[0])]))
        here.pool.set_apart([10], 1)
        assert asyncio.run(here.borrower.swap_home([(10, home[0])])) == []
        assert here.pool.borrowed_blocks == 0


RECALL_OWN, THERE = 5, 6


PROMPT = [5, 9, 2, 7, 11, 3, 8, 6, 4, 12]


GREEDY = Sampling(seed=0, max_tokens=32, temperature=0.0)


class RecallWorld:
    """A debtor of which one block is its sequence's, and whose others are a creditor's."""

    def __init__(self, engine: TorchEngine, owner: Lender, debtor: Debtor) -> None:
        self.engine = engine
        self.owner = owner
        self.debtor = debtor
        self.pool = ExtendedPool(BlockPool(RECALL_OWN, BLOCK_TOKENS), RECALL_OWN)
        self.forgotten: list[int] = []
        self.pool.admit(range(RECALL_OWN, RECALL_OWN + THERE))
        self.pool.on_moved = lambda moves: self.move(dict(moves))
        self.rest = self.pool.own.allocate(RECALL_OWN - 1)
        self.blocks = self.pool.allocate(4)
        self.homecoming = Homecoming(debtor, self.pool, self.forget)
        self.tokens = list(PROMPT)
        self.computed = 0

    def forget(self, blocks: Iterable[int]) -> None:
        self.forgotten += blocks
        self.debtor.homes.forget(self.forgotten)

    def move(self, moves: dict[int, int]) -> None:
        self.blocks[:] = [moves.get(block, block) for block in self.blocks]

    def withdraw(self, count: int) -> list[int]:
        home, self.rest = self.rest[:count], self.rest[count:]
        self.pool.own.withdraw(home)
        return home

    def step(self) -> None:
        point = SamplePoint(GREEDY, 0, len(self.tokens) - len(PROMPT), self.tokens)
        row = Row(self.tokens[self.computed :], self.computed, self.blocks, point)
        (sampled,) = self.engine.step([row])
        assert sampled is not None
        self.computed = len(self.tokens)
        self.tokens.append(sampled.token)

    def check(self) -> None:
        self.pool.check_integrity([*self.blocks, *self.rest])


@contextmanager
def recall_world(make_model: ModelFactory) -> Iterator[RecallWorld]:
    model = make_model("llama")
    with lender(model, THERE) as owner:
        engine = make_engine(model, RECALL_OWN)
        debtor = make_debtor(engine, [owner], THERE)
        yield RecallWorld(engine, owner, debtor)
        debtor.close()


@pytest.fixture
def expected(make_model: ModelFactory) -> list[int]:
    """What an engine says that has it all."""
    with recall_world(make_model) as here:
        here.engine = make_engine(make_model("llama"), 4)
        here.blocks = [0, 1, 2, 3]
        for _ in range(5):
            here.step()
        return here.tokens


def test_a_swap_between_steps_changes_no_token(make_model: ModelFactory, expected: list[int]) -> None:
    with recall_world(make_model) as here:
        here.step()
        assert here.blocks[1:] == [RECALL_OWN, RECALL_OWN + 1, RECALL_OWN + 2]
        pairs = list(zip(here.pool.set_apart(here.blocks[1:], 9), here.withdraw(3), strict=True))
        assert here.homecoming.copy(pairs) == 3
        here.step()  # into the last but one: that copy is old now
        assert here.homecoming.swap(pairs) == []
        assert max(here.blocks) < RECALL_OWN and here.pool.borrowed_blocks == THERE - 3
        here.check()
        for pool in here.owner.engine.pools:
            for part in pool:
                part.zero_()
        for _ in range(3):
            here.step()
        assert here.tokens == expected


def test_what_nobody_uses_any_more_needs_no_place(make_model: ModelFactory) -> None:
    with recall_world(make_model) as here:
        here.step()
        home = here.withdraw(3)
        pairs = list(
            zip(here.pool.set_apart([RECALL_OWN, RECALL_OWN + 1, RECALL_OWN + 5], 9), home, strict=True)
        )
        here.homecoming.copy(pairs)
        here.pool.release([RECALL_OWN])
        here.blocks.remove(RECALL_OWN)
        assert here.homecoming.swap(pairs) == [home[0], home[2]]
        assert sorted(here.forgotten) == [RECALL_OWN, RECALL_OWN + 1, RECALL_OWN + 5]
        here.check()


def test_a_recall_takes_free_memory_and_leaves_some(make_model: ModelFactory, expected: list[int]) -> None:
    with recall_world(make_model) as here:
        here.step()
        here.pool.own.release(here.rest)
        here.rest = []
        there = here.blocks[1:]
        assert here.homecoming.recall([RECALL_OWN + 5, *there], 9, keep_blocks=2) == there[:2]
        assert here.pool.own.free_blocks == 2
        assert here.homecoming.recall(there[2:], 9, keep_blocks=2) == []
        here.check()
        for _ in range(4):
            here.step()
        assert here.tokens == expected


def test_a_creditor_that_dies_leaves_all_as_it_was(make_model: ModelFactory) -> None:
    with recall_world(make_model) as here:
        here.step()
        here.pool.own.release(here.rest)
        here.rest = []
        here.owner.listener.close(5.0)
        before = list(here.blocks)
        with pytest.raises(CreditorLost):
            here.homecoming.recall(before[1:], 9, keep_blocks=0)
        assert here.blocks == before and here.pool.own.free_blocks == RECALL_OWN - 1
        here.check()


def test_a_creditor_that_dies_keeps_nothing_of_another_one_apart(make_model: ModelFactory) -> None:
    """Blocks of the one that lives stayed set apart, so were never free again and renewed for ever."""
    model = make_model("llama")
    with lender(model, 2) as lives, lender(model, 2) as dies:
        engine = make_engine(model, RECALL_OWN)
        debtor = make_debtor(engine, [lives, dies], 2)
        pool = ExtendedPool(BlockPool(RECALL_OWN, BLOCK_TOKENS), RECALL_OWN)
        pool.admit(range(RECALL_OWN, RECALL_OWN + 4))
        rest, there = pool.own.allocate(RECALL_OWN), pool.allocate(4)
        pool.own.release(rest)
        forgotten: list[int] = []
        dies.listener.close(5.0)
        with pytest.raises(CreditorLost):
            Homecoming(debtor, pool, forgotten.extend).recall(there, 9, keep_blocks=0)
        pool.lose(there[2:])
        pool.release(there)
        assert sorted(pool.retire(9)) == there[:2], "free, so that they can be returned"
        assert pool.own.free_blocks == RECALL_OWN and forgotten == []
        debtor.close()
