"""The cost of a step under Pie agrees with the controller that it stands for.

Runs with Pie: more fits, every request ends, no plan breaks a law while the capacity changes.

Simulated tokens under the live swap controller.
"""

import random
from fractions import Fraction

import pytest

from services.worker.core.costs import find_cost
from sim.pie.cost import GH200, PieCost, PieModel, is_in_time, steady
from sim.pie.run import PieCase, PieSimulation
from sim.pie.swap import SwapController
from sim.pie.timeline import Pace, Timeline, block_stalls, outside_share, settle
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


def test_a_step_costs_more_when_the_queue_is_late() -> None:
    base = find_cost("opt-13b-h100")
    costs = [PieCost(base, MODEL, GH200, fifo_layers) for fifo_layers in (0, 10, 38)]
    plain, early, late = (cost.step_s([], 20, 8000) for cost in costs)
    assert plain == early == base.step_s([], 20, 8000) < late
    assert costs[2].stall_s == pytest.approx(late - plain)
    costs[1].background_bytes_s = 360e9
    assert costs[1].step_s([], 20, 8000) > plain


@pytest.mark.parametrize("fifo_layers", [3, 5, 8])
@pytest.mark.parametrize("swap", [3, 7, 15, 21])
def test_blocks_of_all_layers_wait_where_a_layers_part_takes_longer_than_its_computation(
    fifo_layers: int, swap: int
) -> None:
    """And then for so long, once both buffers are full: what `PieCost` says of a step."""
    outside = outside_share(10, fifo_layers)
    stalls = block_stalls(10, Pace(10, swap, swap), outside, 5)
    late = max(Fraction(0), swap * outside - 10)
    assert stalls[2:] == [10 * late] * 3
    assert stalls[0] >= swap * outside, "the first has to be brought in"


def test_a_step_in_blocks_brings_in_only_what_has_no_place_on_the_device() -> None:
    base, tokens = find_cost("opt-13b-h100"), 8000
    fits, early, late = (
        PieCost(base, MODEL, GH200, 20, "blocks", tokens * share // 100) for share in (200, 90, 20)
    )
    plain_s = base.step_s([], 20, tokens)
    assert fits.step_s([], 20, tokens) == plain_s and fits.close_window(1.0, 1, 1).swap_ins == 0
    assert early.step_s([], 20, tokens) == plain_s
    window = early.close_window(1.0, 1, 1)
    assert window.swap_ins == window.early_swap_ins > 0 and window.swap_s > 0
    early.background_bytes_s = 0.99 * GH200.to_device
    assert early.step_s([], 20, tokens) > plain_s
    late.background_bytes_s = 0.9 * GH200.to_device
    assert late.step_s([], 20, tokens) > plain_s and late.stall_s > 0


def test_a_window_is_what_was_since_the_last() -> None:
    cost = PieCost(find_cost("opt-13b-h100"), MODEL, GH200, 10)
    plain_s, *_ = (cost.step_s([], 20, 8000) for _ in range(4))
    cost.step_s([(0, 100)], 0, 0)
    window = cost.close_window(1.0, 500, 490)
    assert (window.iterations, window.tokens) == (5, 80)
    assert window.work_rate == pytest.approx(8000 / plain_s)
    assert window.swap_ins > window.early_swap_ins > 0 and window.swap_s > 0
    assert cost.close_window(1.0, 500, 490).tokens == 0


def test_capacities_are_those_of_the_paper() -> None:
    assert MODEL.layers * MODEL.token_layer_bytes == 800 * 1024
    assert MODEL.capacity_blocks(3e9, 16) == 228


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
