"""What more rows at once would bring, from two measured steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.pie.core.meter import DecodeCost

TIMES = st.floats(1e-6, 1.0)


def test_two_steps_say_what_a_row_costs() -> None:
    cost = DecodeCost.of((1, 0.045), (8, 0.080))
    assert cost.fixed_s == pytest.approx(0.040)
    assert cost.row_s == pytest.approx(0.005)
    assert cost.gain(8, 1.8, 0.004) == pytest.approx(0.24, abs=0.01)


def test_a_step_that_is_faster_with_more_rows_is_all_fixed() -> None:
    assert DecodeCost.of((1, 0.05), (8, 0.04)) == DecodeCost(0.05, 0.0)


@given(TIMES, TIMES, st.floats(0.1, 500), st.floats(1, 8), st.floats(0, 1))
def test_a_gain_is_less_than_the_rows_and_falls_with_copies(
    fixed_s: float, row_s: float, rows: float, ratio: float, copies_s: float
) -> None:
    cost = DecodeCost(fixed_s, row_s)
    gain = cost.gain(rows, ratio, copies_s)
    assert -1 <= gain <= ratio - 1 + 1e-9
    assert gain <= cost.gain(rows, ratio, 0.0) and cost.gain(rows, ratio, 0.0) >= -1e-9
    assert cost.gain(0, ratio, copies_s) == 0
