"""Heads that predict the remaining length of an answer from a hidden state, trained while serving.

`DistributionHead` predicts the probability of each class of remaining lengths (TRAIL, arXiv 2410.01035).
`RankHead` only ranks answers by remaining length (arXiv 2408.15792), and takes lengths from earlier answers
of similar score. Both have one hidden layer in numpy, trained with Adam. Deterministic for a seed.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

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
_HIDDEN = 64


def class_of(rests: Counts) -> Counts:
    """Return the class index of each remaining length."""
    found: Counts = np.minimum(np.searchsorted(UPPER, rests), len(UPPER) - 1)
    return found


class Network:
    """One hidden layer, trained with Adam; features are standardized by running mean and spread."""

    def __init__(self, width: int, outputs: int, seed: int = 0, rate: float = 2e-3) -> None:
        random = np.random.default_rng(seed)
        self._rate = rate
        self._parts: dict[str, Float32s] = {
            "in": (random.standard_normal((width, _HIDDEN)) / np.sqrt(width)).astype(np.float32),
            "in_bias": np.zeros(_HIDDEN, np.float32),
            "out": np.zeros((_HIDDEN, outputs), np.float32),
            "out_bias": np.zeros(outputs, np.float32),
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
            parts[name] -= self._rate * scale * self._first[name] / (np.sqrt(self._second[name]) + 1e-8)

    def weights(self) -> dict[str, npt.NDArray[np.generic]]:
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


class Head(ABC):
    """Maps features `[rows, width]` to remaining lengths in tokens."""

    _outputs = 1

    def __init__(self, width: int, seed: int = 0) -> None:
        self._network = Network(width, self._outputs, seed)

    @abstractmethod
    def learn(self, features: Float32s, rests: Counts, censored: Flags) -> None:
        """Train one step on a batch of rows."""

    @abstractmethod
    def predict(self, features: Float32s) -> npt.NDArray[np.float64]:
        """Return `[rows, 5]`: expected remaining length, then its `QUANTILES`; each at least 1."""

    def weights(self) -> Weights:
        """Return the trained weights by name."""
        return self._network.weights()

    def restore(self, weights: Weights) -> None:
        """Load the result of `weights`. Raises ValueError or KeyError for another shape."""
        self._network.restore(weights)


class DistributionHead(Head):
    """Head that predicts a probability for each class of remaining lengths."""

    _outputs = len(UPPER)

    def learn(self, features: Float32s, rests: Counts, censored: Flags) -> None:
        """Train towards the true class, or for a censored row towards all classes at or above its own."""
        self._network.see(features)
        inputs, hidden, outputs = self._network.forward(features)
        chances = _softmax(outputs)
        classes = class_of(rests)[:, None]
        possible = np.where(
            censored[:, None], np.arange(len(UPPER)) >= classes, np.arange(len(UPPER)) == classes
        )
        wanted = chances * possible
        wanted /= np.maximum(wanted.sum(1, keepdims=True), 1e-12)
        self._network.step(inputs, hidden, ((chances - wanted) / len(features)).astype(np.float32))

    def predict(self, features: Float32s) -> npt.NDArray[np.float64]:
        chances = _softmax(self._network.forward(features)[2])
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
        self._network.see(features)
        inputs, hidden, outputs = self._network.forward(features)
        gradient = np.zeros_like(outputs)
        for start in range(0, len(features), _LIST):
            rows = np.arange(start, min(start + _LIST, len(features)))
            order = rows[np.argsort(-rests[rows], kind="stable")]
            gradient[order, 0] = _order_gradient(outputs[order, 0]) / len(features)
        self._network.step(inputs, hidden, gradient)
        latest = np.stack([outputs[:, 0].astype(np.float64), rests.astype(np.float64)], axis=1)
        self._memory = np.concatenate([self._memory, latest])[-_MEMORY:]

    def predict(self, features: Float32s) -> npt.NDArray[np.float64]:
        if not len(self._memory):
            return np.ones((len(features), 1 + len(QUANTILES)))
        scores = self._network.forward(features)[2][:, 0]
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
