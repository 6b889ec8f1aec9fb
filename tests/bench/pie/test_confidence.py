"""Intervals that hold what they should, as often as they say."""

from random import Random

import pytest

from bench.pie.confidence import interval, median_of_ratios, ratio_of_wholes


def test_what_is_the_same_in_every_round_is_certain() -> None:
    assert interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], median_of_ratios) == (2.0, 2.0)


def test_wholes_weigh_rounds_by_their_time() -> None:
    ours, theirs = [(10.0, 1.0), (90.0, 4.0)], [(10.0, 1.0), (30.0, 3.0)]
    assert ratio_of_wholes(ours, theirs) == 2.0
    low, high = interval(ours, theirs, ratio_of_wholes)
    assert low == 1.0 and high == 2.25


def test_rounds_pair_up() -> None:
    for ours, theirs in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="rounds of ours"):
            interval(ours, theirs, median_of_ratios)


def test_the_true_ratio_is_within_nearly_always() -> None:
    draw, held = Random(2), 0
    for _ in range(20):
        ours, theirs = (
            [1.5 * draw.gauss(100, 10) for _ in range(24)],
            [draw.gauss(100, 10) for _ in range(24)],
        )
        low, high = interval(ours, theirs, median_of_ratios)
        assert low < high
        held += low <= 1.5 <= high
    assert held >= 16
