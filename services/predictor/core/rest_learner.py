"""Learns remaining lengths: keeps the states of running answers and trains a head when they end. Pure.

Every state is predicted at once, so each prediction is later judged by an answer that the head had not
learned from. While the head is no better than the histogram, its predictions are not sent. Bounded: the
oldest running answers are dropped. Source: TRAIL, arXiv 2410.01035.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from services.predictor.core.histogram import HistogramModel
from services.predictor.core.length_model import LengthSample, PredictedLength
from services.predictor.core.rest_heads import HEADS, Counts, Flags, Float32s, Head, Weights
from shared.average import averaged
from shared.messages.sequence import TOKEN_BYTES, SequenceKey

EXTRA = 3
"""Features beside the state: tokens of prompt, answer so far, and limit."""
_BATCH = 96
_BUFFER_BYTES = 32 << 20
_MOST_ROWS = 8192
_MOST_ANSWERS = 4096
_MOST_SEEN = 64
"""Maximum states kept per answer, the latest."""
_ENOUGH = 64
"""Minimum answers before predictions are sent."""
_OFTEN, _SELDOM = 2000, 4
"""After `_OFTEN` answers, only one in `_SELDOM` triggers a training step."""
_UNJUDGED = 32
"""Minimum answers before predictions are judged."""
_ERROR_WEIGHT = 1 / 128


@dataclass(slots=True)
class Seen:
    """One running answer: token counts, and its states."""

    prompt_tokens: int
    max_tokens: int
    states: list[tuple[int, Float32s, float]] = field(default_factory=list)
    """Generated tokens, features, and predicted median of the remaining length."""


class RestLearner:
    """Trains a head of `kind`, a name of `rest_heads.HEADS`, on states of `width` values."""

    def __init__(self, kind: str, width: int, seed: int = 0) -> None:
        self._width = width
        self._head: Head = HEADS[kind](width + EXTRA, seed)
        self._base = HistogramModel()
        self._under_way: OrderedDict[SequenceKey, Seen] = OrderedDict()
        rows = max(_BATCH, min(_MOST_ROWS, _BUFFER_BYTES // (2 * (width + EXTRA))))
        self._features = np.zeros((rows, width + EXTRA), np.float16)
        self._rests: Counts = np.zeros(rows, np.int64)
        self._censored: Flags = np.zeros(rows, np.bool_)
        self._rows = self._next = 0
        self._random = np.random.default_rng(seed)
        self.answers = 0
        self._errors: dict[str, float | None] = {"head": None, "base": None}

    def __len__(self) -> int:
        """Return the number of running answers."""
        return len(self._under_way)

    @property
    def is_better(self) -> bool:
        """Whether its predictions are better than the histogram's."""
        head, base = self._errors["head"], self._errors["base"]
        return self.answers >= _ENOUGH and head is not None and base is not None and head < base

    def observe(
        self, keys: list[SequenceKey], counts: list[tuple[int, int, int]], states: Float32s
    ) -> list[PredictedLength]:
        """Record states `[rows, width]` and return the expected whole length of each answer. `counts`: tokens
        of prompt, answer so far and limit."""
        features = _features(counts, states)
        rests = self._head.predict(features)
        told = []
        for row, (key, (prompt, generated, most)) in enumerate(zip(keys, counts, strict=True)):
            seen = self._under_way.setdefault(key, Seen(prompt, most))
            self._under_way.move_to_end(key)
            if not seen.states or generated > seen.states[-1][0]:
                seen.states.append((generated, features[row], float(rests[row, 1])))
                del seen.states[:-_MOST_SEEN]
            told.append(_whole(rests[row], generated, most))
        while len(self._under_way) > _MOST_ANSWERS:
            self._under_way.popitem(last=False)
        return told

    def finish(self, key: SequenceKey, output_tokens: int, *, censored: bool) -> None:
        """Train on a finished answer; `censored`: it was cut by its limit."""
        seen = self._under_way.pop(key, None)
        states = [] if seen is None else [one for one in seen.states if one[0] < output_tokens]
        if seen is None or not states:
            return
        blank = bytes(seen.prompt_tokens * TOKEN_BYTES)
        if not censored and self.answers >= _UNJUDGED:
            generated, _, rest = states[int(self._random.integers(len(states)))]
            base = self._base.predict(blank, max_tokens=seen.max_tokens, generated_tokens=generated)
            self._judge("head", abs(generated + rest - output_tokens))
            self._judge("base", abs(base.p50_tokens - output_tokens))
        self._base.observe(LengthSample(blank, output_tokens, censored))
        for generated, features, _ in states:
            self._features[self._next] = features
            self._rests[self._next] = output_tokens - generated
            self._censored[self._next] = censored
            self._next = (self._next + 1) % len(self._features)
            self._rows = min(self._rows + 1, len(self._features))
        self.answers += 1
        if self.answers < _OFTEN or self.answers % _SELDOM == 0:
            chosen = self._random.integers(self._rows, size=min(_BATCH, self._rows))
            batch = self._features[chosen].astype(np.float32)
            self._head.learn(batch, self._rests[chosen], self._censored[chosen])

    def forget(self, key: SequenceKey) -> None:
        """Drop an answer whose end says nothing about its length."""
        self._under_way.pop(key, None)

    def _judge(self, name: str, error: float) -> None:
        """Average the error of the head or the histogram on one random state of each answer."""
        weight = max(_ERROR_WEIGHT, 1 / (self.answers - _UNJUDGED + 1))
        self._errors[name] = averaged(self._errors[name], error, weight)

    def summary(self) -> dict[str, Any]:
        """Return the fields for `status`."""
        errors = {f"{name}_error_tokens": round(e, 1) for name, e in self._errors.items() if e is not None}
        return {"answers": self.answers, "under_way": len(self), "is_told": self.is_better, **errors}

    def weights(self) -> Weights:
        """Return what is kept across restarts; running answers are not."""
        errors = [np.nan if error is None else error for error in self._errors.values()]
        return {**self._head.weights(), "answers": np.array(self.answers), "errors": np.array(errors)}

    def restore(self, weights: Weights) -> None:
        """Load the result of `weights`. Raises KeyError or ValueError for another model's."""
        answers, errors = int(weights["answers"]), np.asarray(weights["errors"], np.float64)
        if errors.shape != (2,):
            raise ValueError("errors of something else")
        self._head.restore(weights)
        self.answers = max(0, answers)
        for name, error in zip(self._errors, errors.tolist(), strict=True):
            self._errors[name] = error if np.isfinite(error) else None


def _features(counts: list[tuple[int, int, int]], states: Float32s) -> Float32s:
    """Return features `[rows, width + EXTRA]`; non-finite values become 0."""
    sizes = np.log1p(np.array(counts, np.float32).reshape(len(counts), EXTRA))
    found = np.nan_to_num(np.concatenate([states, sizes], axis=1), nan=0.0, posinf=0.0, neginf=0.0)
    features: Float32s = np.clip(found, -6e4, 6e4).astype(np.float32)
    return features


def _whole(rest: npt.NDArray[np.float64], generated: int, most: int) -> PredictedLength:
    """Return the prediction of the whole answer, in (generated, most]."""
    floor = min(generated + 1, most)
    tokens = [int(min(max(floor, generated + np.ceil(value)), most)) for value in rest]
    quantiles = np.maximum.accumulate(tokens[1:]).tolist()
    return PredictedLength(tokens[0], *quantiles)
