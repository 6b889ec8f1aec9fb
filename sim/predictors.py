"""Length predictors of the simulator: oracles, noisy oracles, constant errors, and the live models.

Errors are drawn from (seed, request, generated tokens), so every policy gets the same predictions. For a
request longer than predicted, only the remaining length is predicted anew, as with the live `residual`.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from services.predictor.core.distribution import HistogramModel
from services.predictor.core.length_model import LengthModel, LengthSample
from services.predictor.models import KIND, create
from shared.errors import ConfigError
from shared.messages.commands import LengthPrediction
from shared.plugins import is_file
from sim.requests import SimRequest

_Z80, _Z90, _Z95 = 0.8416, 1.2816, 1.6449
"""Quantiles of the standard normal distribution."""


class SimPredictor(Protocol):
    """A length predictor, deterministic for its seed."""

    name: str
    refresh_tokens: int | None
    """Refresh predictions every this many tokens; None to predict only on request."""

    def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
        """Predict the whole length, given that it exceeds `generated_tokens`; None for no prediction."""
        ...

    def observe(self, request: SimRequest) -> None:
        """Learn from a finished answer."""
        ...


def prediction(
    request: SimRequest, generated_tokens: int, name: str, *lengths_tokens: float
) -> LengthPrediction:
    """Return a prediction from mean, p50, p80, p90 and p95, or from one length for all; clipped to the
    limits."""
    within = [max(generated_tokens + 1, min(request.max_tokens, round(tokens))) for tokens in lengths_tokens]
    expected, p50, p80, p90, p95 = within if len(within) == 5 else within * 5
    return LengthPrediction(
        rl_tokens=expected, p50_tokens=p50, p80_tokens=p80, p90_tokens=p90, p95_tokens=p95, model_version=name
    )


@dataclass
class NoPredictor:
    """Predicts nothing, like a predictor that is down."""

    name: str = "none"
    refresh_tokens: int | None = None

    def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
        return None

    def observe(self, request: SimRequest) -> None:
        """Learn nothing."""


@dataclass
class NoisyOracle(NoPredictor):
    """Predicts the true length times exp(σ·z), z standard normal; σ = 0 is the truth."""

    sigma: float = 0.0
    seed: int = 0
    name: str = "oracle"

    def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
        if self.sigma == 0.0:
            return prediction(request, generated_tokens, self.name, request.output_tokens)
        guess = request.output_tokens * self._error(request.index, 0)
        if guess <= generated_tokens:
            left = request.output_tokens - generated_tokens
            guess = generated_tokens + max(1.0, left * self._error(request.index, generated_tokens))
        rest = guess - generated_tokens
        spread = [generated_tokens + rest * math.exp(self.sigma * z) for z in (0.0, _Z80, _Z90, _Z95)]
        return prediction(request, generated_tokens, self.name, guess, *spread)

    def _error(self, index: int, generated_tokens: int) -> float:
        return math.exp(self.sigma * Random(f"{self.seed}/{index}/{generated_tokens}").gauss(0.0, 1.0))


@dataclass
class Sharpening(NoisyOracle):
    """A noisy oracle that improves while the answer is generated, as a bound for online prediction. It
    predicts anew every `refresh_tokens`. Its error shrinks with the remaining length and keeps its sign
    within one answer."""

    refresh_tokens: int | None = 32

    def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
        left = request.output_tokens - generated_tokens
        sigma = self.sigma * left / request.output_tokens
        z = Random(f"{self.seed}/{request.index}/0").gauss(0.0, 1.0)
        rest = max(1.0, left * math.exp(sigma * z))
        spread = [generated_tokens + rest * math.exp(sigma * each) for each in (0.0, _Z80, _Z90, _Z95)]
        return prediction(request, generated_tokens, self.name, generated_tokens + rest, *spread)


@dataclass
class Liar(NoPredictor):
    """Is always wrong, by `kind`: `short` (one more token), `long` (the limit) or `random`."""

    kind: str = "random"
    seed: int = 0
    name: str = "random"

    def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
        if self.kind == "short":
            guess = generated_tokens + 1
        elif self.kind == "long":
            guess = request.max_tokens
        else:
            random = Random(f"{self.seed}/{request.index}/{generated_tokens}")
            guess = random.randint(generated_tokens + 1, max(generated_tokens + 1, request.max_tokens))
        return prediction(request, generated_tokens, self.name, guess)


@dataclass
class Histogram(NoPredictor):
    """The live predictor's histogram. It learns from `train`, and during the run if `is_online`."""

    train: Iterable[SimRequest] = ()
    is_online: bool = False
    name: str = "histogram"

    def __post_init__(self) -> None:
        self._model = HistogramModel()
        self._answers: dict[tuple[int, int, int], LengthPrediction] = {}
        for request in self.train:
            self._learn(request)

    def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
        key = (request.prompt_tokens.bit_length(), request.max_tokens, generated_tokens)
        answer = self._answers.get(key)
        if answer is None:
            guess = self._model.predict(
                _blank(request), max_tokens=request.max_tokens, generated_tokens=generated_tokens
            )
            answer = self._answers[key] = prediction(
                request,
                generated_tokens,
                self.name,
                guess.rl_tokens,
                guess.p50_tokens,
                guess.p80_tokens,
                guess.p90_tokens,
                guess.p95_tokens,
            )
        return answer

    def observe(self, request: SimRequest) -> None:
        if self.is_online:
            self._learn(request)

    def _learn(self, request: SimRequest) -> None:
        is_cut = request.output_tokens >= request.max_tokens
        self._model.observe(LengthSample(_blank(request), request.output_tokens, censored=is_cut))
        self._answers.clear()


