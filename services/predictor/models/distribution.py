"""From the probability of each length bin to a prediction: quantiles and expectation, given what is there.

Pure arithmetic on the bins of `bins.py`. Knows no model. Source: `algorithms.md` §2, residual(g) = E[RL − g |
RL > g].
"""

import math

import numpy as np
import numpy.typing as npt

from services.predictor.models import bins
from services.predictor.models.base import PredictedLength

Floats = npt.NDArray[np.float64]
_GONE = 1e-12
"""A survival below this is none: nothing is known beyond that length."""


def longer_than(mass: Floats, floor_tokens: int) -> Floats:
    """`mass` given a length above `floor_tokens`; a bin that the floor cuts keeps its share above it."""
    width = bins.UPPER - bins.LOWER + 1
    above = np.clip(bins.UPPER - floor_tokens, 0, width) / width
    kept: Floats = mass * above
    total = float(kept.sum())
    if total > _GONE:
        return kept / total
    nothing_known: Floats = np.zeros_like(mass)
    nothing_known[bins.bin_of(floor_tokens + 1)] = 1.0
    return nothing_known


def summarize(mass: Floats, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
    """`mass` [bins.COUNT] sums to 1. Every value is in (generated, max_tokens]."""
    floor = max(0, generated_tokens)
    if floor >= max_tokens:
        return PredictedLength(max_tokens, max_tokens, max_tokens, max_tokens, max_tokens)
    mass = longer_than(mass, floor)
    lowest = np.maximum(bins.LOWER, floor + 1)
    middle = np.minimum((lowest + np.maximum(bins.UPPER, lowest)) / 2.0, max_tokens)
    expected = math.ceil(float(mass @ middle) - 1e-9)
    below = np.cumsum(mass)

    def within(tokens: int) -> int:
        return min(max(tokens, floor + 1), max_tokens)

    def quantile(share: float) -> int:
        index = min(int(np.searchsorted(below, share - 1e-9)), bins.COUNT - 1)
        return within(int(bins.UPPER[index]))

    return PredictedLength(within(expected), quantile(0.5), quantile(0.8), quantile(0.9), quantile(0.95))
