"""Tables of blocks: copied as bytes whatever they were made of; they grow while a step's copy is kept."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.core.block_pool import block_table, first_borrowed, joined

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(tables=st.lists(st.tuples(st.booleans(), IDS), max_size=6))
def test_tables_and_lists_are_joined_in_order(tables: list[tuple[bool, list[int]]]) -> None:
    made = [block_table(ids) if is_table else ids for is_table, ids in tables]
    flat = joined(made)
    assert flat.dtype == np.int32
    assert flat.tolist() == [each for _, ids in tables for each in ids]


def test_a_table_grows_while_what_was_joined_is_kept() -> None:
    table = block_table([4, 2])
    before = joined([table])
    first_borrowed(table, 3)
    table.extend([9])
    table[0] = 5
    assert before.tolist() == [4, 2] and table.tolist() == [5, 2, 9]


@given(ids=IDS, own_blocks=st.integers(0, 2**31 - 1))
def test_the_first_borrowed_block(ids: list[int], own_blocks: int) -> None:
    """Against the plain search."""
    expected = next((at for at, block in enumerate(ids) if block >= own_blocks), len(ids))
    assert first_borrowed(block_table(ids), own_blocks) == expected
