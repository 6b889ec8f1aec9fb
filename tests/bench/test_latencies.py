"""Percentiles are values that were measured."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.latencies import percentile, summary

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=50)


@given(VALUES, st.floats(0, 100))
def test_a_percentile_has_so_many_values_at_or_below_it(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= percent / 100 * len(values) - 1e-9


def test_known_percentiles() -> None:
    assert [percentile([4, 1, 3, 2], percent) for percent in (0, 25, 50, 51, 100)] == [1, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no value"):
        percentile([], 50)


def test_summary_is_in_milliseconds() -> None:
    assert summary("ttft", [0.001, 0.003]) == pytest.approx(
        {"ttft_ms_p50": 1.0, "ttft_ms_p99": 3.0, "ttft_ms_mean": 2.0}
    )
