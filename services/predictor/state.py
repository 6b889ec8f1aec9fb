"""What the predictor remembers beside its model: how good recent predictions were.

Soft: lost at a restart, missed by nobody. It knows no bus and no clock.
"""

from collections import OrderedDict, deque

from services.predictor.models.base import PredictedLength
from services.predictor.report import score
from shared.messages.sequence import SequenceKey


class PredictionAudit:
    """Predictions waiting for their answer, and the last ones that got it. Both bounded."""

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
