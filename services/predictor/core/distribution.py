"""Answer lengths in bins, and from the probability of each bin to a prediction, given what is there already.

Bins are single tokens up to 64, then 32 to each doubling. Pure arithmetic; knows no model.
Source: `algorithms.md` §2, residual(g) = E[RL − g | RL > g].
"""

import math

import numpy as np
import numpy.typing as npt

from services.predictor.core.length_model import PredictedLength

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
    """Index of the bin that holds `tokens`; below 1 counts as 1, beyond the last edge as the last bin."""
    return min(int(np.searchsorted(UPPER, max(1, tokens))), COUNT - 1)


Floats = npt.NDArray[np.float64]
_GONE = 1e-12
"""A survival below this is none: nothing is known beyond that length."""


def longer_than(mass: Floats, floor_tokens: int) -> Floats:
    """`mass` given a length above `floor_tokens`; a bin that the floor cuts keeps its share above it."""
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
    """`mass` [COUNT] sums to 1. Every value is in (generated, max_tokens]."""
    floor = max(0, generated_tokens)
    if floor >= max_tokens:
        return PredictedLength(max_tokens, max_tokens, max_tokens, max_tokens, max_tokens)
    mass = longer_than(mass, floor)
    lowest = np.maximum(LOWER, floor + 1)
    middle = np.minimum((lowest + np.maximum(UPPER, lowest)) / 2.0, max_tokens)
    expected = math.ceil(float(mass @ middle) - 1e-9)
    below = np.cumsum(mass)

    def within(tokens: int) -> int:
        return min(max(tokens, floor + 1), max_tokens)

    def quantile(share: float) -> int:
        index = min(int(np.searchsorted(below, share - 1e-9)), COUNT - 1)
        return within(int(UPPER[index]))

    return PredictedLength(within(expected), quantile(0.5), quantile(0.8), quantile(0.9), quantile(0.95))
