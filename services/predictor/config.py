"""Settings of the predictor."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from services.predictor.core.length_model import ModelSettings
from services.predictor.learning import LearningRules
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
    batch_limit: int = Field(default=64, ge=1, description="questions that one call of the model answers")
    queue_limit: int = Field(default=2048, ge=1, description="questions that may wait; one more is refused")
    learn: bool = Field(default=True, description="regressor: train in the background on what is served")
    learn_every: int = Field(default=1000, ge=1, description="finished answers between two trainings")
    learn_least: int = Field(default=300, ge=100, description="finished answers before the first training")
    learn_history: int = Field(default=20_000, ge=100, description="latest answers that are learned from")
    learn_deadline_s: float = Field(default=900.0, gt=0, description="a training is stopped after this")

    def check(self) -> None:
        find_model(self.model)
        if self.model not in _SLOW_TO_IMPORT:
            create(self.model, self.model_settings())

    def model_settings(self) -> ModelSettings:
        return ModelSettings(self.state_dir, self.trace, self.tokenizer, self.base_model)

    def learning_rules(self) -> LearningRules:
        return LearningRules(self.learn_every, self.learn_least, self.learn_history, self.learn_deadline_s)
