"""Predictions of many lengths at once, and their accuracy. Pure. Source: papers/003 §2.3, `algorithms.md` §2.

The median is compared with the length. The expected length, padded as a scheduler pads it, shows under- and
over-allocation. The share of answers at or below each quantile shows its calibration.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from services.predictor.core.length_model import (
    BatchModel,
    LengthModel,
    LengthQuery,
    LengthSample,
    PredictedLength,
)
from shared.messages.sequence import SequenceKey


def predict_all(model: LengthModel, queries: Sequence[LengthQuery]) -> list[PredictedLength]:
    """Return one prediction per query, in one call if the model supports that."""
    if isinstance(model, BatchModel):
        return model.predict_batch(queries)
    return [
        model.predict(one.prompt, max_tokens=one.max_tokens, generated_tokens=one.generated_tokens)
        for one in queries
    ]


class PredictionAudit:
    """Compares predictions with finished answers. Open and scored predictions are both bounded."""

    def __init__(self, *, waiting_limit: int = 10_000, window: int = 1_000) -> None:
        self._waiting_limit = waiting_limit
        self._predicted: OrderedDict[SequenceKey, PredictedLength] = OrderedDict()
        self._scored: deque[tuple[PredictedLength, int]] = deque(maxlen=window)
        self.predictions = 0
        self.finished = 0

    def on_predicted(self, key: SequenceKey, predicted: PredictedLength) -> None:
        """Remember a sequence's first prediction, made before anything was generated."""
        self.predictions += 1
        self._predicted.setdefault(key, predicted)
        while len(self._predicted) > self._waiting_limit:
            self._predicted.popitem(last=False)

    def on_finished(self, key: SequenceKey, output_tokens: int, *, censored: bool) -> None:
        """Score a prediction. A censored answer has no true length to compare with."""
        self.finished += 1
        predicted = self._predicted.pop(key, None)
        if predicted is not None and not censored:
            self._scored.append((predicted, output_tokens))

    def forget(self, key: SequenceKey) -> None:
        """Drop the prediction of a sequence whose answer was cut short."""
        self._predicted.pop(key, None)

    def summary(self) -> dict[str, float | int]:
        """Return counts and the metrics over the window."""
        report = score(self._scored)
        scored = {"scored": 0} if report is None else report.as_dict()
        return {"predictions": self.predictions, "finished": self.finished, **scored}

    def check_integrity(self) -> None:
        """Raise AssertionError if a bound is violated."""
        assert len(self._predicted) <= self._waiting_limit
        assert len(self._scored) <= self.finished


PADDING = 0.15
"""EcoServe's, which uses 0.10–0.20."""
_CHUNK = 256
_NO_LIMIT_TOKENS = 1 << 20


@dataclass(frozen=True)
class LengthReport:
    """Errors of predictions over a number of complete answers."""

    scored: int
    mae_tokens: float
    within_50_share: float
    within_100_share: float
    under_share: float
    """Share of answers longer than the padded prediction."""
    over_share: float
    """Share of answers shorter than the padded prediction."""
    over_tokens: float
    """Their unused tokens, averaged over all answers."""
    below_p50_share: float
    below_p80_share: float
    below_p90_share: float
    below_p95_share: float

    def as_dict(self) -> dict[str, float | int]:
        """Return the metrics rounded to three digits."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def score(pairs: Iterable[tuple[PredictedLength, int]]) -> LengthReport | None:
    """Return the metrics of (prediction, true length in tokens) pairs, or None without any."""
    scored = list(pairs)
    count = len(scored)
    if not count:
        return None
    errors = [abs(length - predicted.p50_tokens) for predicted, length in scored]
    left = [math.ceil(predicted.rl_tokens * (1 + PADDING)) - length for predicted, length in scored]

    def share(flags: Iterable[bool]) -> float:
        return sum(flags) / count

    return LengthReport(
        scored=count,
        mae_tokens=sum(errors) / count,
        within_50_share=share(error <= 50 for error in errors),
        within_100_share=share(error <= 100 for error in errors),
        under_share=share(tokens < 0 for tokens in left),
        over_share=share(tokens > 0 for tokens in left),
        over_tokens=sum(max(0, tokens) for tokens in left) / count,
        **{
            f"below_{level}_share": share(length <= getattr(one, f"{level}_tokens") for one, length in scored)
            for level in ("p50", "p80", "p90", "p95")
        },
    )


def held_out_of(samples: int) -> int:
    """Return the number of latest samples to test on: a tenth, from 20 to 1,000, at most a third."""
    return min(max(20, samples // 10), 1000, samples // 3)


def evaluate(model: LengthModel, samples: Sequence[LengthSample]) -> LengthReport | None:
    """Return the metrics over answers not cut by their limit. The model does not learn."""
    whole = [sample for sample in samples if not sample.censored]
    pairs = []
    for start in range(0, len(whole), _CHUNK):
        part = whole[start : start + _CHUNK]
        told = predict_all(model, [LengthQuery(sample.prompt, _NO_LIMIT_TOKENS) for sample in part])
        pairs += [(predicted, sample.output_tokens) for predicted, sample in zip(told, part, strict=True)]
    return score(pairs)
