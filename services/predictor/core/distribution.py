"""Length distributions over bins, predictions from them, and the histogram that learns one.

Bins are single tokens up to 64, then 32 per doubling. A distribution may also be given by quantiles, as a
network predicts them. The histogram is the baseline for all other length models. It estimates the probability
of each bin with the product-limit method (Kaplan and Meier 1958), so answers cut by their limit raise the
tail. Pure. Source: papers/003 §2.3; `algorithms.md` §2, residual(g) = E[RL − g | RL > g].
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.predictor.core.length_model import LengthQuery, LengthSample, PredictedLength
from shared.messages.sequence import TOKEN_BYTES

EXACT_TOKENS = 64
_PER_OCTAVE = 32
_OCTAVES = 14
"""Up to 64·2^14 ≈ one million tokens."""


def _upper_edges() -> npt.NDArray[np.int64]:
    edges = list(range(1, EXACT_TOKENS + 1))
    for octave in range(_OCTAVES):
        start, width = EXACT_TOKENS << octave, (EXACT_TOKENS << octave) // _PER_OCTAVE
        edges += [start + width * (step + 1) for step in range(_PER_OCTAVE)]
    return np.array(edges, dtype=np.int64)


UPPER: npt.NDArray[np.int64] = _upper_edges()
LOWER: npt.NDArray[np.int64] = np.concatenate([np.array([1], dtype=np.int64), UPPER[:-1] + 1])
COUNT = len(UPPER)


def bin_of(tokens: int) -> int:
    """Return the index of the bin of `tokens`, clamped to the first and the last bin."""
    return min(int(np.searchsorted(UPPER, max(1, tokens))), COUNT - 1)


Floats = npt.NDArray[np.float64]
_GONE = 1e-12
"""Survival probability that counts as zero."""


def longer_than(mass: Floats, floor_tokens: int) -> Floats:
    """Return `mass` given a length above `floor_tokens`; a partly excluded bin keeps its share."""
    width = UPPER - LOWER + 1
    above = np.clip(UPPER - floor_tokens, 0, width) / width
    kept: Floats = mass * above
    total = float(kept.sum())
    if total > _GONE:
        return kept / total
    nothing_known: Floats = np.zeros_like(mass)
    nothing_known[bin_of(floor_tokens + 1)] = 1.0
    return nothing_known


def summarize(mass: Floats, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
    """Return the prediction of `mass` [COUNT], which sums to 1; values are in (generated, max_tokens]."""
    floor = max(0, generated_tokens)
    if floor >= max_tokens:
        return PredictedLength(max_tokens, max_tokens, max_tokens, max_tokens, max_tokens)
    mass = longer_than(mass, floor)
    lowest = np.maximum(LOWER, floor + 1)
    middle = np.minimum((lowest + np.maximum(UPPER, lowest)) / 2.0, max_tokens)
    expected = math.ceil(float(mass @ middle) - 1e-9)
    shares = np.array((0.5, 0.8, 0.9, 0.95))
    indexes = np.minimum(np.searchsorted(np.cumsum(mass), shares - 1e-9), COUNT - 1)
    return PredictedLength(*np.clip([expected, *UPPER[indexes]], floor + 1, max_tokens).tolist())


LEVELS = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
_MEDIAN, _P80, _P90, _P95 = (LEVELS.index(level) for level in (0.5, 0.8, 0.9, 0.95))
_SHARES = np.diff((0.0, *LEVELS, 1.0))
_LOG_UPPER = np.log(UPPER + 0.5)
_NARROWEST = 1e-6
"""Minimum width of a piece of a distribution, in log length."""


def predict_from(lengths_tokens: Floats, queries: Sequence[LengthQuery]) -> list[PredictedLength]:
    """Return predictions from quantiles [queries, len(LEVELS)], kept as they are if nothing was generated."""
    ascending = np.maximum.accumulate(np.maximum(lengths_tokens, 1.0), axis=1)
    knots = _knots(ascending)
    limits = np.array([max(1, query.max_tokens) for query in queries], dtype=np.float64)
    expected = _expected(knots, limits)
    rounded = np.rint(ascending)
    answers = []
    for row, query in enumerate(queries):
        if query.generated_tokens > 0 or query.max_tokens < 1:
            below = np.interp(_LOG_UPPER, knots[row], (0.0, *LEVELS, 1.0))
            below[-1] = 1.0
            mass = np.diff(below, prepend=0.0)
            generated_tokens = query.generated_tokens
            answers.append(summarize(mass, max_tokens=query.max_tokens, generated_tokens=generated_tokens))
            continue
        p50, p80, p90, p95 = (
            min(int(rounded[row, index]), query.max_tokens) for index in (_MEDIAN, _P80, _P90, _P95)
        )
        mean = min(max(1, math.ceil(expected[row] - 1e-9)), query.max_tokens)
        answers.append(PredictedLength(mean, p50, p80, p90, p95))
    return answers


def _knots(ascending: Floats) -> Floats:
    """Return the log bounds of the pieces, strictly ascending, [queries, len(LEVELS) + 2]."""
    logs = np.log(ascending)
    end = 2 * logs[:, _P95] - logs[:, _P80] + 0.05
    knots = np.concatenate([np.zeros((len(logs), 1)), logs, end[:, None]], axis=1)
    rising: Floats = knots + _NARROWEST * np.arange(knots.shape[1])
    return rising


def _expected(knots: Floats, limits: Floats) -> Floats:
    """Return the mean of min(length, limit), [queries]; a whole piece [a, b] has mean (b − a) / ln(b / a)."""
    caps = np.log(limits)[:, None]
    low, high = knots[:, :-1], knots[:, 1:]
    cut_low, cut_high = np.minimum(low, caps), np.minimum(high, caps)
    inside = np.exp(cut_high) - np.exp(cut_low)
    beyond = limits[:, None] * (high - np.maximum(low, np.minimum(high, caps)))
    means = (inside + beyond) / (high - low)
    expected: Floats = means @ _SHARES
    return expected


_PRIOR_MEDIAN_TOKENS, _PRIOR_SAMPLES = 100.0, 4.0
"""Median of the prior, and its weight in answers."""
_PROMPT_BUCKETS = 22
"""One per power of two of the prompt's tokens."""


