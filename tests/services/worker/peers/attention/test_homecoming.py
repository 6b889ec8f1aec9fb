"""Borrowed blocks of a running sequence come home between two steps, from real creditors."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from services.worker.engine.engine import TorchEngine
from services.worker.engine.partition import Homes, split
from services.worker.engine.spans import Span, pack
from services.worker.kv.core.block_pool import BlockPool
from services.worker.kv.core.borrowed_pool import ExtendedPool
from services.worker.peers.attention.borrower import Homecoming, Pair
from services.worker.peers.attention.debtor import AttendingDebtor
from services.worker.peers.attention.interfaces import WriteWatch
from shared.errors import CreditorLost
from tests.services.worker.engine.rig import GREEDY, Sequences
from tests.services.worker.peers.attention.rig import BLOCK_TOKENS, Lender, lender, make_debtor, make_engine

HOME_BLOCKS, THERE = 5, 6
PROMPT = [5, 9, 2, 7, 11, 3, 8, 6, 4, 12]


class AtWork:
    """A debtor whose sequence has one own block and other blocks at a creditor."""

    def __init__(self, engine: TorchEngine, owner: Lender, debtor: AttendingDebtor) -> None:
        self.engine = engine
        self.owner = owner
        self.debtor = debtor
        self.pool = ExtendedPool(BlockPool(HOME_BLOCKS, BLOCK_TOKENS), HOME_BLOCKS)
        self.forgotten: list[int] = []
        self.pool.admit(range(HOME_BLOCKS, HOME_BLOCKS + THERE))
        self.pool.on_moved = lambda moves: self.move(dict(moves))
        self.rest = self.pool.own.allocate(HOME_BLOCKS - 1)
        self.blocks = self.pool.allocate(4)
        self.homecoming = Homecoming(debtor, self.pool, self.forget)
        self.sequence = Sequences(engine, BlockPool(1, BLOCK_TOKENS), [PROMPT], GREEDY)
        self.sequence.blocks = [self.blocks]

    def forget(self, blocks: Iterable[int]) -> None:
        self.forgotten += blocks
        self.debtor.homes.forget(self.forgotten)

    def move(self, moves: dict[int, int]) -> None:
        self.blocks[:] = [moves.get(block, block) for block in self.blocks]

    def withdraw(self, count: int) -> list[int]:
        home, self.rest = self.rest[:count], self.rest[count:]
        self.pool.own.withdraw(home)
        return home

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.sequence.step([0], most_tokens=64)

    def zero_what_is_lent(self) -> None:
        for pool in self.owner.engine.pools:
            for part in pool:
                part.zero_()

    @property
    def answer(self) -> list[int]:
        return self.sequence.answer(0, 5)

    def check(self) -> None:
        self.pool.check_integrity([*self.blocks, *self.rest])

    def copy(self, pairs: Sequence[Pair]) -> int:
        """Return the used ones of these blocks."""
        used = [pair for pair, _ in self.homecoming.plan(pairs)]
        self.debtor.bring_home(used)
        return len(used)

    def recall(self, blocks: Sequence[int], most_blocks: int, keep_blocks: int) -> list[int]:
        """Swap without a copy."""
        return self.homecoming.end_recall(self.homecoming.begin_recall(blocks, most_blocks, keep_blocks))


@pytest.fixture
def debt(llama: Any) -> Iterator[AtWork]:
    with lender(llama, THERE) as owner:
        engine = make_engine(llama, HOME_BLOCKS)
        debtor = make_debtor(engine, [owner], THERE)
        made = AtWork(engine, owner, debtor)
        made.step()
        yield made
        debtor.close()


@pytest.fixture
def expected(llama: Any) -> list[int]:
    """Return the answer of an engine with enough blocks."""
    alone = Sequences(make_engine(llama, 4), BlockPool(4, BLOCK_TOKENS), [PROMPT], GREEDY)
    for _ in range(5):
        alone.step([0], most_tokens=64)
    return alone.answer(0, 5)


def test_a_swap_between_steps_changes_no_token(debt: AtWork, expected: list[int]) -> None:
    assert debt.blocks[1:] == [HOME_BLOCKS, HOME_BLOCKS + 1, HOME_BLOCKS + 2]
    pairs = list(zip(debt.pool.set_apart(debt.blocks[1:], 9), debt.withdraw(3), strict=True))
    assert debt.copy(pairs) == 3
    debt.step()  # into the last but one: that copy is old now
    assert debt.homecoming.swap(pairs) == []
    assert max(debt.blocks) < HOME_BLOCKS and debt.pool.borrowed_blocks == THERE - 3
    debt.check()
    debt.zero_what_is_lent()
    debt.step(3)
    assert debt.answer == expected


def test_a_swap_brings_only_what_was_written_since_it_was_copied(debt: AtWork, expected: list[int]) -> None:
    """Nothing was written, so changed originals do not matter."""
    pairs = list(zip(debt.pool.set_apart(debt.blocks[1:], 9), debt.withdraw(3), strict=True))
    assert debt.copy(pairs) == 3
    debt.zero_what_is_lent()
    assert debt.homecoming.swap(pairs) == []
    debt.step(4)
    assert debt.answer == expected


def test_an_unused_block_needs_no_own_place(debt: AtWork) -> None:
    home = debt.withdraw(3)
    pairs = list(
        zip(debt.pool.set_apart([HOME_BLOCKS, HOME_BLOCKS + 1, HOME_BLOCKS + 5], 9), home, strict=True)
    )
    debt.copy(pairs)
    debt.pool.release([HOME_BLOCKS])
    debt.blocks.remove(HOME_BLOCKS)
    assert debt.homecoming.swap(pairs) == [home[0], home[2]]
    assert sorted(debt.forgotten) == [HOME_BLOCKS, HOME_BLOCKS + 1, HOME_BLOCKS + 5]
    debt.check()


def test_a_recall_uses_free_memory_and_keeps_some(debt: AtWork, expected: list[int]) -> None:
    debt.pool.own.release(debt.rest)
    debt.rest = []
    there = debt.blocks[1:]
    assert debt.recall([HOME_BLOCKS + 5, *there], 9, keep_blocks=2) == there[:2]
    assert debt.pool.own.free_blocks == 2
    assert debt.recall(there[2:], 9, keep_blocks=2) == []
    debt.check()
    debt.step(4)
    assert debt.answer == expected


def test_a_creditor_that_dies_during_a_recall_changes_nothing(debt: AtWork) -> None:
    debt.pool.own.release(debt.rest)
    debt.rest = []
    debt.owner.listener.close(5.0)
    before = list(debt.blocks)
    with pytest.raises(CreditorLost):
        debt.recall(before[1:], 9, keep_blocks=0)
    assert debt.blocks == before and debt.pool.own.free_blocks == HOME_BLOCKS - 1
    debt.check()


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


def test_a_write_invalidates_the_copy_of_a_block() -> None:
    homes = Homes(2)
    homes.place([10, 11, 12], 1, [5, 6, 7])
    watch = WriteWatch(BLOCK_TOKENS)
    watch.restart({(1, 8): 2})
    watch.restart({(1, 5): 0, (1, 6): 1})
    assert watch.is_copy((1, 5), 0) and not watch.is_copy((1, 5), 1) and not watch.is_copy((1, 8), 2)
    parts = split(pack([Span(5, 1, [10, 11]), Span(0, 4, [12])], BLOCK_TOKENS), homes, BLOCK_TOKENS)
    watch.on_step(parts)
    assert watch.is_copy((1, 5), 0), "it was only read"
    assert not watch.is_copy((1, 6), 1), "position 5 is in it"
