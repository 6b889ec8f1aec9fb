"""The cost of a step under Pie agrees with the controller that it stands for."""

import random
from fractions import Fraction

import pytest

from sim.pie.cost import PieModel, is_in_time, steady
from sim.pie.run import PieCase, PieSimulation
from sim.pie.timeline import Pace, block_stalls, outside_share, settle
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
