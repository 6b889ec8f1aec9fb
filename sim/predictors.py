"""Length predictors for the simulator: the truth, the truth with an error, lies, and the real histogram.

An error is drawn from (seed, request, tokens generated), so that every policy is told the same. Predictions
about a request that runs longer than predicted concern what is left of it, as with the live predictor's
`residual`.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from services.predictor.core.histogram import HistogramModel
from services.predictor.core.length_model import LengthModel, LengthSample
from services.predictor.models import KIND, create
from shared.errors import ConfigError
from shared.messages.commands import LengthPrediction
from shared.plugins import is_file
from sim.requests import SimRequest

_Z80, _Z90, _Z95 = 0.8416, 1.2816, 1.6449
"""Quantiles of the standard normal law."""


class SimPredictor(Protocol):
    """Deterministic, given its seed."""

    name: str
    refresh_tokens: int | None
    """So often it is told anew while an answer is written; None: only when somebody asks."""

    def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
        """Whole length, given that it is above `generated_tokens`. None: there is no answer."""
        ...

    def observe(self, request: SimRequest) -> None:
        """An answer that is over."""
        ...


def prediction(
    request: SimRequest, generated_tokens: int, name: str, *lengths_tokens: float
) -> LengthPrediction:
    """From expectation, p50, p80, p90, p95 or from one length for all; clipped to what is possible."""
    within = [max(generated_tokens + 1, min(request.max_tokens, round(tokens))) for tokens in lengths_tokens]
    expected, p50, p80, p90, p95 = within if len(within) == 5 else within * 5
    return LengthPrediction(
        rl_tokens=expected, p50_tokens=p50, p80_tokens=p80, p90_tokens=p90, p95_tokens=p95, model_version=name
    )


@dataclass
class NoPredictor:
    """Nothing comes, as when the predictor is down."""

    name: str = "none"
    refresh_tokens: int | None = None

    def predict(self, request: SimRequest, generated_tokens: int) -> LengthPrediction | None:
        return None

    def observe(self, request: SimRequest) -> None:
        """Nothing to learn."""


@dataclass
class NoisyOracle(NoPredictor):
    """The true length times exp(σ·z), z standard normal; σ 0 is the truth."""

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
    """A bound for what is learned while answering: a noisy oracle, told anew every `refresh_tokens`, whose
    error shrinks with what is left of the answer, and which errs the same way about one answer."""

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
    """Always wrong, as told by `kind`: `short` (one token more), `long` (the limit), `random`."""

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
    """The live predictor's histogram. It learns from `train`, and while it runs if `is_online`."""

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
    """What a trained model said of each prompt, as the trace's own column has it (tokens, or a class of
    lengths), made a distribution: that of answers to training requests of which it said about the same.

    Where the trace says nothing, the histogram answers.
    """

    train: Iterable[SimRequest] = ()
    kinds: int = 16
    """So many groups of predictions, of equal size where predictions differ."""
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
    """A length model of the live predictor, which learns from `train` and from answers that are over. It sees
    prompts of the right length, whose token ids are all 0."""

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
    """A prompt of that length: the histogram looks at nothing else."""
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
"""Those that learn from no answers."""


def find_predictor(name: str, *, seed: int = 0, train: Iterable[SimRequest] = ()) -> SimPredictor:
    """The predictor called `name`, those from outside included; `train` is what it learns from. Raises
    ConfigError."""
    if name in PREDICTORS:
        return PREDICTORS[name](seed, train)
    if not is_file(name) and name not in KIND.names():
        names = ", ".join(sorted({*PREDICTORS, *KIND.names()}))
        raise ConfigError(
            f"no simulated predictor {name!r}; there are {names}, and FILE.py:CLASS", param="predictor"
        )
    return FromOutside(create(name), train)
