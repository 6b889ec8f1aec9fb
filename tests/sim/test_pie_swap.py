"""The swap controller: figure 4 of its paper, and whatever comes in whatever order."""

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.worker.pie.core.meter import Direction
from services.worker.pie.core.sizes import expansion, higher, lower, most_fifo_layers
from sim.pie.swap import SlotMove, SwapController, SwapTransfer
from sim.pie.table import LayerPlace, MappingTable
from sim.pie.timeline import Pace, Timeline

_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""A long sequence of events shrinks slowly."""


def test_figure_4() -> None:
    """n = 9, t_swap = 2 · t_compute: seven slots never stall and keep a layer away for 8 layer-times."""
    timeline = Timeline(SwapController(9, 4), Pace(compute=1, swap_in=2, swap_out=2))
    timeline.run(40)
    assert timeline.controller.table.slots == 7
    assert round(expansion(9, 4), 3) == 1.286
    assert timeline.stalls == [0] * 40
    assert set(timeline.fifo_ticks) == {8}


def test_figure_4_with_six_slots_stalls() -> None:
    timeline = Timeline(SwapController(9, 5), Pace(compute=1, swap_in=2, swap_out=2))
    timeline.run(40)
    assert timeline.controller.table.slots == 6
    assert all(stalled > 0 for stalled in timeline.stalls[4:])


def test_the_first_steps_of_figure_4() -> None:
    """Layers counted from 1, as in the paper: 8 and 9 begin on the host."""
    controller = SwapController(9, 4)
    assert controller.on_awaited(0, 0.0) == []  # 8 and 9 are colder than any on the device.
    controller.on_started(0)
    (out,) = controller.on_ended(0, 1.0)
    assert (out.layer, out.direction) == (0, Direction.OUT)
    for layer in (1, 2):
        assert controller.on_awaited(layer, layer) == []  # No slot is free, the way out is taken.
        controller.on_started(layer)
        assert controller.on_ended(layer, layer + 1.0) == []
    started = controller.on_completed(out, 3.0)
    assert [(each.layer, each.direction) for each in started] == [(7, Direction.IN), (2, Direction.OUT)]
    assert started[0].device_slot == out.device_slot


def test_a_layer_is_not_started_without_its_kv() -> None:
    controller = SwapController(9, 4)
    controller.on_awaited(8, 0.0)
    with pytest.raises(ValueError, match="layer 8 is"):
        controller.on_started(8)


def test_a_completion_counts_once() -> None:
    controller = SwapController(9, 4)
    (out,) = controller.on_awaited(4, 0.0)
    controller.on_completed(out, 1.0)
    with pytest.raises(ValueError, match="not in flight"):
        controller.on_completed(out, 1.0)


def test_without_a_queue_nothing_moves() -> None:
    controller = SwapController(6)
    assert controller.is_static
    for layer in range(6):
        assert controller.on_awaited(layer, 0.0) == []
        controller.on_started(layer)
        assert controller.on_ended(layer, 0.0) == []


class Bytes:
    """What slots and copies hold: the layer, and the version its last computation wrote."""

    def __init__(self, controller: SwapController) -> None:
        self.device: dict[int, tuple[int, int]] = {}
        self.host: dict[int, tuple[int, int]] = {}
        for layer, entry in enumerate(controller.table.entries):
            if entry.device_slot is not None:
                self.device[entry.device_slot] = (layer, 0)
            else:
                assert entry.host_slot is not None
                self.host[entry.host_slot] = (layer, 0)

    def copy(self, transfer: SwapTransfer) -> None:
        if transfer.direction is Direction.IN:
            self.device[transfer.device_slot] = self.host[transfer.host_slot]
        else:
            self.host[transfer.host_slot] = self.device[transfer.device_slot]

    def relocate(self, moved: SlotMove) -> None:
        self.device[moved.to_slot] = self.device[moved.from_slot]


class SwapMachine(RuleBasedStateMachine):
    """Layers are computed in turn, transfers complete at any time, the queue changes its length between."""

    @initialize(layers=st.integers(4, 12), data=st.data())
    def begin(self, layers: int, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from([0, *range(3, most_fifo_layers(layers) + 1)]))
        self.controller = SwapController(layers, start)
        self.bytes = Bytes(self.controller)
        self.versions = [0] * layers
        self.flying: list[SwapTransfer] = []
        self.now_s = 0.0
        self.next = 0

    def take(self, transfers: list[SwapTransfer]) -> None:
        self.flying += transfers
        assert len({each.direction for each in self.flying}) == len(self.flying)

    @rule(which=st.integers(0, 1))
    @precondition(lambda self: self.flying)
    def complete(self, which: int) -> None:
        transfer = self.flying.pop(which % len(self.flying))
        self.bytes.copy(transfer)
        self.now_s += 1
        self.take(self.controller.on_completed(transfer, self.now_s))

    @rule()
    def compute(self) -> None:
        controller, layer = self.controller, self.next
        self.take(controller.on_awaited(layer, self.now_s))
        waits = 0
        while not controller.table.is_present(layer):
            assert self.flying, "a layer is awaited and nothing moves"
            self.complete(0)
            waits += 1
            assert waits < 10, "a layer never comes"
        controller.on_started(layer)
        slot = controller.table.entries[layer].device_slot
        assert slot is not None
        assert self.bytes.device[slot] == (layer, self.versions[layer]), "not its bytes, or old ones"
        self.versions[layer] += 1
        self.bytes.device[slot] = (layer, self.versions[layer])
        if self.flying:
            self.complete(0)
        controller.check_integrity()
        self.take(controller.on_ended(layer, self.now_s))
        self.next = (layer + 1) % len(self.versions)

    @rule(is_higher=st.booleans())
    @precondition(lambda self: self.controller.excess_slots == 0)
    def change_length(self, is_higher: bool) -> None:
        controller = self.controller
        most = most_fifo_layers(controller.table.layers)
        wanted = higher(controller.fifo_layers) if is_higher else lower(controller.fifo_layers)
        if wanted <= most:
            self.take(controller.set_fifo(wanted, self.now_s))

    @rule()
    @precondition(lambda self: self.controller.excess_slots < 0)
    def add_slot(self) -> None:
        self.controller.add_slot()

    @rule()
    @precondition(lambda self: self.controller.can_retire_slot)
    def retire_slot(self) -> None:
        self.controller.pause()
        while self.flying:
            self.complete(0)
        if self.controller.can_retire_slot:
            moved = self.controller.retire_slot()
            if moved is not None:
                self.bytes.relocate(moved)
        self.take(self.controller.resume(self.now_s))

    @rule(data=st.data())
    def break_off(self, data: st.DataObject) -> None:
        """A step failed: the next one begins anew."""
        self.next = data.draw(st.sampled_from([0, self.next]))

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "controller"):
            self.controller.check_integrity()


TestSwapMachine: Any = SwapMachine.TestCase
TestSwapMachine.settings = settings(max_examples=25, stateful_step_count=40, phases=_PHASES)


@settings(max_examples=30, phases=_PHASES)
@given(
    layers=st.integers(4, 24),
    compute=st.integers(1, 20),
    swap_in=st.integers(1, 60),
    swap_out=st.integers(1, 60),
    data=st.data(),
)
def test_a_queue_that_is_back_in_time_never_stalls(
    layers: int, compute: int, swap_in: int, swap_out: int, data: st.DataObject
) -> None:
    """q swaps within n − 2 layers' time: one is computed, and a swap may begin in the middle of another."""
    fifo_layers = data.draw(st.integers(3, most_fifo_layers(layers)))
    timeline = Timeline(SwapController(layers, fifo_layers), Pace(compute, swap_in, swap_out))
    timeline.run(12)
    if fifo_layers * max(swap_in, swap_out) <= (layers - 2) * compute:
        assert timeline.stalls[4:] == [0] * 8


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
