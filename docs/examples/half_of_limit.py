"""A length model: each answer takes half of what its limit leaves. See services/predictor/README.md."""

from services.predictor.core.length_model import LengthSample, ModelSettings, PredictedLength


class HalfOfLimit:
    name = version = "half-of-limit"

    def __init__(self, settings: ModelSettings) -> None:
        pass

    def predict(self, prompt: bytes, *, max_tokens: int, generated_tokens: int = 0) -> PredictedLength:
        length = generated_tokens + max(1, (max_tokens - generated_tokens) // 2)
        return PredictedLength(length, length, length, length, length)

    def observe(self, sample: LengthSample) -> None:
        pass
