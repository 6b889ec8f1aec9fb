"""Length models, by name: those that ship, and any that an installed package adds.

A model is plain data and arithmetic: no event loop, bus or clock. A third party declares an entry point in
the group `kvasir.predictor.models`, whose value is a `base.ModelFactory`. What a model needs beside numpy
(torch, transformers, peft) is imported when it is chosen.
"""

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from services.predictor.core.histogram import HistogramModel
from services.predictor.core.length_model import LengthModel, ModelFactory, ModelSettings
from services.predictor.models.constant import ConstantModel
from shared.errors import ConfigError

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
