"""Ratios are taken within an alternation, and who goes first changes."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kit.stats import (
    alternate,
    interval,
    median_of_ratios,
    percentile,
    ratio_of,
)


def test_what_is_the_same_in_every_round_is_certain() -> None:
    assert interval([2.0, 4.0, 6.0], [1.0, 2.0, 3.0], median_of_ratios) == (2.0, 2.0)


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


VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_a_percentile_has_so_many_values_at_or_below_it(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values) - 1e-9


RATES = st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), min_size=1, max_size=20)


@given(RATES, st.lists(st.floats(0.1, 10.0), min_size=20, max_size=20))
def test_a_drift_that_hits_both_sides_of_an_alternation_changes_nothing(
    rates: list[tuple[float, float]], drift: list[float]
) -> None:
    ours, theirs = [a for a, _ in rates], [b for _, b in rates]
    steady = ratio_of(ours, theirs)
    drifted = ratio_of(
        [a * d for a, d in zip(ours, drift, strict=False)],
        [b * d for b, d in zip(theirs, drift, strict=False)],
    )
    assert drifted.median == pytest.approx(steady.median)
    assert drifted.worst == pytest.approx(steady.worst)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_what_cannot_be_compared_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"measurements|positive"):
        ratio_of(ours, theirs)


def test_sides_take_turns() -> None:
    calls: list[str] = []

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    ours, theirs = alternate([lambda: side("a"), lambda: side("b")], 3)
    assert "".join(calls) == "abbaab"
    assert (ours, theirs) == ([1, 4, 5], [2, 3, 6])
