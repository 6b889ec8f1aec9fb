"""`regressor`: a small network on token ids that predicts quantiles of the length.

Until a version is trained, a histogram answers and learns from every finished answer. `adopt` replaces the
version between two calls; `learning.py` decides when. Uses one thread: 32 prompts take a few milliseconds.
Source: papers/003 §2.3, `algorithms.md` §2.
"""

from collections.abc import Sequence

import torch

from services.predictor.core.distribution import predict_from
from services.predictor.core.features import features_of
from services.predictor.core.histogram import HistogramModel
from services.predictor.core.length_model import LengthQuery, LengthSample, ModelSettings, PredictedLength
from services.predictor.models.network import Trained, latest, lengths_of


class RegressorModel:
    """Predicts with the trained version, or with a histogram while there is none."""

    name = "regressor"

    def __init__(self, trained: Trained | None = None) -> None:
        self.trained = trained
        self._histogram = HistogramModel()

    @classmethod
    def from_settings(cls, settings: ModelSettings) -> "RegressorModel":
        """Load the latest version in `state_dir`. Limits torch to one thread from here on."""
        torch.set_num_threads(1)
        return cls(None if settings.state_dir is None else latest(settings.state_dir))

    @property
    def version(self) -> str:
        return self._histogram.version if self.trained is None else self.trained.version

    def adopt(self, trained: Trained) -> None:
        """Use this version from the next call on."""
        self.trained = trained

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        return self.predict_batch([LengthQuery(prompt, max_tokens, generated_tokens)])[0]

    def predict_batch(self, queries: Sequence[LengthQuery]) -> list[PredictedLength]:
        """Return one prediction per query, in one call of the network."""
        trained = self.trained
        if trained is None:
            return [
                self._histogram.predict(
                    query.prompt, max_tokens=query.max_tokens, generated_tokens=query.generated_tokens
                )
                for query in queries
            ]
        if not queries:
            return []
        lengths = lengths_of(trained.network, features_of([query.prompt for query in queries]))
        return predict_from(lengths, queries)

    def observe(self, sample: LengthSample) -> None:
        """Update the histogram; the network learns in training only."""
        self._histogram.observe(sample)
