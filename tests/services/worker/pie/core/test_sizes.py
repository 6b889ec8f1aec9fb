"""The arithmetic of slots; those that change size in place overwrite nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.pie.core import sizes
from services.worker.pie.core.sizes import Partition


def test_the_papers_nine_layers() -> None:
    assert sizes.device_slots(9, 4) == 7
    assert sizes.expansion(9, 4) == pytest.approx(1.286, abs=5e-4)
    assert sizes.slot_blocks(9, 4, 100) == 128


def test_one_and_two_give_nothing() -> None:
    for fifo_layers in (1, 2, 9, -1):
        with pytest.raises(ValueError, match="in the FIFO"):
            sizes.device_slots(9, fifo_layers)
    assert sizes.higher(0) == 3 and sizes.lower(3) == 0
    assert sizes.most_fifo_layers(3) == 0 and sizes.most_fifo_layers(4) == 3


@given(layers=st.integers(4, 80), device_blocks=st.integers(8, 4096), data=st.data())
def test_slots_fit_the_devices_bytes(layers: int, device_blocks: int, data: st.DataObject) -> None:
    fifo_layers = data.draw(st.integers(3, sizes.most_fifo_layers(layers)))
    slots = sizes.device_slots(layers, fifo_layers)
    blocks = sizes.slot_blocks(layers, fifo_layers, device_blocks)
    assert slots * blocks <= layers * device_blocks < slots * (blocks + 1)
    assert sizes.expansion(layers, fifo_layers) > 1


def test_the_hosts_memory_bounds_the_queue() -> None:
    assert sizes.most_within_host(9, 100, 4 * 128) == 4
    assert sizes.most_within_host(9, 100, 4 * 128 - 1) == 3
    assert sizes.most_within_host(9, 100, 10) == 0


def test_layers_that_keep_their_place_on_the_host() -> None:
    assert sizes.kept_layers(9, 4, 100, 9 * 128) == 9
    assert sizes.kept_layers(9, 4, 100, 9 * 128 - 1) == 4, "eight places, four of them for the queue"
    assert sizes.kept_layers(9, 4, 100, 4 * 128) == 0
    assert sizes.kept_layers(9, 0, 100, 10_000) == 0


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
