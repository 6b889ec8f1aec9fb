"""The histogram model against the distributions that it learns from."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.predictor.core.histogram import HistogramModel
from services.predictor.core.length_model import LengthSample, PredictedLength
from shared.messages.sequence import pack_tokens

SHORT, LONG = pack_tokens(range(10)), pack_tokens(range(500))
EDGE_ERROR = 1.04
"""A quantile is a bin's upper edge, at most 1/32 above the value."""


def taught(lengths: list[int], prompt: bytes = SHORT, cap: int | None = None) -> HistogramModel:
    model = HistogramModel()
    for length in lengths:
        cut = cap is not None and length > cap
        model.observe(LengthSample(prompt, cap if cut and cap is not None else length, censored=cut))
    return model


def in_order(p: PredictedLength) -> bool:
    return p.p50_tokens <= p.p80_tokens <= p.p90_tokens <= p.p95_tokens


@settings(max_examples=60, deadline=None)
@given(
    samples=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 5000), st.booleans()), max_size=60),
    prompt=st.integers(0, 3000),
    max_tokens=st.integers(1, 6000),
    generated=st.integers(0, 6000),
)
def test_quantiles_rise_and_stay_between_what_is_there_and_the_limit(
    samples: list[tuple[int, int, bool]], prompt: int, max_tokens: int, generated: int
) -> None:
    model = HistogramModel()
    for prompt_tokens, output, censored in samples:
        model.observe(LengthSample(pack_tokens([1] * prompt_tokens), output, censored))
    p = model.predict(pack_tokens([1] * prompt), max_tokens=max_tokens, generated_tokens=generated)
    assert in_order(p)
    for value in (p.rl_tokens, p.p50_tokens, p.p95_tokens):
        assert min(generated + 1, max_tokens) <= value <= max_tokens


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), median=st.integers(5, 400), sigma=st.floats(0.2, 1.2))
def test_converges_to_the_empirical_distribution(seed: int, median: int, sigma: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.ceil(rng.lognormal(math.log(median), sigma, 1500)).clip(1, 20_000).astype(int)
    p = taught(lengths.tolist()).predict(SHORT, max_tokens=100_000)
    quantiles = {0.5: p.p50_tokens, 0.8: p.p80_tokens, 0.9: p.p90_tokens, 0.95: p.p95_tokens}
    for share, predicted in quantiles.items():
        low, high = np.quantile(lengths, [share - 0.03, min(share + 0.03, 1.0)])
        assert low <= predicted <= high * EDGE_ERROR + 1
    assert p.rl_tokens == pytest.approx(lengths.mean(), rel=0.15, abs=3)


def test_conditional_expectation_is_the_mean_of_what_is_longer() -> None:
    model = taught([10, 10, 10, 50, 100] * 300)
    assert model.predict(SHORT, max_tokens=1000, generated_tokens=10).rl_tokens == pytest.approx(75, abs=4)
    assert model.predict(SHORT, max_tokens=1000, generated_tokens=60).rl_tokens == pytest.approx(100, abs=6)


def test_answers_cut_by_their_limit_are_not_taken_for_lengths() -> None:
    rng = np.random.default_rng(7)
    lengths = np.ceil(rng.exponential(100.0, 3000)).astype(int).tolist()
    p = taught(lengths, cap=80).predict(SHORT, max_tokens=10_000)
    assert p.p50_tokens == pytest.approx(69, rel=0.1)
    assert p.p90_tokens > 85, "the tail above the cap comes from the prior, not from the cap"


def test_prompt_length_matters_and_an_unseen_bucket_leans_on_all() -> None:
    model = taught([5] * 300)
    for _ in range(300):
        model.observe(LengthSample(LONG, 200, censored=False))
    assert model.predict(SHORT, max_tokens=1000).p50_tokens == 5
    assert model.predict(LONG, max_tokens=1000).p50_tokens == pytest.approx(200, rel=0.04)
    assert 5 <= model.predict(pack_tokens(range(70)), max_tokens=1000).p50_tokens <= 206


def test_old_answers_fade() -> None:
    model = HistogramModel(window_samples=100)
    for length in [400] * 500 + [20] * 500:
        model.observe(LengthSample(SHORT, length, censored=False))
    assert model.predict(SHORT, max_tokens=1000).p80_tokens == 20
