"""Distributions over bins or from a few quantiles, and predictions from them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.predictor.core import distribution
from services.predictor.core.distribution import LEVELS, longer_than, predict_from, summarize
from services.predictor.core.length_model import LengthQuery


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


lengths_of = st.lists(st.floats(0.1, 1e5), min_size=len(LEVELS), max_size=len(LEVELS))


@settings(max_examples=100, deadline=None)
@given(lengths=lengths_of, max_tokens=st.integers(1, 5000), generated=st.integers(0, 6000))
def test_everything_told_is_possible(lengths: list[float], max_tokens: int, generated: int) -> None:
    (p,) = predict_from(np.array([lengths]), [LengthQuery(b"", max_tokens, generated)])
    values = (p.p50_tokens, p.p80_tokens, p.p90_tokens, p.p95_tokens)
    assert list(values) == sorted(values)
    for value in (*values, p.rl_tokens):
        assert min(generated + 1, max_tokens) <= value <= max_tokens


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.floats(3, 3000), min_size=len(LEVELS), max_size=len(LEVELS)))
def test_the_expectation_agrees_with_that_of_the_bins(lengths: list[float]) -> None:
    """Once there is a token the rest is told by bins; nearly every length here is above one."""
    lengths.sort()
    for limit in (50, 500, 100_000):
        queries = [LengthQuery(b"", limit), LengthQuery(b"", limit, generated_tokens=1)]
        told, binned = predict_from(np.array([lengths, lengths]), queries)
        assert told.rl_tokens == pytest.approx(binned.rl_tokens, rel=0.03, abs=2)


def test_quantiles_are_told_as_they_were_predicted_and_each_query_has_its_own() -> None:
    rows = np.array([[10, 20, 30, 41, 50, 61, 70, 81], [1, 2, 3, 400, 500, 600, 700, 800]], dtype=float)
    first, second = predict_from(rows, [LengthQuery(b"", 1000), LengthQuery(b"", 650)])
    assert (first.p50_tokens, first.p80_tokens, first.p90_tokens, first.p95_tokens) == (41, 61, 70, 81)
    assert (second.p50_tokens, second.p80_tokens, second.p90_tokens, second.p95_tokens) == (
        400,
        600,
        650,
        650,
    )


def test_what_is_there_already_raises_the_rest() -> None:
    rows = np.array([[10, 20, 30, 40, 50, 60, 70, 80]], dtype=float)
    (told,) = predict_from(rows, [LengthQuery(b"", 1000, generated_tokens=65)])
    assert 66 <= told.p50_tokens <= told.rl_tokens + 10 <= 95
