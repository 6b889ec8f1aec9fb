"""`regressor`: a small network on token ids, trained here, that predicts quantiles of the length.

Until there is a trained version the histogram answers, which learns from every finished answer meanwhile. A
version is swapped in whole by `adopt`, between two calls. Who trains and decides is `learning.py`. One thread
of one core: a batch of 32 prompts takes a few milliseconds. Source: papers/003 §2.3, `algorithms.md` §2.
"""

from collections.abc import Sequence

import torch

from services.predictor.core.distribution import predict_from
from services.predictor.core.features import features_of
from services.predictor.core.histogram import HistogramModel
from services.predictor.core.length_model import LengthQuery, LengthSample, ModelSettings, PredictedLength
from services.predictor.models import versions
from services.predictor.models.network import lengths_of
from services.predictor.models.versions import Trained


class RegressorModel:
    """Predicts with the trained version in use; as long as there is none, with a histogram."""

    name = "regressor"

    def __init__(self, trained: Trained | None = None) -> None:
        self._trained = trained
        self._histogram = HistogramModel()

    @classmethod
    def from_settings(cls, settings: ModelSettings) -> "RegressorModel":
        """Goes on with the latest version in `state_dir`. From here on torch computes on one thread."""
        torch.set_num_threads(1)
        return cls(None if settings.state_dir is None else versions.latest(settings.state_dir))

    @property
    def version(self) -> str:
        return self._histogram.version if self._trained is None else self._trained.version

    @property
    def trained(self) -> Trained | None:
        return self._trained

    def adopt(self, trained: Trained) -> None:
        """From the next call on this version answers."""
        self._trained = trained

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        return self.predict_batch([LengthQuery(prompt, max_tokens, generated_tokens)])[0]

    def predict_batch(self, queries: Sequence[LengthQuery]) -> list[PredictedLength]:
        """One call of the network for all of them."""
        trained = self._trained
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
        """Only the histogram learns at once."""
        self._histogram.observe(sample)
