"""The arithmetic of levels: blocks, and buffers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.pie.core import sizes


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


@given(layers=st.integers(4, 80), device_blocks=st.integers(8, 4096), data=st.data())
def test_there_are_buffers_for_all_that_is_outside(
    layers: int, device_blocks: int, data: st.DataObject
) -> None:
    level = data.draw(st.integers(3, sizes.most_fifo_layers(layers)))
    spare = sizes.spare_blocks(layers, level, device_blocks)
    outside = sizes.slot_blocks(layers, level, device_blocks) - device_blocks + spare
    assert spare * layers // 2 >= outside


def test_the_hosts_memory_bounds_the_level() -> None:
    assert sizes.most_in_blocks(9, 100, 9 * 128) == 4
    assert sizes.most_in_blocks(9, 100, 9 * 128 - 1) == 3
    assert sizes.most_in_blocks(9, 100, 10) == 0
