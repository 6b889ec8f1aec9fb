"""Runs of blocks: each block once, holes as allowed."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.pie.core.copies import count, first_blocks, pieces, runs_of, set_of

BLOCKS = st.sets(st.integers(0, 60)).map(sorted)


def test_runs_with_and_without_holes() -> None:
    blocks = set_of([0, 1, 2, 5, 6, 10])
    assert blocks == 0b10001100111
    assert runs_of(blocks) == ((0, 3), (5, 7), (10, 11))
    assert runs_of(blocks, 2) == ((0, 7), (10, 11)) and runs_of(blocks, 3) == ((0, 11),)
    assert runs_of(0) == () and set_of([]) == 0
    assert runs_of(blocks, 3, fillable=set_of([3, 4, 7, 8])) == ((0, 7), (10, 11))
    assert count(runs_of(blocks)) == 6
    assert list(pieces(((0, 5), (8, 9)), 2)) == [(0, 2), (2, 4), (4, 5), (8, 9)]


@given(blocks=BLOCKS, hole=st.integers(0, 5), limit=st.integers(1, 70))
@pytest.mark.timeout(60)
def test_no_block_is_left_out_and_none_is_twice(blocks: list[int], hole: int, limit: int) -> None:
    runs = runs_of(set_of(blocks), hole)
    covered = [block for first, end in runs for block in range(first, end)]
    assert covered == sorted(set(covered)) and set(blocks) <= set(covered)
    if not hole:
        assert covered == blocks
    assert all(second[0] - first[1] > hole for first, second in pairwise(runs))
    kept = runs_of(set_of(blocks) & first_blocks(limit))
    assert [block for first, end in kept for block in range(first, end)] == [
        block for block in blocks if block < limit
    ]
    assert [block for first, end in pieces(runs, 3) for block in range(first, end)] == covered
