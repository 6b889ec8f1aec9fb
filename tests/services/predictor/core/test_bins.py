"""Bins cover every length once and are fine enough."""

from hypothesis import given
from hypothesis import strategies as st

from services.predictor.core import distribution


@given(tokens=st.integers(1, 1 << 20))
def test_every_length_is_in_its_bin_and_close_to_its_edge(tokens: int) -> None:
    index = distribution.bin_of(tokens)
    assert distribution.LOWER[index] <= tokens <= distribution.UPPER[index]
    assert distribution.UPPER[index] <= tokens * 33 / 32 + 1


def test_edges_are_contiguous_and_extremes_have_a_bin() -> None:
    assert (distribution.LOWER[1:] == distribution.UPPER[:-1] + 1).all()
    assert distribution.bin_of(0) == 0
    assert distribution.bin_of(10**12) == distribution.COUNT - 1
    assert [int(u) for u in distribution.UPPER[:3]] == [1, 2, 3]
