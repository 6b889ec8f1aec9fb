"""Bisection finds the edge to its tolerance, and says when there is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.knee import TOLERANCE, sustained_rate


@given(edge=st.floats(0.01, 3.9))
def test_the_edge_is_found(edge: float) -> None:
    found = sustained_rate(lambda rate: rate <= edge, 1.0)
    assert found <= edge <= found * (1 + TOLERANCE) * (1 + 1e-9)


def test_nothing_and_everything() -> None:
    assert sustained_rate(lambda rate: False, 1.0) == 0.0
    assert sustained_rate(lambda rate: True, 1.0) == pytest.approx(4.0)
