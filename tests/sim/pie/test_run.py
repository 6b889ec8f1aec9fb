"""Runs with Pie: more fits, every request ends, no plan breaks a law while the capacity changes."""

import random

from sim.pie.cost import PieModel
from sim.pie.run import PieCase, PieSimulation
from sim.requests import SimRequest

MODEL = PieModel("opt-13b", "opt-13b-h100", 40, 2 * 5120 * 2)


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
