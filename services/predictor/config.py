"""Settings of the predictor."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.predictor.core.length_model import ModelSettings
from services.predictor.models import create, find_model
from shared.config import ServiceConfig

_SLOW_TO_IMPORT = ("regressor", "lm_head")
"""Models that import torch. They check their files themselves."""


class PredictorConfig(ServiceConfig):
    """Section `predictor`."""

    model: str = Field(
        default="histogram",
        description="constant, histogram, regressor, lm_head, oracle, the name of an installed one, or "
        "FILE.py:CLASS",
    )
    state_dir: Path | None = Field(
        default=None, description="where trained versions and what was served are kept [nowhere: no learning]"
    )
    trace: Path | None = Field(default=None, description="oracle: JSONL of prompts and true lengths")
    tokenizer: Path | None = Field(default=None, description="tokenizer.json, to read a trace's text")
    base_model: Path | None = Field(default=None, description="lm_head: directory of a causal language model")
    rest_head: Literal["distribution", "rank", "none"] = Field(
        default="distribution",
        description="what reads hidden states where workers hand some out (worker.states_every): tells "
        "lengths, or the order in which answers end; or nothing does",
    )
    learn: bool = Field(default=True, description="regressor: train in the background on what is served")

    def check(self) -> None:
        find_model(self.model)
        if self.model not in _SLOW_TO_IMPORT:
            create(self.model, self.model_settings())

    def model_settings(self) -> ModelSettings:
        return ModelSettings(self.state_dir, self.trace, self.tokenizer, self.base_model)
