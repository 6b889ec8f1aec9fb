"""A length distribution given by a few of its quantiles, as a network predicts them.

Between two quantiles the distribution is taken as uniform in the logarithm of the length; below the lowest it
begins at one token, above the highest it ends at as many tokens as the highest is above the 80 % quantile,
taken once more in logarithms. Knows no network.
"""

import math
from collections.abc import Sequence

import numpy as np

from services.predictor.core import distribution
from services.predictor.core.distribution import Floats, summarize
from services.predictor.core.length_model import LengthQuery, PredictedLength

LEVELS = (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)
_MEDIAN, _P80, _P90, _P95 = (LEVELS.index(level) for level in (0.5, 0.8, 0.9, 0.95))
_SHARES = np.diff((0.0, *LEVELS, 1.0))
_LOG_UPPER = np.log(distribution.UPPER + 0.5)
_NARROWEST = 1e-6
"""No piece of a distribution is narrower than this, in logarithms."""


def predict_from(lengths_tokens: Floats, queries: Sequence[LengthQuery]) -> list[PredictedLength]:
    """`lengths_tokens` is [queries, len(LEVELS)]; without an answer so far quantiles are told as is."""
    ascending = np.maximum.accumulate(np.maximum(lengths_tokens, 1.0), axis=1)
    knots = _knots(ascending)
    limits = np.array([max(1, query.max_tokens) for query in queries], dtype=np.float64)
    expected = _expected(knots, limits)
    rounded = np.rint(ascending)
    answers = []
    for row, query in enumerate(queries):
        if query.generated_tokens > 0 or query.max_tokens < 1:
            mass = _mass(knots[row])
            answers.append(
                summarize(mass, max_tokens=query.max_tokens, generated_tokens=query.generated_tokens)
            )
            continue
        p50, p80, p90, p95 = (
            min(int(rounded[row, index]), query.max_tokens) for index in (_MEDIAN, _P80, _P90, _P95)
        )
        mean = min(max(1, math.ceil(expected[row] - 1e-9)), query.max_tokens)
        answers.append(PredictedLength(mean, p50, p80, p90, p95))
    return answers


def mass_of(lengths_tokens: Floats) -> Floats:
    """Probability of each length bin, [distribution.COUNT], from the quantiles [len(LEVELS)]."""
    ascending = np.maximum.accumulate(np.maximum(lengths_tokens, 1.0))
    return _mass(_knots(ascending[None])[0])


def _knots(ascending: Floats) -> Floats:
    """Logarithms of where the pieces begin and end, strictly rising: [queries, len(LEVELS) + 2]."""
    logs = np.log(ascending)
    end = 2 * logs[:, _P95] - logs[:, _P80] + 0.05
    knots = np.concatenate([np.zeros((len(logs), 1)), logs, end[:, None]], axis=1)
    rising: Floats = knots + _NARROWEST * np.arange(knots.shape[1])
    return rising


def _expected(knots: Floats, limits: Floats) -> Floats:
    """Mean of min(length, limit), [queries]; that of a whole piece [a, b] is (b − a) / ln(b / a)."""
    caps = np.log(limits)[:, None]
    low, high = knots[:, :-1], knots[:, 1:]
    cut_low, cut_high = np.minimum(low, caps), np.minimum(high, caps)
    inside = np.exp(cut_high) - np.exp(cut_low)
    beyond = limits[:, None] * (high - np.maximum(low, np.minimum(high, caps)))
    means = (inside + beyond) / (high - low)
    expected: Floats = means @ _SHARES
    return expected


def _mass(knots: Floats) -> Floats:
    below = np.interp(_LOG_UPPER, knots, (0.0, *LEVELS, 1.0))
    below[-1] = 1.0
    mass: Floats = np.diff(below, prepend=0.0)
    return mass