@dataclass
class Learned(NoPredictor):
    """Turns the trace's column of predictions (tokens, or a class of lengths) into distributions.

    The distribution is that of training requests with about the same prediction. Without a prediction, the
    histogram answers.
    """

    train: Iterable[SimRequest] = ()
    kinds: int = 16
    """Number of groups of predictions, of equal size if predictions differ."""
    name: str = "learned"

    def __post_init__(self) -> None:
        train = list(self.train)
        self._fallback = Histogram(train=train)
        told = sorted(one.predicted_tokens for one in train if one.predicted_tokens is not None)
        places = (round(len(told) * index / self.kinds) for index in range(1, self.kinds))
        self._edges = sorted({told[place] for place in places}) if told else []
        self._models: dict[int, Histogram] = {}
        groups: dict[int, list[SimRequest]] = {}
        for one in train:
            if one.predicted_tokens is not None:
                blank = replace(one, prompt_tokens=1)
                groups.setdefault(bisect_right(self._edges, one.predicted_tokens), []).append(blank)
        self._models = {kind: Histogram(train=group, name=self.name) for kind, group in groups.items()}

    def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
        if request.predicted_tokens is None or not self._models:
            return self._fallback.predict(request, generated_tokens)
        kind = bisect_right(self._edges, request.predicted_tokens)
        nearest = min(self._models, key=lambda one: abs(one - kind))
        return self._models[nearest].predict(replace(request, prompt_tokens=1), generated_tokens)


class FromOutside(NoPredictor):
    """A length model of the live predictor. It learns from `train` and from finished answers. It sees
    prompts of the right length whose token ids are all 0."""

    def __init__(self, model: LengthModel, train: Iterable[SimRequest]) -> None:
        super().__init__(name=model.name)
        self._model = model
        for request in train:
            self.observe(request)

    def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
        told = self._model.predict(
            _blank(request), max_tokens=request.max_tokens, generated_tokens=generated_tokens
        )
        lengths = (told.rl_tokens, told.p50_tokens, told.p80_tokens, told.p90_tokens, told.p95_tokens)
        return prediction(request, generated_tokens, self.name, *lengths)

    def observe(self, request: SimRequest) -> None:
        is_cut = request.output_tokens >= request.max_tokens
        self._model.observe(LengthSample(_blank(request), request.output_tokens, censored=is_cut))


def _blank(request: SimRequest) -> bytes:
    """Return a prompt of the request's length with all token ids 0."""
    return bytes(array("I").itemsize * request.prompt_tokens)


PREDICTORS: dict[str, Callable[[int, Iterable[SimRequest]], SimPredictor]] = {
    "none": lambda seed, train: NoPredictor(),
    "oracle": lambda seed, train: NoisyOracle(),
    "sigma0.25": lambda seed, train: NoisyOracle(sigma=0.25, seed=seed, name="sigma0.25"),
    "sigma0.5": lambda seed, train: NoisyOracle(sigma=0.5, seed=seed, name="sigma0.5"),
    "sigma1": lambda seed, train: NoisyOracle(sigma=1.0, seed=seed, name="sigma1"),
    "sharpening": lambda seed, train: Sharpening(sigma=0.5, seed=seed, name="sharpening"),
    "short": lambda seed, train: Liar(kind="short", name="short"),
    "long": lambda seed, train: Liar(kind="long", name="long"),
    "random": lambda seed, train: Liar(kind="random", seed=seed),
    "histogram": lambda seed, train: Histogram(train=train),
    "histogram_online": lambda seed, train: Histogram(train=train, is_online=True, name="histogram_online"),
    "learned": lambda seed, train: Learned(train=train),
}


UNTRAINED = frozenset(PREDICTORS) - {"histogram", "histogram_online", "learned"}
"""Predictors that need no training requests."""


def find_predictor(name: str, *, seed: int = 0, train: Iterable[SimRequest] = ()) -> SimPredictor:
    """Return the predictor called `name`, plugins included, trained on `train`. Raises ConfigError."""
    if name in PREDICTORS:
        return PREDICTORS[name](seed, train)
    if not is_file(name) and name not in KIND.names():
        names = ", ".join(sorted({*PREDICTORS, *KIND.names()}))
        raise ConfigError(
            f"no simulated predictor {name!r}; there are {names}, and FILE.py:CLASS", param="predictor"
        )
    return FromOutside(create(name), train)
