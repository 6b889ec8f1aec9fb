"""Simulated tokens under the live swap controller."""

from services.worker.pie.core.swap import SwapController
from sim.pie.timeline import Pace, Timeline, settle


def test_time_is_computation_and_waits() -> None:
    timeline = Timeline(SwapController(9, 6), Pace(1, 3, 2))
    timeline.run(7)
    assert timeline.now == 7 * 9 + sum(timeline.stalls)
    assert sum(timeline.stalls) > 0


def test_without_a_queue_nothing_is_waited_for() -> None:
    steady = settle(9, 0, Pace(1, 50, 50))
    assert (steady.stall_share, steady.early_share, steady.swap_ins) == (0, 0, 0)


def test_a_longer_queue_waits_more_and_swaps_less_ahead() -> None:
    found = [settle(12, fifo_layers, Pace(10, 20, 20)) for fifo_layers in (3, 5, 8, 10)]
    assert [one.stall_share for one in found[:2]] == [0, 0]
    assert 0 < found[2].stall_share < found[3].stall_share
    assert found[0].early_share > found[1].early_share > found[2].early_share
