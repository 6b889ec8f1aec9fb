"""Figure 12's table: the best value, and what the worst costs."""

import pytest

from bench.simulated.ecoserve.sensitivity import best_rows


def test_best_and_worst() -> None:
    curves = {"JCT": {"alpaca": [(0.0, 12.0), (0.1, 10.0), (0.5, 15.0)]}, "throughput": {}, "SLO": {}}
    (row,) = best_rows({"pad": curves})
    assert row[:3] == ("pad", "alpaca", 0.1)
    assert row[3] == pytest.approx(0.5)
    assert row[4] == "0.1"
