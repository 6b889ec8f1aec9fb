"""The search for the highest rate that is sustained: it ends, and finds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.live.serve.search import knee_step, nearest_step, next_step


def search(knee: int, first: int) -> dict[int, bool]:
    """Steps tried, where everything up to `knee` is sustained."""
    tried: dict[int, bool] = {}
    while (step := next_step(tried, first)) is not None:
        assert step not in tried
        tried[step] = step <= knee
    return tried


@given(knee=st.integers(-47, 47), first=st.integers(-30, 30))
def test_it_finds_the_knee(knee: int, first: int) -> None:
    tried = search(knee, first)
    assert knee_step(tried) == knee
    assert tried[knee] and not tried[knee + 1]


@given(knee=st.integers(-8, 8))
def test_it_takes_few_tries_near_the_beginning(knee: int) -> None:
    assert len(search(knee, 0)) <= 8


def test_what_no_rate_overloads_ends_too() -> None:
    assert knee_step(search(1000, 0)) == 48


def test_what_sustains_nothing_has_no_knee() -> None:
    assert knee_step(search(-1000, 0)) is None


@given(answers=st.dictionaries(st.integers(-48, 48), st.booleans(), max_size=30), first=st.integers(-9, 9))
def test_noise_does_not_lead_it_in_circles(answers: dict[int, bool], first: int) -> None:
    step = next_step(answers, first)
    assert step is None or step not in answers or step == first
    knee = knee_step(answers)
    assert knee is None or answers[knee]


@pytest.mark.parametrize(("rate", "step"), [(10.0, 0), (12.1, 2), (8.3, -2), (1e9, 48), (1e-9, -48)])
def test_a_rate_has_a_nearest_step(rate: float, step: int) -> None:
    assert nearest_step(rate, 10.0, 1.1) == step
