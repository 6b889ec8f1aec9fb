"""Blocks are conserved, whatever is taken and given back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.core.block_pool import BlockPool


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40))
def test_blocks_are_conserved(total_blocks: int, requests: list[tuple[bool, int]]) -> None:
    pool = BlockPool(total_blocks, block_tokens=4)
    held: list[list[int]] = []
    for take, number in requests:
        if take and pool.can_allocate(number):
            held.append(pool.allocate(number))
            assert len(held[-1]) == number
        elif take:
            with pytest.raises(ValueError, match="free"):
                pool.allocate(number)
        elif held:
            pool.release(held.pop(number % len(held)))
        pool.check_integrity([block for blocks in held for block in blocks])
        assert pool.free_blocks == total_blocks - sum(map(len, held))


@pytest.mark.parametrize("block", [0, 7, -1])
def test_a_block_that_is_not_taken_cannot_be_released(block: int) -> None:
    pool = BlockPool(4, block_tokens=4)
    with pytest.raises(ValueError, match="not taken"):
        pool.release([block])
    pool.check_integrity([])


def test_a_lost_block_is_noticed() -> None:
    pool = BlockPool(4, block_tokens=4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity([])
