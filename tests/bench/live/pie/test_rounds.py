"""Turns, and what is made of them."""

from functools import partial
from itertools import islice

import pytest

from bench.kit.models import TINY_CHAT
from bench.live.pie.rounds import (
    SideResult,
    Slice,
    compared,
    measure,
    measure_work,
    same_text_share,
    spread,
    take_turns,
)
from bench.live.pie.sides import RECOMPUTE, EngineSide, Ground, fixed
from bench.live.pie.workload import Workload

GROUND = Ground(TINY_CHAT, 40, 0.0, clients=8)


def served(name: str, *rates: float) -> SideResult:
    return SideResult(name, tuple(Slice(rate, 0.01, 4.0, 0.0, 0) for rate in rates), 0.1, 0.2, 9, 0)


def test_ratios_are_taken_within_a_round() -> None:
    versus = compared(served("ours", 30, 10, 20), served("theirs", 10, 10, 5))
    assert (versus.median, versus.worst, versus.highest) == (3, 1, 4)
    found = spread("x", served("ours", 30, 10, 20), served("theirs", 10, 10, 5))
    assert (found["x"], found["x_median"], found["x_worst"]) == (60 / 25, 3, 1)
    assert 1 <= found["x_low"] <= 60 / 25 <= found["x_high"] <= 4
    assert served("x", 3, 1, 5).tokens_per_s == 3
    assert served("x", 1).mean(lambda one: one.batch) == 4


def test_two_real_sides_take_turns_and_say_the_same() -> None:
    workload = Workload(str(TINY_CHAT), 0)
    requests = list(islice(workload.requests(), 400))
    sides = [EngineSide(kind, GROUND, iter(requests)) for kind in (RECOMPUTE, fixed(5))]
    order: list[str] = []
    try:
        found = take_turns(
            sides, 2, partial(measure, duration_s=0.5), lambda side, _: order.append(side.kind.name)
        )
        assert order == ["recompute", "fixed 5", "fixed 5", "recompute"]
        assert [each.name for each in found] == ["recompute", "fixed 5"]
        assert all(len(each.slices) == 2 and each.tokens_per_s > 0 for each in found)
        assert [each.failures for each in found] == [0, 0]
        assert found[0].slices[0].fifo_layers == 0 and found[1].slices[0].fifo_layers == 5
        for side in sides:
            side.loop.run(10.0, until=lambda side=side: len(side.loop.answers) >= 8)  # type: ignore[misc]
        assert same_text_share(sides[1], sides[0]) == 1.0
        sides[1].loop.answers[0].tokens[0] += 1
        assert same_text_share(sides[1], sides[0]) < 1.0
        assert measure(sides[0], 0.1).stall_share == 0.0
        answered = len(sides[0].loop.answers)
        assert measure_work(sides[0], 2).took_s > 0 and len(sides[0].loop.answers) >= answered + 2
    finally:
        for side in sides:
            side.close()


def test_nothing_in_common_is_not_different() -> None:
    side = EngineSide(RECOMPUTE, GROUND, iter(()))
    assert same_text_share(side, side) == pytest.approx(1.0)
    side.close()
