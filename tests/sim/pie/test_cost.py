"""The cost of a step under Pie agrees with the controller that it stands for."""

import pytest

from sim.costs import find_cost
from sim.pie.cost import GH200, PieCost, PieModel, is_in_time, steady
from sim.pie.timeline import Pace, settle

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
