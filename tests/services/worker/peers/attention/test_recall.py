"""Blocks come home between two steps of a sequence, and its tokens are what they would have been."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from services.worker.core.sampling import SamplePoint
from services.worker.engine.engine import Row, TorchEngine
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.peers.attention.borrower import Homecoming
from services.worker.peers.attention.debtor import Debtor
from shared.errors import CreditorLost
from shared.messages.sequence import Sampling
from tests.services.worker.conftest import ModelFactory
from tests.services.worker.peers.attention.rig import BLOCK_TOKENS, Lender, lender, make_debtor, make_engine

OWN, THERE = 5, 6
PROMPT = [5, 9, 2, 7, 11, 3, 8, 6, 4, 12]
GREEDY = Sampling(seed=0, max_tokens=32, temperature=0.0)


class World:
    """A debtor of which one block is its sequence's, and whose others are a creditor's."""

    def __init__(self, engine: TorchEngine, owner: Lender, debtor: Debtor) -> None:
        self.engine = engine
        self.owner = owner
        self.debtor = debtor
        self.pool = ExtendedPool(BlockPool(OWN, BLOCK_TOKENS), OWN)
        self.forgotten: list[int] = []
        self.pool.admit(range(OWN, OWN + THERE))
        self.pool.on_moved = lambda moves: self.move(dict(moves))
        self.rest = self.pool.own.allocate(OWN - 1)
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
def world(make_model: ModelFactory) -> Iterator[World]:
    model = make_model("llama")
    with lender(model, THERE) as owner:
        engine = make_engine(model, OWN)
        debtor = make_debtor(engine, [owner], THERE)
        yield World(engine, owner, debtor)
        debtor.close()


@pytest.fixture
def expected(make_model: ModelFactory) -> list[int]:
    """What an engine says that has it all."""
    with world(make_model) as here:
        here.engine = make_engine(make_model("llama"), 4)
        here.blocks = [0, 1, 2, 3]
        for _ in range(5):
            here.step()
        return here.tokens


def test_a_swap_between_steps_changes_no_token(make_model: ModelFactory, expected: list[int]) -> None:
    with world(make_model) as here:
        here.step()
        assert here.blocks[1:] == [OWN, OWN + 1, OWN + 2]
        pairs = list(zip(here.pool.set_apart(here.blocks[1:], 9), here.withdraw(3), strict=True))
        assert here.homecoming.copy(pairs) == 3
        here.step()  # into the last but one: that copy is old now
        assert here.homecoming.swap(pairs) == []
        assert max(here.blocks) < OWN and here.pool.borrowed_blocks == THERE - 3
        here.check()
        for pool in here.owner.engine.pools:
            for part in pool:
                part.zero_()
        for _ in range(3):
            here.step()
        assert here.tokens == expected


def test_what_nobody_uses_any_more_needs_no_place(make_model: ModelFactory) -> None:
    with world(make_model) as here:
        here.step()
        home = here.withdraw(3)
        pairs = list(zip(here.pool.set_apart([OWN, OWN + 1, OWN + 5], 9), home, strict=True))
        here.homecoming.copy(pairs)
        here.pool.release([OWN])
        here.blocks.remove(OWN)
        assert here.homecoming.swap(pairs) == [home[0], home[2]]
        assert sorted(here.forgotten) == [OWN, OWN + 1, OWN + 5]
        here.check()


def test_a_recall_takes_free_memory_and_leaves_some(make_model: ModelFactory, expected: list[int]) -> None:
    with world(make_model) as here:
        here.step()
        here.pool.own.release(here.rest)
        here.rest = []
        there = here.blocks[1:]
        assert here.homecoming.recall([OWN + 5, *there], 9, keep_blocks=2) == there[:2]
        assert here.pool.own.free_blocks == 2
        assert here.homecoming.recall(there[2:], 9, keep_blocks=2) == []
        here.check()
        for _ in range(4):
            here.step()
        assert here.tokens == expected


def test_a_creditor_that_dies_leaves_all_as_it_was(make_model: ModelFactory) -> None:
    with world(make_model) as here:
        here.step()
        here.pool.own.release(here.rest)
        here.rest = []
        here.owner.listener.close(5.0)
        before = list(here.blocks)
        with pytest.raises(CreditorLost):
            here.homecoming.recall(before[1:], 9, keep_blocks=0)
        assert here.blocks == before and here.pool.own.free_blocks == OWN - 1
        here.check()


def test_a_creditor_that_dies_keeps_nothing_of_another_one_apart(make_model: ModelFactory) -> None:
    """Blocks of the one that lives stayed set apart, so were never free again and renewed for ever."""
    model = make_model("llama")
    with lender(model, 2) as lives, lender(model, 2) as dies:
        engine = make_engine(model, OWN)
        debtor = make_debtor(engine, [lives, dies], 2)
        pool = ExtendedPool(BlockPool(OWN, BLOCK_TOKENS), OWN)
        pool.admit(range(OWN, OWN + 4))
        rest, there = pool.own.allocate(OWN), pool.allocate(4)
        pool.own.release(rest)
        forgotten: list[int] = []
        dies.listener.close(5.0)
        with pytest.raises(CreditorLost):
            Homecoming(debtor, pool, forgotten.extend).recall(there, 9, keep_blocks=0)
        pool.lose(there[2:])
        pool.release(there)
        assert sorted(pool.retire(9)) == there[:2], "free, so that they can be returned"
        assert pool.own.free_blocks == OWN and forgotten == []
        debtor.close()
