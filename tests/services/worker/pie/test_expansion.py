"""The expansion controller: up, down, background traffic, low demand. Windows come from a model of the
link.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.pie.expansion import ExpansionController, Reason, Thresholds, Window
from services.worker.pie.sizes import expansion, most_fifo_layers

LAYERS = 40
BLOCKS = 1000


def window(
    fifo_layers: int, *, swap: float = 2.0, demand: float = 1e9, layers: int = LAYERS, gain: float = 1.0
) -> Window:
    """32 iterations in which a swap of an unexpanded layer takes `swap` layer-times, at `demand` blocks."""
    ratio = expansion(layers, fifo_layers)
    capacity = int(BLOCKS * ratio)
    used = min(capacity, demand)
    turn = fifo_layers * swap * used / BLOCKS
    stall = max(0.0, turn - (layers - 1)) / layers
    took = 1.0 + stall
    return Window(
        iterations=32,
        tokens=int(used * 32),
        elapsed_s=32 * took,
        compute_s=32.0,
        stall_s=32 * stall,
        swap_ins=640 if fifo_layers else 0,
        early_swap_ins=int(640 * max(0.0, 1 - turn / layers)) if fifo_layers else 0,
        used_blocks=int(used),
        capacity_blocks=capacity,
        swap_s=swap * used / BLOCKS / layers if fifo_layers else 0.0,
        work_blocks=32 * (BLOCKS + gain * (used - BLOCKS)),
        work_s=32 * took,
    )


def settle(
    controller: ExpansionController,
    windows: int = 200,
    *,
    swap: float = 2.0,
    demand: float = 1e9,
    gain: float = 1.0,
) -> list[int]:
    lengths = []
    for _ in range(windows):
        found = window(controller.fifo_layers, swap=swap, demand=demand, gain=gain)
        lengths.append(controller.on_window(found))
        controller.check_integrity()
    return lengths


def best(swap: float) -> int:
    """Of those that wait for no more than a hundredth."""
    found = [(window(q, swap=swap), q) for q in range(3, most_fifo_layers(LAYERS) + 1)]
    return max((one.throughput, q) for one, q in found if one.stall_s <= 0.01 * one.compute_s)[1]


@pytest.mark.parametrize("swap", [0.7, 1.0, 2.0])
def test_it_finds_the_best_and_stays(swap: float) -> None:
    lengths = settle(ExpansionController(LAYERS, most_fifo_layers(LAYERS)), swap=swap)
    assert abs(lengths[-1] - best(swap)) <= 1
    reached = [window(q, swap=swap).throughput for q in lengths[-60:]]
    assert sum(reached) / len(reached) >= 0.98 * window(best(swap), swap=swap).throughput


def test_the_first_step_up_is_three() -> None:
    controller = ExpansionController(LAYERS, 39)
    assert controller.on_window(window(0)) == 3
    assert controller.reason is Reason.ROOM


def test_a_raise_that_brings_nothing_is_taken_back_and_not_repeated_for_a_while() -> None:
    controller = ExpansionController(LAYERS, 39)
    lengths = settle(controller, 9, gain=0.0)
    assert lengths == [3, 3, 0, 0, 0, 0, 0, 3, 3]
    assert settle(controller, 8, gain=0.0)[:7] == [0] * 7


def test_background_traffic_lowers_it_and_its_end_raises_it() -> None:
    controller = ExpansionController(LAYERS, 39)
    quiet = settle(controller, swap=1.0)[-1]
    loaded = settle(controller, swap=2.5)[-1]
    assert loaded < quiet - 5
    assert settle(controller, swap=1.0)[-1] >= quiet - 1


def test_a_brief_disturbance_is_tolerated() -> None:
    controller = ExpansionController(LAYERS, 39)
    length = settle(controller)[-1]
    settle(controller, 40)
    before = controller.fifo_layers
    slow = next(
        one
        for tenths in range(20, 40)
        if (one := window(before, swap=tenths / 10)).stall_s > 0.01 * one.compute_s
    )
    assert slow.stall_s < 0.1 * slow.compute_s
    assert controller.on_window(slow) == before
    assert before == length


def test_low_demand_raises_nothing_and_gives_back_what_is_unused() -> None:
    controller = ExpansionController(LAYERS, 39)
    assert settle(controller, 50, demand=500) == [0] * 50
    settle(controller, swap=0.5)
    assert controller.fifo_layers > 10
    assert settle(controller, 400, swap=0.5, demand=500)[-1] == 0


def test_while_slots_change_nothing_is_decided() -> None:
    controller = ExpansionController(LAYERS, 39)
    assert controller.on_window(window(0), is_resizing=True) == 0
    assert controller.reason is Reason.RESIZING


def test_a_drop_holds_for_four_windows() -> None:
    controller = ExpansionController(LAYERS, 39, fifo_layers=20)
    assert controller.on_window(window(20, swap=8.0)) == 19
    assert controller.reason is Reason.STALLED
    held = [controller.on_window(window(19, swap=0.2)) for _ in range(5)]
    assert held == [19, 19, 19, 19, 20]


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(4, 48),
    swaps=st.lists(st.tuples(st.floats(0.05, 20), st.floats(1, 4000)), min_size=1, max_size=60),
)
def test_it_keeps_its_bounds_whatever_comes(layers: int, swaps: list[tuple[float, float]]) -> None:
    most = most_fifo_layers(layers)
    controller = ExpansionController(layers, most, Thresholds())
    for swap, demand in swaps:
        before = controller.fifo_layers
        after = controller.on_window(window(before, swap=swap, demand=demand, layers=layers))
        assert abs(after - before) <= 1 or {before, after} == {0, 3}
        controller.check_integrity()
