"""The fit to live steps recovers what made them, and slopes are never negative."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.costs.linear import MeasuredStep, fit_linear


def steps(fixed_s: float, prefill_s: float, decode_s: float) -> list[MeasuredStep]:
    return [
        MeasuredStep(p, d, fixed_s + prefill_s * p + decode_s * d)
        for p in (0, 16, 100, 300)
        for d in range(1, 9)
    ]


@given(fixed=st.floats(1e-3, 1e-1), prefill=st.floats(0, 1e-3), decode=st.floats(0, 1e-2))
def test_the_parts_are_recovered(fixed: float, prefill: float, decode: float) -> None:
    cost = fit_linear(steps(fixed, prefill, decode), name="x", overhead_s=0.5)
    assert cost.fixed_s == pytest.approx(fixed + 0.5, rel=1e-6)
    assert cost.step_s([(0, 50)], 4, 0) == pytest.approx(0.5 + fixed + 50 * prefill + 4 * decode, rel=1e-6)


def test_a_falling_slope_is_none() -> None:
    cost = fit_linear(steps(0.1, 0.0, -0.005), name="x")
    assert cost.sequence_s == 0.0
    assert cost.step_s([], 0, 0) == 0.0
    assert cost.step_s([], 3, 0) > 0.05


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit_linear(steps(0.1, 0, 0)[:5], name="x")
