"""Predictions from bins.

Bins cover every length once and are fine enough.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.predictor.core import distribution
from services.predictor.core.distribution import longer_than, summarize


def mass_at(*lengths: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    mass = np.zeros(distribution.COUNT)
    for length in lengths:
        mass[distribution.bin_of(length)] += 1 / len(lengths)
    return mass


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=9), floor=st.integers(0, 6000))
def test_what_is_left_above_a_floor_sums_to_one(lengths: list[int], floor: int) -> None:
    left = longer_than(mass_at(*lengths), floor)
    assert left.sum() == pytest.approx(1.0)
    assert left[floor >= distribution.UPPER].sum() == 0


def test_quantiles_and_expectation_of_a_few_lengths() -> None:
    told = summarize(mass_at(10, 20, 30, 40), max_tokens=1000)
    assert (told.rl_tokens, told.p50_tokens, told.p80_tokens, told.p95_tokens) == (25, 20, 40, 40)
    later = summarize(mass_at(10, 20, 30, 40), max_tokens=1000, generated_tokens=25)
    assert (later.rl_tokens, later.p50_tokens) == (35, 30)
    cut = summarize(mass_at(10, 20, 30, 40), max_tokens=22)
    assert (cut.rl_tokens, cut.p80_tokens) == (19, 22)


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
