"""Pie's controller, meter, sizes of levels, and forecast."""

from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.pie.core import sizes
from services.worker.pie.core.expansion import ExpansionController, Window
from services.worker.pie.core.meter import DecodeCost, Direction, SwapMeter, fixed_share
from services.worker.pie.core.sizes import expansion, most_fifo_layers

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
        tokens=int(32 * (BLOCKS + gain * (used - BLOCKS))),
        elapsed_s=32 * took,
        compute_s=32.0,
        stall_s=32 * stall,
        swap_ins=640 if fifo_layers else 0,
        early_swap_ins=int(640 * max(0.0, 1 - turn / layers)) if fifo_layers else 0,
        used_blocks=int(used),
        capacity_blocks=capacity,
        swap_s=swap * used / BLOCKS / layers if fifo_layers else 0.0,
        work_rate=(BLOCKS + gain * (used - BLOCKS)) / took,
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
    return max((one.work_rate, q) for one, q in found if one.stall_s <= 0.01 * one.compute_s)[1]


@pytest.mark.parametrize("swap", [0.7, 1.0, 2.0])
def test_it_finds_the_best_and_stays(swap: float) -> None:
    lengths = settle(ExpansionController(LAYERS, most_fifo_layers(LAYERS)), swap=swap)
    assert abs(lengths[-1] - best(swap)) <= 1
    reached = [window(q, swap=swap).work_rate for q in lengths[-60:]]
    assert sum(reached) / len(reached) >= 0.98 * window(best(swap), swap=swap).work_rate


def test_a_raise_that_brings_nothing_is_taken_back_and_not_repeated_for_a_while() -> None:
    controller = ExpansionController(LAYERS, 39)
    lengths = settle(controller, 12, gain=0.0)
    assert lengths == [3, 3, 3, 3, 3, 0, 0, 0, 0, 0, 3, 3]
    assert settle(controller, 12, gain=0.0) == [3, 3, 3, *[0] * 9]


def test_either_measure_of_throughput_will_do_and_a_late_gain_counts() -> None:
    """Tokens per second and blocks attended to, noisy both."""
    for tokens, work in ((1.2, 0.8), (0.8, 1.2)):
        controller = ExpansionController(LAYERS, 39)
        controller.on_window(window(0))
        slow, good = window(3, gain=0.0), window(3)
        lucky = replace(good, tokens=int(tokens * good.tokens), work_rate=work * good.work_rate)
        assert [controller.on_window(one) for one in (slow, slow, lucky)] == [3, 3, 5]


def test_a_gain_that_steps_of_different_sizes_show_counts_although_throughput_is_noisy() -> None:
    """Three more layers bring 2.6 % more blocks here: with half of a step fixed 1.3 %, with a tenth 0.3 %."""
    for share, after in ((0.5, 5), (0.1, 3)):
        controller = ExpansionController(LAYERS, 39)
        controller.on_window(replace(window(0), tokens=10**6, work_rate=10**6))
        unlucky = replace(window(3), fixed_share=share)
        assert [controller.on_window(unlucky) for _ in range(2)] == [3, after]
    controller = ExpansionController(LAYERS, 39)
    controller.on_window(replace(window(0), tokens=10**6, work_rate=10**6))
    waiting = replace(window(3), fixed_share=0.5, stall_s=0.02 * 32)
    assert [controller.on_window(waiting) for _ in range(2)] == [3, 0]


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


def test_a_drop_holds_for_four_windows() -> None:
    controller = ExpansionController(LAYERS, 39, fifo_layers=20)
    slow = window(20, swap=1.13)
    assert 0.01 < slow.stall_s / slow.compute_s < 0.1
    assert [controller.on_window(slow) for _ in range(2)] == [20, 19]
    held = [controller.on_window(window(19, swap=0.2)) for _ in range(5)]
    assert held == [19, 19, 19, 19, 20]


def test_where_it_waits_long_it_drops_at_once_to_what_fits() -> None:
    controller = ExpansionController(LAYERS, 39, fifo_layers=30)
    lower = controller.on_window(window(30, swap=4.0))
    fits = [q for q in range(3, 40) if window(q, swap=4.0).stall_s == 0]
    assert abs(lower - max(fits)) <= 1
    assert controller.on_window(window(lower, swap=400.0)) == 0


def test_raises_grow_as_long_as_they_are_kept() -> None:
    controller = ExpansionController(LAYERS, 39)
    steps = [length for length, _ in groupby(settle(controller, 24, swap=0.05))]
    assert steps[:5] == [3, 5, 9, 17, 25]


def test_a_raise_that_is_refused_before_it_counts_holds_longer_and_longer() -> None:
    controller, held = ExpansionController(LAYERS, 39), []
    for _ in range(6):
        windows = 1
        while controller.on_window(window(0)) == 0:
            windows += 1
        held.append(windows)
        assert not controller.fits(swap_s=1.0, steps_s=[1.0], ratio=1.05)
        assert controller.fits(swap_s=0.3, steps_s=[1.0], ratio=1.05)
        assert controller.refuse() == 0
    assert held == [1, 5, 9, 17, 33, 33]


