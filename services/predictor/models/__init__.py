"""Length models, by name: those that ship, and any that an installed package adds.

A model is plain data and arithmetic: no event loop, bus or clock. A third party declares an entry point in
the group `kvasir.predictor.models`, whose value is a `length_model.ModelFactory`. What a model needs beside
numpy (torch, transformers, peft) is imported when it is chosen.
"""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from services.predictor.core.histogram import HistogramModel
from services.predictor.core.length_model import (
    LengthModel,
    LengthSample,
    ModelFactory,
    ModelSettings,
    PredictedLength,
)
from shared.errors import ConfigError


class ConstantModel:
    """Predicts `length_tokens` for every prompt; an answer that is longer already gets one token more."""

    name = "constant"

    def __init__(self, length_tokens: int = 128) -> None:
        self.length_tokens = length_tokens

    @property
    def version(self) -> str:
        return f"constant-{self.length_tokens}"

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        length = min(max(self.length_tokens, generated_tokens + 1), max_tokens)
        return PredictedLength(
            rl_tokens=length, p50_tokens=length, p80_tokens=length, p90_tokens=length, p95_tokens=length
        )

    def observe(self, sample: LengthSample) -> None:
        """Nothing to learn."""


ENTRY_POINT_GROUP = "kvasir.predictor.models"


def _constant(_: ModelSettings) -> LengthModel:
    return ConstantModel()


def _histogram(_: ModelSettings) -> LengthModel:
    return HistogramModel()


def _imported(module: str, name: str) -> ModelFactory:
    def make(settings: ModelSettings) -> LengthModel:
        model: LengthModel = getattr(import_module(module), name).from_settings(settings)
        return model

    return make


MODELS: dict[str, ModelFactory] = {
    "constant": _constant,
    "histogram": _histogram,
    "lm_head": _imported("services.predictor.models.lm_head", "LmHeadModel"),
    "oracle": _imported("services.predictor.models.oracle", "OracleModel"),
    "regressor": _imported("services.predictor.models.regressor", "RegressorModel"),
}


FIXED = ("constant", "lm_head")
"""Those that learn nothing while they serve."""


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def model_names() -> list[str]:
    """Every name that `create` knows, sorted."""
    return sorted({*MODELS, *_installed()})


def create(name: str, settings: ModelSettings | None = None) -> LengthModel:
    """A new model called `name`; a built-in name cannot be taken over. Raises ConfigError."""
    factory = MODELS.get(name)
    if factory is None:
        point = _installed().get(name)
        if point is None:
            names = ", ".join(model_names())
            raise ConfigError(f"no length model {name!r}; there are {names}", param="model")
        try:
            factory = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"model {name!r} ({point.value}) cannot be loaded: {error}", param="model"
            ) from error
        if not callable(factory):
            raise ConfigError(f"model {name!r} ({point.value}) is not a factory of models", param="model")
    try:
        return factory(settings or ModelSettings())
    except ImportError as error:
        raise ConfigError(f"model {name!r} needs a package: {error}", param="model") from error
