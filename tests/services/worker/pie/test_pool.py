"""A pool that grows and shrinks under load loses no block."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.pie.pool import ElasticPool


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
    assert (pool.total_blocks, pool.free_blocks, pool.is_drained) == (6, 1, False)
    with pytest.raises(ValueError, match="still taken"):
        pool.resize(8)
    pool.release([6, 7])
    assert pool.is_drained and pool.free_blocks == 1
    pool.resize(9)
    assert pool.allocate(4) == [0, 6, 7, 8]
    with pytest.raises(ValueError, match="not taken"):
        pool.release([9])


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = ElasticPool(8, 16)
        self.held: list[int] = []

    @rule(blocks=st.integers(0, 5))
    def allocate(self, blocks: int) -> None:
        if self.pool.can_allocate(blocks):
            taken = self.pool.allocate(blocks)
            assert all(block < self.pool.total_blocks for block in taken)
            self.held += taken

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def release(self, data: st.DataObject) -> None:
        gone = data.draw(st.sets(st.sampled_from(self.held)))
        self.held = [block for block in self.held if block not in gone]
        self.pool.release(gone)

    @rule(total=st.integers(1, 20))
    def resize(self, total: int) -> None:
        if total <= self.pool.total_blocks or self.pool.is_drained:
            self.pool.resize(total)

    @invariant()
    def is_sound(self) -> None:
        self.pool.check_integrity(self.held)


TestPoolMachine: Any = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
