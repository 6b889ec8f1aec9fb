"""Length models, by name. A model is plain data and arithmetic: no event loop, bus or clock."""

from collections.abc import Callable

from services.predictor.models.base import LengthModel
from services.predictor.models.constant import ConstantModel
from services.predictor.models.histogram import HistogramModel
from shared.errors import ConfigError

MODELS: dict[str, Callable[[], LengthModel]] = {"constant": ConstantModel, "histogram": HistogramModel}


def create(name: str) -> LengthModel:
    """A new model called `name`. Raises ConfigError listing the names that exist."""
    try:
        return MODELS[name]()
    except KeyError:
        names = ", ".join(sorted(MODELS))
        raise ConfigError(f"no length model {name!r}; there are {names}", param="model") from None
