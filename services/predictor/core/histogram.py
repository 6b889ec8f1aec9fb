"""Histogram of answer lengths by prompt length: the baseline for all other length models.

It estimates the probability of each length bin with the product-limit method (Kaplan and Meier 1958), so
answers cut by their limit raise the tail. A bucket with few samples falls back on all prompts together, and
those on a log-normal prior. Source: papers/003 §2.3, `algorithms.md` §2.
"""

import math

import numpy as np

from services.predictor.core import distribution
from services.predictor.core.distribution import Floats, summarize
from services.predictor.core.length_model import LengthSample, PredictedLength
from shared.messages.sequence import TOKEN_BYTES

_PRIOR_MEDIAN_TOKENS, _PRIOR_SAMPLES = 100.0, 4.0
"""Median of the prior, and its weight in answers."""
_PROMPT_BUCKETS = 22
"""One per power of two of the prompt's tokens."""


class LengthCounts:
    """Decayed counts of ended and censored answers per length bin, each [distribution.COUNT]. Both decay with
    every answer, so the latest count most."""

    def __init__(self, window_samples: int) -> None:
        self.ended: Floats = np.zeros(distribution.COUNT)
        self.censored: Floats = np.zeros(distribution.COUNT)
        self._keep = 1.0 - 1.0 / window_samples

    def add(self, output_tokens: int, censored: bool) -> None:
        self.ended *= self._keep
        self.censored *= self._keep
        (self.censored if censored else self.ended)[distribution.bin_of(output_tokens)] += 1.0

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
    """Return the probability of each bin under a log-normal law, [distribution.COUNT], summing to 1."""
    z = (np.log(distribution.UPPER + 0.5) - math.log(median_tokens)) / (sigma * math.sqrt(2.0))
    below = np.array([0.5 * (1.0 + math.erf(value)) for value in z])
    below[-1] = 1.0
    result: Floats = np.diff(below, prepend=0.0)
    return result


class HistogramModel:
    """Predicts from earlier answers to prompts of similar length. Memory is fixed: prompt buckets × bins."""

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
