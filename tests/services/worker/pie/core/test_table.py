"""The mapping table: updates in two phases, slots that come and go."""

import pytest

from services.worker.pie.core.table import LayerPlace, MappingTable


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
