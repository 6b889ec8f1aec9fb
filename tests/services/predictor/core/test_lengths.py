"""Features of requests, distributions of lengths, the histogram, and the report on predictions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.predictor.core import distribution
from services.predictor.core.distribution import LEVELS, HistogramModel, longer_than, predict_from, summarize
from services.predictor.core.features import BUCKETS, features_of
from services.predictor.core.length_model import LengthQuery, LengthSample, PredictedLength
from services.predictor.core.report import PredictionAudit, score
from shared.messages.sequence import pack_tokens


def mass_at(*lengths: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    mass = np.zeros(distribution.COUNT)
    for length in lengths:
        mass[distribution.bin_of(length)] += 1 / len(lengths)
    return mass


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=9), floor=st.integers(0, 6000))
def test_what_is_left_above_a_floor_sums_to_one(lengths: list[int], floor: int) -> None:
    left = longer_than(mass_at(*lengths), floor)
    assert left.sum() == pytest.approx(1.0) and left[floor >= distribution.UPPER].sum() == 0


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


@given(lengths=lengths_of, max_tokens=st.integers(1, 5000), generated=st.integers(0, 6000))
def test_everything_told_is_possible(lengths: list[float], max_tokens: int, generated: int) -> None:
    (p,) = predict_from(np.array([lengths]), [LengthQuery(b"", max_tokens, generated)])
    values = (p.p50_tokens, p.p80_tokens, p.p90_tokens, p.p95_tokens)
    assert list(values) == sorted(values)
    for value in (*values, p.rl_tokens):
        assert min(generated + 1, max_tokens) <= value <= max_tokens


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
    assert [getattr(second, f"p{share}_tokens") for share in (50, 80, 90, 95)] == [400, 600, 650, 650]


def test_what_is_there_already_raises_the_rest() -> None:
    rows = np.array([[10, 20, 30, 40, 50, 60, 70, 80]], dtype=float)
    (told,) = predict_from(rows, [LengthQuery(b"", 1000, generated_tokens=65)])
    assert 66 <= told.p50_tokens <= told.rl_tokens + 10 <= 95


prompts_of = st.lists(st.lists(st.integers(0, 200_000), max_size=400), min_size=1, max_size=6)


def split(prompts: list[bytes]) -> list[set[int]]:
    features = features_of(prompts)
    ends = [*features.offsets[1:], len(features.buckets)]
    return [{int(b) for b in features.buckets[s:end]} for s, end in zip(features.offsets, ends, strict=True)]


@settings(max_examples=50)
@given(prompts=prompts_of)
def test_a_prompt_looks_the_same_alone_and_among_others(prompts: list[list[int]]) -> None:
    packed = [pack_tokens(prompt) for prompt in prompts]
    together = split(packed)
    assert together == [split([one])[0] for one in packed]
    features = features_of(packed)
    assert len(features.weights) == len(features.buckets) and features.dense.shape[0] == len(prompts)
    assert ((features.buckets >= 0) & (features.buckets < BUCKETS)).all()
    for row, found in enumerate(together):
        if found:
            assert np.isclose(features.weights[features.offsets[row]], 1 / np.sqrt(len(found)))


def test_one_token_more_or_another_order_is_seen() -> None:
    plain, longer, swapped = split([pack_tokens(ids) for ids in ([1, 2, 3], [1, 2, 3, 4], [2, 1, 3])])
    assert plain < longer and swapped != plain


def test_the_middle_of_a_very_long_prompt_is_not_looked_at() -> None:
    head, tail = list(range(250)), list(range(1000, 1300))
    first, second = split([pack_tokens(head + [middle] * 500 + tail) for middle in (7, 8)])
    assert first == second


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


@settings(max_examples=60)
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


@settings(max_examples=25)
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


def test_each_figure_is_what_its_name_says() -> None:
    told = PredictedLength(rl_tokens=100, p50_tokens=80, p80_tokens=120, p90_tokens=150, p95_tokens=200)
    report = score([(told, length) for length in (40, 80, 115, 116, 300)])
    assert report is not None and report.scored == 5
    assert report.mae_tokens == pytest.approx((40 + 0 + 35 + 36 + 220) / 5)
    assert report.within_50_share == report.within_100_share == 0.8
    assert report.under_share == 0.4, "116 and 300 are above 115"
    assert report.over_share == 0.4, "40 and 80 are below"
    assert report.over_tokens == pytest.approx((75 + 35) / 5) and report.below_p50_share == 0.4
    assert report.below_p80_share == report.below_p90_share == report.below_p95_share == 0.8
    assert report.as_dict()["mae_tokens"] == 66.2


def says(tokens: int) -> PredictedLength:
    return PredictedLength(tokens, tokens, tokens, tokens, tokens)


def test_scores_first_predictions_of_whole_answers() -> None:
    audit = PredictionAudit()
    audit.on_predicted(("a", 0), says(100))
    audit.on_predicted(("a", 0), says(500))
    audit.on_predicted(("b", 0), says(10))
    audit.on_predicted(("c", 0), says(10))
    audit.on_finished(("a", 0), 40, censored=False)
    audit.on_finished(("b", 0), 90, censored=False)
    audit.on_finished(("c", 0), 90, censored=True)
    audit.on_finished(("unknown", 0), 90, censored=False)
    summary = audit.summary()
    assert (summary["finished"], summary["scored"], summary["mae_tokens"]) == (4, 2, 70.0)
    audit.check_integrity()


def test_memory_is_bounded() -> None:
    audit = PredictionAudit(waiting_limit=3, window=2)
    assert audit.summary() == {"predictions": 0, "finished": 0, "scored": 0}
    for number in range(10):
        audit.on_predicted((str(number), 0), says(1))
        audit.check_integrity()
    for number in range(10):
        audit.on_finished((str(number), 0), 1, censored=False)
    assert audit.summary()["scored"] == 2
