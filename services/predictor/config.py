"""The predictor's settings."""

from pydantic import Field

from shared.config import ServiceConfig


class PredictorConfig(ServiceConfig):
    """Section `predictor`."""

    model: str = Field(default="histogram", description="How lengths are predicted: constant or histogram")
