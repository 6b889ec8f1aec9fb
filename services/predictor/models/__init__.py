"""Length models by name: built-in ones, those of installed packages, and classes in files.

A model is pure computation: no event loop, bus or clock. A package declares an entry point in the group
`kvasir.predictor.models` with a `length_model.ModelFactory`. `my_file.py:MyModel` names a class in a file
(`shared/plugins.py`). Packages such as torch, transformers and peft are imported when a model needs them.
"""

from importlib import import_module

from services.predictor.core.distribution import HistogramModel
from services.predictor.core.length_model import (
    LengthModel,
    LengthSample,
    ModelFactory,
    ModelSettings,
    PredictedLength,
)
from shared.errors import ConfigError
from shared.plugins import PluginKind


class ConstantModel:
    """Predicts `length_tokens` for every prompt, or one more token if the answer is longer already."""

    name = "constant"

    def __init__(self, length_tokens: int = 128) -> None:
        self.length_tokens = length_tokens

    @property
    def version(self) -> str:
        return f"constant-{self.length_tokens}"

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        length = min(max(self.length_tokens, generated_tokens + 1), max_tokens)
        return PredictedLength(length, length, length, length, length)

    def observe(self, sample: LengthSample) -> None:
        """Does nothing: the model does not learn."""


KIND = PluginKind("kvasir.predictor.models", "length model", "model", ("predict", "observe"))


def _imported(module: str, name: str) -> ModelFactory:
    def make(settings: ModelSettings) -> LengthModel:
        model: LengthModel = getattr(import_module(module), name).from_settings(settings)
        return model

    return make


MODELS: dict[str, ModelFactory] = {
    "constant": lambda settings: ConstantModel(),
    "histogram": lambda settings: HistogramModel(),
    "lm_head": _imported("services.predictor.models.lm_head", "LmHeadModel"),
    "oracle": _imported("services.predictor.models.oracle", "OracleModel"),
    "regressor": _imported("services.predictor.models.regressor", "RegressorModel"),
}


FIXED = ("constant", "lm_head")
"""Models that do not learn while serving."""


def model_names() -> list[str]:
    """Return the names that `create` knows, sorted; files are accepted as well."""
    return KIND.names(MODELS)


def create(name: str, settings: ModelSettings | None = None) -> LengthModel:
    """Return a new model; built-in names take precedence. Raises ConfigError."""
    factory = find_model(name)
    try:
        if name in MODELS:
            return factory(settings or ModelSettings())
        model = KIND.made(name, lambda: factory(settings or ModelSettings()))
    except ImportError as error:
        raise ConfigError(f"model {name!r} needs a package: {error}", param="model") from error
    missing = [each for each in ("name", "version") if not isinstance(getattr(model, each, None), str)]
    if missing:
        raise ConfigError(f"length model {name!r} lacks the text {' and '.join(missing)}", param="model")
    return model


def find_model(name: str) -> ModelFactory:
    """Return the factory of that name. Raises ConfigError."""
    return KIND.find(name, MODELS)
