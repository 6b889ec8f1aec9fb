"""The same guess for every prompt: what a system without a predictor does. It learns nothing."""

from services.predictor.core.length_model import LengthSample, PredictedLength


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