class LengthCounts:
    """Decayed counts of ended and censored answers per length bin, each [COUNT]. Both decay with
    every answer, so the latest count most."""

    def __init__(self, window_samples: int) -> None:
        self.ended: Floats = np.zeros(COUNT)
        self.censored: Floats = np.zeros(COUNT)
        self._keep = 1.0 - 1.0 / window_samples

    def add(self, output_tokens: int, censored: bool) -> None:
        self.ended *= self._keep
        self.censored *= self._keep
        (self.censored if censored else self.ended)[bin_of(output_tokens)] += 1.0

    def mass(self, prior: Floats, prior_samples: float) -> Floats:
        """Return the probability of each bin, [COUNT]; `prior` counts as `prior_samples` answers."""
        ended = self.ended + prior * prior_samples
        at_risk = np.cumsum((ended + self.censored)[::-1])[::-1]
        hazard = np.divide(ended, at_risk, out=np.zeros_like(ended), where=at_risk > 0)
        hazard[-1] = 1.0  # every answer ends somewhere
        survival = np.cumprod(1.0 - hazard)
        result: Floats = np.diff(1.0 - survival, prepend=0.0)
        return result


def log_normal_mass(median_tokens: float, sigma: float) -> Floats:
    """Return the probability of each bin under a log-normal law, [COUNT], summing to 1."""
    z = (np.log(UPPER + 0.5) - math.log(median_tokens)) / (sigma * math.sqrt(2.0))
    below = np.array([0.5 * (1.0 + math.erf(value)) for value in z])
    below[-1] = 1.0
    result: Floats = np.diff(below, prepend=0.0)
    return result


class HistogramModel:
    """Predicts from earlier answers to prompts of similar length. A bucket with few samples falls back on all
    prompts together, and those on a log-normal prior. Memory is fixed: prompt buckets × bins."""

    name = "histogram"

    def __init__(self, *, window_samples: int = 4000) -> None:
        """An answer's weight decays to 1/e in `window_samples` answers."""
        self._prior = log_normal_mass(_PRIOR_MEDIAN_TOKENS, sigma=1.0)
        self._everything = LengthCounts(window_samples)
        self._buckets = [LengthCounts(window_samples) for _ in range(_PROMPT_BUCKETS)]
        self._mass_by_bucket: dict[int, Floats] = {}
        self._updates = 0

    @property
    def version(self) -> str:
        return f"histogram-{self._updates}"

    def observe(self, sample: LengthSample) -> None:
        self._everything.add(sample.output_tokens, sample.censored)
        self._buckets[_bucket(sample.prompt)].add(sample.output_tokens, sample.censored)
        self._mass_by_bucket.clear()
        self._updates += 1

    def _mass(self, bucket: int) -> Floats:
        mass = self._mass_by_bucket.get(bucket)
        if mass is None:
            overall = self._everything.mass(self._prior, _PRIOR_SAMPLES)
            mass = self._buckets[bucket].mass(overall, _PRIOR_SAMPLES)
            self._mass_by_bucket[bucket] = mass
        return mass

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        mass = self._mass(_bucket(prompt))
        return summarize(mass, max_tokens=max_tokens, generated_tokens=generated_tokens)


def _bucket(prompt: bytes) -> int:
    return min((len(prompt) // TOKEN_BYTES).bit_length(), _PROMPT_BUCKETS - 1)
