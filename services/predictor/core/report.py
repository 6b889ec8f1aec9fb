"""How good predictions were, in the figures that everybody quotes. Pure arithmetic; knows no
particular model.

The median is held against the length (MAE, shares within 50 and 100 tokens); the expected length, padded as a
scheduler pads it, says who would have got too little memory and how much too much; each quantile's share of
answers at or below it says whether it holds what it promises. Source: papers/003 §2.3, `algorithms.md` §2.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from services.predictor.core.length_model import (
    LengthModel,
    LengthQuery,
    LengthSample,
    PredictedLength,
    predict_all,
)
from shared.messages.sequence import SequenceKey


class PredictionAudit:
    """Holds predictions against what became of them.

    Remembers predictions until their answer is over, and the last ones that were; both are bounded.
    """

    def __init__(self, *, waiting_limit: int = 10_000, window: int = 1_000) -> None:
        self._waiting_limit = waiting_limit
        self._predicted: OrderedDict[SequenceKey, PredictedLength] = OrderedDict()
        self._scored: deque[tuple[PredictedLength, int]] = deque(maxlen=window)
        self.predictions = 0
        self.finished = 0

    def on_predicted(self, key: SequenceKey, predicted: PredictedLength) -> None:
        """Remembers the first prediction of a sequence, the one made before anything was generated."""
        self.predictions += 1
        self._predicted.setdefault(key, predicted)
        while len(self._predicted) > self._waiting_limit:
            self._predicted.popitem(last=False)

    def on_finished(self, key: SequenceKey, output_tokens: int, *, censored: bool) -> None:
        """Scores the prediction. A censored answer has no true length to compare with."""
        self.finished += 1
        predicted = self._predicted.pop(key, None)
        if predicted is not None and not censored:
            self._scored.append((predicted, output_tokens))

    def summary(self) -> dict[str, float | int]:
        """Counts, and over the window what `report.py` says."""
        report = score(self._scored)
        counts: dict[str, float | int] = {
            "predictions": self.predictions,
            "finished": self.finished,
            "scored": 0,
        }
        return counts if report is None else counts | report.as_dict()

    def check_integrity(self) -> None:
        """Raises AssertionError when a bound is broken."""
        assert len(self._predicted) <= self._waiting_limit
        assert len(self._scored) <= self.finished


PADDING = 0.15
"""EcoServe's, 0.10–0.20."""
_CHUNK = 256
_NO_LIMIT_TOKENS = 1 << 20


@dataclass(frozen=True)
class LengthReport:
    """How far predictions were off, over a number of whole answers."""

    scored: int
    mae_tokens: float
    within_50_share: float
    within_100_share: float
    under_share: float
    """Of answers longer than the padded prediction."""
    over_share: float
    """Of answers that needed less than the padded prediction."""
    over_tokens: float
    """What those left unused, on average over all answers."""
    below_p50_share: float
    below_p80_share: float
    below_p90_share: float
    below_p95_share: float

    def as_dict(self) -> dict[str, float | int]:
        """Rounded, for people."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def score(pairs: Iterable[tuple[PredictedLength, int]], *, padding: float = PADDING) -> LengthReport | None:
    """Of (prediction, true length in tokens); None when there is none."""
    scored = list(pairs)
    count = len(scored)
    if not count:
        return None
    errors = [abs(length - predicted.p50_tokens) for predicted, length in scored]
    left = [math.ceil(predicted.rl_tokens * (1 + padding)) - length for predicted, length in scored]

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
        below_p50_share=share(length <= predicted.p50_tokens for predicted, length in scored),
        below_p80_share=share(length <= predicted.p80_tokens for predicted, length in scored),
        below_p90_share=share(length <= predicted.p90_tokens for predicted, length in scored),
        below_p95_share=share(length <= predicted.p95_tokens for predicted, length in scored),
    )


def held_out_of(samples: int) -> int:
    """How many of the latest samples judge: a tenth, between 20 and 1,000, never more than a third."""
    return min(max(20, samples // 10), 1000, samples // 3)


def evaluate(model: LengthModel, samples: Sequence[LengthSample]) -> LengthReport | None:
    """Over those that were not cut by their limit. The model learns nothing."""
    whole = [sample for sample in samples if not sample.censored]
    pairs = []
    for start in range(0, len(whole), _CHUNK):
        part = whole[start : start + _CHUNK]
        told = predict_all(model, [LengthQuery(sample.prompt, _NO_LIMIT_TOKENS) for sample in part])
        pairs += [(predicted, sample.output_tokens) for predicted, sample in zip(told, part, strict=True)]
    return score(pairs)
