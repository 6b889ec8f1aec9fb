"""Pie: the cost of a step agrees with the controller it stands for; figure 4 of its paper; whatever order."""

import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.worker.pie.core.meter import Direction
from services.worker.pie.core.sizes import expansion, higher, lower, most_fifo_layers
from sim.pie.cost import PieModel, is_in_time, steady
from sim.pie.run import PieCase, PieSimulation
from sim.pie.swap import SlotMove, SwapController, SwapTransfer
from sim.pie.timeline import Pace, Timeline, settle
from sim.requests import SimRequest

MODEL = PieModel("opt-13b", "opt-13b-h100", 40, 2 * 5120 * 2)


@pytest.mark.parametrize("fifo_layers", [3, 8, 14, 18])
@pytest.mark.parametrize("swap", [7, 15, 21])
def test_where_it_says_in_time_the_controller_never_waits(fifo_layers: int, swap: int) -> None:
    if is_in_time(40, fifo_layers, swap, swap, 10):
        found = settle(40, fifo_layers, Pace(10, swap, swap), warm_tokens=4, tokens=3)
        assert found.stall_share == 0
        assert abs(steady(40, fifo_layers, swap, swap, 10).early_share - found.early_share) < 0.15
    else:
        assert steady(40, fifo_layers, swap, swap, 10).early_share < 0.35


def requests(count: int = 120) -> list[SimRequest]:
    dice = random.Random(1)
    return [
        SimRequest(i, 0.02 * i, dice.randrange(8, 200), dice.randrange(20, 300), 400) for i in range(count)
    ]


def test_a_longer_queue_serves_more_until_it_waits() -> None:
    ends = {q: PieSimulation(PieCase(MODEL, 2e9, q), requests()).finish() for q in (0, 22, 38)}
    assert ends[22].outcome.end_s < 0.8 * ends[0].outcome.end_s
    assert ends[0].stall_share == ends[22].stall_share == 0 < ends[38].stall_share


def test_the_controller_grows_under_load_and_gives_back_without() -> None:
    run = PieSimulation(PieCase(MODEL, 2e9, None), requests())
    found = run.finish()
    lengths = [length for _, length in found.lengths]
    assert max(lengths) >= 6 and lengths[:2] == [0, 3]
    assert all(record.end_s > 0 for record in found.outcome.records)
    plain = PieSimulation(PieCase(MODEL, 2e9, 0), requests()).finish()
    assert found.outcome.end_s < plain.outcome.end_s


_PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
"""A long sequence of events shrinks slowly."""


def test_figure_4() -> None:
    """n = 9, t_swap = 2 · t_compute: seven slots never stall and keep a layer away for 8 layer-times."""
    timeline = Timeline(SwapController(9, 4), Pace(compute=1, swap_in=2, swap_out=2))
    timeline.run(40)
    assert timeline.controller.table.slots == 7 and round(expansion(9, 4), 3) == 1.286
    assert timeline.stalls == [0] * 40 and set(timeline.fifo_ticks) == {8}


def test_figure_4_with_six_slots_stalls() -> None:
    timeline = Timeline(SwapController(9, 5), Pace(compute=1, swap_in=2, swap_out=2))
    timeline.run(40)
    assert timeline.controller.table.slots == 6 and all(stalled > 0 for stalled in timeline.stalls[4:])


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
        self.now_s, self.next = 0.0, 0

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
def test_it_never_stalls(layers: int, compute: int, swap_in: int, swap_out: int, data: st.DataObject) -> None:
    """q swaps within n − 2 layers' time: one is computed, and a swap may begin in the middle of another."""
    fifo_layers = data.draw(st.integers(3, most_fifo_layers(layers)))
    timeline = Timeline(SwapController(layers, fifo_layers), Pace(compute, swap_in, swap_out))
    timeline.run(12)
    if fifo_layers * max(swap_in, swap_out) <= (layers - 2) * compute:
        assert timeline.stalls[4:] == [0] * 8
