"""Slots that change size in place overwrite nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.pie.core.sizes import Partition


@given(arena_blocks=st.integers(12, 400), slots=st.integers(2, 12), to=st.integers(2, 12))
def test_no_shift_overwrites_another_slot(arena_blocks: int, slots: int, to: int) -> None:
    partition = Partition(arena_blocks, slots)
    before = partition.slot_blocks
    memory: list[tuple[int, int] | None] = [None] * arena_blocks
    kept, live = min(slots, to), min(before, arena_blocks // to)
    for slot in range(kept):
        for block in range(live):
            memory[slot * before + block] = (slot, block)
    for shift in partition.resize(to):
        part = memory[shift.from_block : shift.from_block + shift.blocks]
        memory[shift.to_block : shift.to_block + shift.blocks] = part
    for slot in range(kept):
        first = partition.first_block(slot)
        assert memory[first : first + live] == [(slot, block) for block in range(live)]


def test_more_slots_than_blocks_cannot_be() -> None:
    with pytest.raises(ValueError, match="5 slots in 4 blocks"):
        Partition(4, 5)
    with pytest.raises(ValueError, match="0 slots"):
        Partition(4, 2).resize(0)
