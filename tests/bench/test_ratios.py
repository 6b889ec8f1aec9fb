"""Ratios are taken within an alternation, and who goes first changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.ratios import alternate, geometric_mean, ratio_of

RATES = st.lists(st.tuples(st.floats(0.1, 1e4), st.floats(0.1, 1e4)), min_size=1, max_size=20)


def test_median_and_worst_are_of_pairs() -> None:
    ratio = ratio_of([2.0, 30.0, 8.0], [1.0, 10.0, 2.0])
    assert (ratio.median, ratio.worst, ratio.highest, ratio.alternations) == (3.0, 2.0, 4.0, 3)


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


@given(RATES)
def test_worst_median_and_highest_are_in_order(rates: list[tuple[float, float]]) -> None:
    ratio = ratio_of([a for a, _ in rates], [b for _, b in rates])
    assert ratio.worst <= ratio.median <= ratio.highest


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_what_cannot_be_compared_is_refused(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"measurements|positive"):
        ratio_of(ours, theirs)


def test_the_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert geometric_mean([4.0, 0.25]) == pytest.approx(1.0)


def test_sides_take_turns() -> None:
    calls: list[str] = []

    def side(name: str) -> int:
        calls.append(name)
        return len(calls)

    ours, theirs = alternate([lambda: side("a"), lambda: side("b")], 3)
    assert "".join(calls) == "abbaab"
    assert (ours, theirs) == ([1, 4, 5], [2, 3, 6])
