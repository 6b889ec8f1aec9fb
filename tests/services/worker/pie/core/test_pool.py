"""A pool that grows and shrinks under load loses no block."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.pie.core.pool import ElasticPool


def test_low_blocks_are_given_out_first() -> None:
    pool = ElasticPool(8, 16)
    taken = pool.allocate(5)
    pool.release([1, 3])
    assert taken == [0, 1, 2, 3, 4]
    assert pool.allocate(3) == [1, 3, 5]
    assert pool.taken() == [0, 1, 2, 3, 4, 5]


def test_a_shrinking_pool_drains() -> None:
    pool = ElasticPool(8, 16)
    pool.allocate(8)
    pool.release([0])
    pool.resize(6)
    assert (pool.total_blocks, pool.doomed_blocks, pool.free_blocks, pool.is_drained) == (8, 2, 1, False)
    with pytest.raises(ValueError, match="about to go"):
        pool.resize(9)
    with pytest.raises(ValueError, match="still taken"):
        pool.cut()
    pool.release([6, 7])
    assert pool.is_drained
    pool.cut()
    assert (pool.total_blocks, pool.doomed_blocks, pool.free_blocks) == (6, 0, 1)
    pool.resize(9)
    assert pool.allocate(4) == [0, 6, 7, 8]
    with pytest.raises(ValueError, match="not taken"):
        pool.release([9])


def test_plans_on_their_way_still_get_doomed_blocks() -> None:
    pool = ElasticPool(8, 16)
    pool.allocate(5)
    pool.resize(4)
    assert pool.allocate(2) == [5, 6] and pool.doomed_blocks == 4


def test_what_lies_on_doomed_blocks_is_moved_where_it_fits_as_a_whole() -> None:
    pool = ElasticPool(8, 16)
    pool.allocate(8)
    pool.release([1])
    pool.resize(6)
    told: list[Mapping[int, int]] = []
    pool.on_moved = told.append
    assert pool.compact() == {}
    pool.release([2, 5])
    pool.on_moved = None
    assert pool.compact() == {}
    pool.on_moved = told.append
    assert pool.compact() == {6: 1, 7: 2} == told[0]
    assert pool.is_drained and pool.taken() == [0, 1, 2, 3, 4] and pool.compact() == {}


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = ElasticPool(8, 16)
        self.held: list[int] = []
        self.pool.on_moved = self.follow

    def follow(self, moves: Mapping[int, int]) -> None:
        self.held = [moves.get(block, block) for block in self.held]

    @rule(blocks=st.integers(0, 5))
    def allocate(self, blocks: int) -> None:
        if self.pool.can_allocate(blocks):
            self.held += self.pool.allocate(blocks)

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def release(self, data: st.DataObject) -> None:
        gone = data.draw(st.sets(st.sampled_from(self.held)))
        self.held = [block for block in self.held if block not in gone]
        self.pool.release(gone)

    @rule(total=st.integers(1, 20))
    def resize(self, total: int) -> None:
        if total <= self.pool.total_blocks or not self.pool.doomed_blocks:
            self.pool.resize(total)

    @rule()
    def cut(self) -> None:
        if self.pool.is_drained:
            self.pool.cut()

    @rule()
    def compact(self) -> None:
        count = len(self.held)
        self.pool.compact()
        assert len(self.held) == count

    @invariant()
    def is_sound(self) -> None:
        self.pool.check_integrity(self.held)
        assert 1 <= self.pool.lasting_blocks <= self.pool.total_blocks
        assert sorted(self.held) == self.pool.taken()


TestPoolMachine: Any = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=25, stateful_step_count=40)