def test_a_length_fits_only_if_short_steps_seldom_wait_for_it() -> None:
    """q = 10 of 40 layers, 0.9 s a turn: half of the steps are long enough in both cases."""
    controller = ExpansionController(LAYERS, 39, fifo_layers=10)
    assert controller.fits(swap_s=0.09, steps_s=[1.0] * 31 + [0.95], ratio=1.0)
    assert controller.fits(swap_s=0.09, steps_s=[1.0] * 31 + [0.9], ratio=1.0)
    assert not controller.fits(swap_s=0.09, steps_s=[1.0] * 28 + [0.2] * 4, ratio=1.0)
    assert not controller.fits(swap_s=0.09, steps_s=[0.9] * 32, ratio=1.0)


def test_a_raise_that_short_steps_would_wait_for_is_not_tried() -> None:
    even = ExpansionController(LAYERS, 39, fifo_layers=10)
    uneven = ExpansionController(LAYERS, 39, fifo_layers=10)
    found = window(10, swap=2.0)
    assert even.on_window(replace(found, steps_s=(1.0,) * 32)) == 11
    assert uneven.on_window(replace(found, steps_s=(1.2,) * 26 + (0.2,) * 6)) == 10


@settings(max_examples=30)
@given(
    layers=st.integers(4, 48),
    swaps=st.lists(st.tuples(st.floats(0.05, 20), st.floats(1, 4000)), min_size=1, max_size=60),
)
def test_it_keeps_its_bounds_whatever_comes(layers: int, swaps: list[tuple[float, float]]) -> None:
    most = most_fifo_layers(layers)
    controller = ExpansionController(layers, most)
    for swap, demand in swaps:
        before = controller.fifo_layers
        after = controller.on_window(window(before, swap=swap, demand=demand, layers=layers))
        assert after - before <= 8
        controller.check_integrity()


def test_a_window_holds_what_was_since_the_last() -> None:
    meter = SwapMeter()
    meter.on_stall(0.5)
    meter.on_copied(Direction.IN, 100, 0.2)
    meter.on_copied(Direction.OUT, 100, 0.4)
    for compute_s, is_decoding in ((1.0, True), (9.0, False), (3.0, True)):
        meter.on_step(5, compute_s, 0.5, 8, is_decoding=is_decoding)
    assert meter.window_stall_s() == 0.5
    window = meter.close_window(3, 9, 2, 10)
    assert (window.tokens, window.compute_s, window.stall_s, window.used_blocks) == (15, 13.0, 0.5, 8)
    assert (window.swap_s, window.steps_s) == (0.4, (1.0, 9.0, 3.0))
    assert window.elapsed_s == 13.5
    assert abs(window.work_rate - (8 / 1.5 + 8 / 3.5) / 2) < 1e-9
    assert meter.window_stall_s() == 0 and abs(meter.stall_share - 0.5 / 13) < 1e-9
    empty = meter.close_window(0, 9, 2, 10)
    assert (empty.tokens, empty.swap_s, empty.work_rate, empty.elapsed_s) == (0, 0.0, 0.0, 0.0)
    assert meter.moved_bytes[Direction.IN] == 100


def test_what_does_not_grow_with_the_batch_is_seen_through_outliers() -> None:
    steps = [(batch, 10.0 + batch) for batch in range(5, 17)] * 4
    assert fixed_share(steps) == pytest.approx(10 / 20.5, abs=0.02)
    assert fixed_share([*steps, (6, 300.0), (15, 500.0)]) == pytest.approx(10 / 20.5, abs=0.04)
    assert fixed_share([(batch, 2.0 * batch) for batch, _ in steps]) == pytest.approx(0.0, abs=1e-9)
    assert fixed_share(steps[:12]) == 0.0 == fixed_share([(8, 1.0)] * 60)


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


TIMES = st.floats(1e-6, 1.0)


def test_two_steps_say_what_a_row_costs() -> None:
    cost = DecodeCost.of((1, 0.045), (8, 0.080))
    assert cost.fixed_s == pytest.approx(0.040)
    assert cost.row_s == pytest.approx(0.005)
    assert cost.gain(8, 1.8, 0.004) == pytest.approx(0.24, abs=0.01)


def test_a_step_that_is_faster_with_more_rows_is_all_fixed() -> None:
    assert DecodeCost.of((1, 0.05), (8, 0.04)) == DecodeCost(0.05, 0.0)


@given(TIMES, TIMES, st.floats(0.1, 500), st.floats(1, 8), st.floats(0, 1))
def test_a_gain_is_less_than_the_rows_and_falls_with_copies(
    fixed_s: float, row_s: float, rows: float, ratio: float, copies_s: float
) -> None:
    cost = DecodeCost(fixed_s, row_s)
    gain = cost.gain(rows, ratio, copies_s)
    assert -1 <= gain <= ratio - 1 + 1e-9
    assert gain <= cost.gain(rows, ratio, 0.0) and cost.gain(rows, ratio, 0.0) >= -1e-9
    assert cost.gain(0, ratio, copies_s) == 0
