"""Learns remaining lengths of running answers: heads that predict from hidden states, trained while serving.

Every state is predicted at once, so each prediction is later judged by an answer that the head had not
learned from. While the head is no better than the histogram, its predictions are not sent. Bounded: the
oldest running answers are dropped. `DistributionHead` predicts the probability of each class of remaining
lengths (TRAIL, arXiv 2410.01035). `RankHead` only ranks answers by remaining length (arXiv 2408.15792), and
takes lengths from earlier answers of similar score. Both have one hidden layer in numpy, trained with Adam.
Deterministic for a seed. Pure.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from services.predictor.core.distribution import HistogramModel
from services.predictor.core.length_model import LengthSample, PredictedLength
from shared.average import averaged
from shared.messages.sequence import TOKEN_BYTES, SequenceKey

Float32s = npt.NDArray[np.float32]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Weights = Mapping[str, npt.NDArray[np.generic]]

QUANTILES = (0.5, 0.8, 0.9, 0.95)
UPPER = np.array(
    [1, 2, 3, *[size << octave for octave in range(16) for size in (4, 6)][:-1]], dtype=np.float64
)
"""Upper edges of the classes of remaining tokens: two per octave, up to 131,072."""
LOWER = np.concatenate([[0.0], UPPER[:-1]])
_HIDDEN, _RATE = 64, 2e-3


def class_of(rests: Counts) -> Counts:
    """Return the class index of each remaining length."""
    found: Counts = np.minimum(np.searchsorted(UPPER, rests), len(UPPER) - 1)
    return found


class Head(ABC):
    """Maps features `[rows, width]` to remaining lengths in tokens. The network has one hidden layer and is
    trained with Adam. Features are standardized by running mean and spread."""

    _outputs = 1

    def __init__(self, width: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self._parts: dict[str, Float32s] = {
            "in": (random.standard_normal((width, _HIDDEN)) / np.sqrt(width)).astype(np.float32),
            "in_bias": np.zeros(_HIDDEN, np.float32),
            "out": np.zeros((_HIDDEN, self._outputs), np.float32),
            "out_bias": np.zeros(self._outputs, np.float32),
            "mean": np.zeros(width, np.float32),
            "square": np.ones(width, np.float32),
        }
        self._trained = ("in", "in_bias", "out", "out_bias")
        self._first = {name: np.zeros_like(self._parts[name]) for name in self._trained}
        self._second = {name: np.zeros_like(self._parts[name]) for name in self._trained}
        self._steps = 0

    def forward(self, features: Float32s) -> tuple[Float32s, Float32s, Float32s]:
        """Return standardized features, hidden layer and outputs."""
        parts = self._parts
        spread = np.sqrt(np.maximum(parts["square"] - parts["mean"] ** 2, 1e-6))
        inputs: Float32s = np.clip((features - parts["mean"]) / spread, -8.0, 8.0)
        hidden: Float32s = np.tanh(inputs @ parts["in"] + parts["in_bias"])
        outputs: Float32s = hidden @ parts["out"] + parts["out_bias"]
        return inputs, hidden, outputs

    def see(self, features: Float32s) -> None:
        """Update mean and spread with a batch of features."""
        weight = max(0.01, 1.0 / (self._steps + 1))
        for name, value in (("mean", features.mean(0)), ("square", (features**2).mean(0))):
            self._parts[name] += weight * (value - self._parts[name])

    def step(self, inputs: Float32s, hidden: Float32s, gradient: Float32s) -> None:
        """Update the weights; `gradient` is the loss gradient at the outputs."""
        parts = self._parts
        back = (gradient @ parts["out"].T) * (1 - hidden**2)
        gradients = {
            "in": inputs.T @ back + 1e-4 * parts["in"],
            "in_bias": back.sum(0),
            "out": hidden.T @ gradient + 1e-4 * parts["out"],
            "out_bias": gradient.sum(0),
        }
        self._steps += 1
        scale = np.float32(np.sqrt(1 - 0.999**self._steps) / (1 - 0.9**self._steps))
        for name, found in gradients.items():
            self._first[name] += 0.1 * (found - self._first[name])
            self._second[name] += 0.001 * (found**2 - self._second[name])
            parts[name] -= _RATE * scale * self._first[name] / (np.sqrt(self._second[name]) + 1e-8)

    @abstractmethod
    def learn(self, features: Float32s, rests: Counts, censored: Flags) -> None:
        """Train one step on a batch of rows."""

    @abstractmethod
    def predict(self, features: Float32s) -> npt.NDArray[np.float64]:
        """Return `[rows, 5]`: expected remaining length, then its `QUANTILES`; each at least 1."""

    def weights(self) -> Weights:
        """Return the trained weights by name."""
        return {**self._parts, "steps": np.array(self._steps)}

    def restore(self, weights: Weights) -> None:
        """Load weights. Raises KeyError or ValueError; then nothing has changed."""
        found = {name: np.asarray(weights[name], np.float32) for name in self._parts}
        if any(
            found[name].shape != part.shape or not np.isfinite(found[name]).all()
            for name, part in self._parts.items()
        ):
            raise ValueError("weights of another model, or broken ones")
        steps = int(weights["steps"])
        self._parts, self._steps = found, max(0, steps)


class DistributionHead(Head):
    """Head that predicts a probability for each class of remaining lengths."""

    _outputs = len(UPPER)

    def learn(self, features: Float32s, rests: Counts, censored: Flags) -> None:
        """Train towards the true class, or for a censored row towards all classes at or above its own."""
        self.see(features)
        inputs, hidden, outputs = self.forward(features)
        chances = _softmax(outputs)
        classes = class_of(rests)[:, None]
        possible = np.where(
            censored[:, None], np.arange(len(UPPER)) >= classes, np.arange(len(UPPER)) == classes
        )
        wanted = chances * possible
        wanted /= np.maximum(wanted.sum(1, keepdims=True), 1e-12)
        self.step(inputs, hidden, ((chances - wanted) / len(features)).astype(np.float32))

    def predict(self, features: Float32s) -> npt.NDArray[np.float64]:
        chances = _softmax(self.forward(features)[2])
        below = np.cumsum(chances, axis=1)
        columns = [np.maximum(1.0, chances @ ((LOWER + 1 + UPPER) / 2))]
        rows = np.arange(len(chances))
        for share in QUANTILES:
            index = np.minimum((below < share - 1e-9).sum(1), len(UPPER) - 1)
            before = np.where(index > 0, below[rows, index - 1], 0.0)
            part = np.clip((share - before) / np.maximum(chances[rows, index], 1e-12), 0.0, 1.0)
            columns.append(np.maximum(1.0, LOWER[index] + part * (UPPER[index] - LOWER[index])))
        return np.stack(columns, axis=1)


_LIST = 24
"""Rows ranked together as one list."""
_MEMORY = 1024
_NEAREST = 48


class RankHead(Head):
    """Head whose score grows with the remaining length; lengths are those of the nearest earlier scores."""

    def __init__(self, width: int, seed: int = 0) -> None:
        super().__init__(width, seed)
        self._memory = np.zeros((0, 2))
        """Latest scores and remaining lengths, `[rows, 2]`."""

    def learn(self, features: Float32s, rests: Counts, censored: Flags) -> None:
        """Train on the likelihood of the true order of each list; censored rows count as complete."""
        self.see(features)
        inputs, hidden, outputs = self.forward(features)
        gradient = np.zeros_like(outputs)
        for start in range(0, len(features), _LIST):
            rows = np.arange(start, min(start + _LIST, len(features)))
            order = rows[np.argsort(-rests[rows], kind="stable")]
            gradient[order, 0] = _order_gradient(outputs[order, 0]) / len(features)
        self.step(inputs, hidden, gradient)
        latest = np.stack([outputs[:, 0].astype(np.float64), rests.astype(np.float64)], axis=1)
        self._memory = np.concatenate([self._memory, latest])[-_MEMORY:]

    def predict(self, features: Float32s) -> npt.NDArray[np.float64]:
        if not len(self._memory):
            return np.ones((len(features), 1 + len(QUANTILES)))
        scores = self.forward(features)[2][:, 0]
        by_score = self._memory[np.argsort(self._memory[:, 0], kind="stable")]
        count = min(_NEAREST, len(by_score))
        starts = np.searchsorted(by_score[:, 0], scores) - count // 2
        starts = np.clip(starts, 0, len(by_score) - count)
        near = np.sort(by_score[starts[:, None] + np.arange(count), 1], axis=1)
        columns = [near.mean(1), *(near[:, min(count - 1, int(share * count))] for share in QUANTILES)]
        told: npt.NDArray[np.float64] = np.maximum(1.0, np.stack(columns, axis=1))
        return told

    def weights(self) -> Weights:
        return {**super().weights(), "memory": self._memory}

    def restore(self, weights: Weights) -> None:
        memory = np.asarray(weights["memory"], np.float64)
        if memory.ndim != 2 or memory.shape[1] != 2 or not np.isfinite(memory).all():
            raise ValueError("scores of another head, or broken ones")
        super().restore(weights)
        self._memory = memory[-_MEMORY:]


HEADS: dict[str, type[Head]] = {"distribution": DistributionHead, "rank": RankHead}


def _softmax(outputs: Float32s) -> npt.NDArray[np.float64]:
    raised = np.exp(outputs.astype(np.float64) - outputs.max(1, keepdims=True))
    chances: npt.NDArray[np.float64] = raised / raised.sum(1, keepdims=True)
    return chances


def _order_gradient(scores: Float32s) -> Float32s:
    """Return the gradient, by each score, of the negative log-likelihood of this descending order."""
    raised = np.exp(scores.astype(np.float64) - scores.max())
    left = np.maximum(np.cumsum(raised[::-1])[::-1], 1e-300)
    gradient: Float32s = (raised * np.cumsum(1.0 / left) - 1.0).astype(np.float32)
    return gradient


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
    """Trains a head of `kind`, a name of `HEADS`, on states of `width` values."""

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
