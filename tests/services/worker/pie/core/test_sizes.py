"""The arithmetic of slots, changed in place without harm, and the table of which layer is in which."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.pie.core import sizes
from services.worker.pie.core.sizes import Partition
from services.worker.pie.core.table import LayerPlace, MappingTable


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


def test_a_destination_is_taken_first_and_the_source_is_free_when_the_copy_is_complete() -> None:
    table = MappingTable(5)
    entry = table.begin_leaving(2, 1.0)
    assert (entry.place, entry.device_slot, entry.host_slot) == (LayerPlace.LEAVING, 2, 0)
    assert not table.is_present(2) and table.free_slots == 0
    table.end_leaving(2, 2.0)
    assert (entry.place, entry.device_slot, entry.since_s) == (
        LayerPlace.HOST,
        None,
        2.0,
    ) and table.free_slots == 1
    table.begin_arriving(2, 3.0)
    assert (entry.place, table.free_slots) == (LayerPlace.ARRIVING, 0) and not table.is_present(2)
    table.end_arriving(2, 4.0)
    assert table.is_present(2) and entry.host_slot is None
    table.check_integrity()


def test_what_is_elsewhere_cannot_be_moved() -> None:
    table = MappingTable(5, 3)
    assert table.layers_at(LayerPlace.HOST) == [4] and table.slots == 4
    for move in (table.begin_leaving, table.end_arriving):
        with pytest.raises(ValueError, match="layer 4 is host"):
            move(4, 0.0)
    with pytest.raises(ValueError, match="layer 0 is device, not host"):
        table.begin_arriving(0, 0.0)


def test_the_last_slot_is_given_up_and_its_layer_moves_to_the_free_one() -> None:
    table = MappingTable(5)
    with pytest.raises(ValueError, match="cannot be retired"):
        table.retire_slot()
    table.begin_leaving(1, 0.0)
    table.end_leaving(1, 0.0)
    assert table.retire_slot() == (4, 1) and table.entries[4].device_slot == 1
    table.check_integrity()
    assert table.add_slot() == 4 and table.free_slots == 1
    assert table.retire_slot() is None and table.slots == 4
    table.check_integrity()


def test_a_layer_that_is_kept_has_its_place_on_the_host_for_good() -> None:
    table = MappingTable(5, kept_layers=2)
    for layer in (1, 3):
        table.begin_leaving(layer, 0.0)
        table.end_leaving(layer, 0.0)
        table.begin_arriving(layer, 0.0)
        table.end_arriving(layer, 0.0)
        table.check_integrity()
    assert table.entries[1].host_slot == 0 and table.entries[3].host_slot is None
    assert table.begin_leaving(3, 0.0).host_slot == 1 and table.begin_leaving(1, 0.0).host_slot == 0
    table.check_integrity()
