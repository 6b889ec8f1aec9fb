"""Windows, sums and the pace."""

import pytest

from services.worker.pie.core.meter import SwapMeter, fixed_share
from services.worker.pie.core.swap import Direction, SwapController


def test_a_window_holds_what_was_since_the_last() -> None:
    meter, controller = SwapMeter(4), SwapController(4)
    meter.on_stall(2, 0.5)
    meter.on_copied(Direction.IN, 100, 0.2)
    meter.on_copied(Direction.OUT, 100, 0.4)
    for compute_s, is_decoding in ((1.0, True), (9.0, False), (3.0, True)):
        meter.on_step(5, compute_s, 0.5, 8, is_decoding=is_decoding)
    assert meter.window_stall_s() == 0.5
    window = meter.close_window(3, controller, 10)
    assert (window.tokens, window.compute_s, window.stall_s, window.used_blocks) == (15, 13.0, 0.5, 8)
    assert (window.swap_s, window.steps_s) == (0.4, (1.0, 9.0, 3.0))
    assert window.elapsed_s == 13.5
    assert abs(window.work_rate - (8 / 1.5 + 8 / 3.5) / 2) < 1e-9
    assert meter.window_stall_s() == 0 and abs(meter.stall_share - 0.5 / 13) < 1e-9
    empty = meter.close_window(0, controller, 10)
    assert (empty.tokens, empty.swap_s, empty.work_rate, empty.elapsed_s) == (0, 0.0, 0.0, 0.0)
    assert abs(meter.copying_s - 0.6) < 1e-9 and meter.moved_bytes[Direction.IN] == 100


def test_the_pace_needs_two_swaps_in_each_direction() -> None:
    meter = SwapMeter(4)
    meter.on_step(1, 2.0, 0.0, 1, is_decoding=True)
    meter.on_copied(Direction.IN, 1, 0.1)
    meter.on_copied(Direction.IN, 1, 0.3)
    meter.on_copied(Direction.OUT, 1, 0.1)
    assert meter.pace() is None
    meter.on_copied(Direction.OUT, 1, 0.1)
    assert meter.pace() == (0.2, (2.0,)) and meter.step_s == 2.0
    meter.forget_swaps()
    assert meter.pace() is None


def test_what_does_not_grow_with_the_batch_is_seen_through_outliers() -> None:
    steps = [(batch, 10.0 + batch) for batch in range(5, 17)] * 4
    assert fixed_share(steps) == pytest.approx(10 / 20.5, abs=0.02)
    assert fixed_share([*steps, (6, 300.0), (15, 500.0)]) == pytest.approx(10 / 20.5, abs=0.04)
    assert fixed_share([(batch, 2.0 * batch) for batch, _ in steps]) == pytest.approx(0.0, abs=1e-9)
    assert fixed_share(steps[:12]) == 0.0 == fixed_share([(8, 1.0)] * 60)
