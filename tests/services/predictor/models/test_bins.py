"""Bins cover every length once and are fine enough."""

from hypothesis import given
from hypothesis import strategies as st

from services.predictor.models import bins


@given(tokens=st.integers(1, 1 << 20))
def test_every_length_is_in_its_bin_and_close_to_its_edge(tokens: int) -> None:
    index = bins.bin_of(tokens)
    assert bins.LOWER[index] <= tokens <= bins.UPPER[index]
    assert bins.UPPER[index] <= tokens * 33 / 32 + 1


def test_edges_are_contiguous_and_extremes_have_a_bin() -> None:
    assert (bins.LOWER[1:] == bins.UPPER[:-1] + 1).all()
    assert bins.bin_of(0) == 0
    assert bins.bin_of(10**12) == bins.COUNT - 1
    assert [int(u) for u in bins.UPPER[:3]] == [1, 2, 3]
