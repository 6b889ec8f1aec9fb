"""The running average: the first measurement counts whole, each later one its weight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.average import averaged


def test_the_first_counts_whole_and_an_old_one_ever_less() -> None:
    value = averaged(None, 2.0, 0.1)
    assert value == 2.0
    assert averaged(value, 4.0, 0.1) == pytest.approx(2.2)
    for _ in range(100):
        value = averaged(value, 4.0, 0.1)
    assert value == pytest.approx(4.0, abs=1e-3)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_it_lies_between_what_was_measured(measured: list[float], weight: float) -> None:
    value: float | None = None
    for one in measured:
        value = averaged(value, one, weight)
    assert value is not None
    assert min(measured) - 1e-6 <= value <= max(measured) + 1e-6
