"""What the predictor remembers beside its model: how good recent predictions were.

Soft: lost at a restart, missed by nobody. It knows no bus and no clock.
"""

from collections import OrderedDict, deque

from shared.messages.sequence import SequenceKey


class PredictionAudit:
    """Predictions waiting for their answer, and the errors of the last ones that got it. Both bounded."""

    def __init__(self, *, waiting_limit: int = 10_000, window: int = 1_000) -> None:
        self._waiting_limit = waiting_limit
        self._predicted: OrderedDict[SequenceKey, int] = OrderedDict()
        self._errors_tokens: deque[int] = deque(maxlen=window)
        self.predictions = 0
        self.finished = 0

    def on_predicted(self, key: SequenceKey, rl_tokens: int) -> None:
        """Remembers the first prediction of a sequence, the one made before anything was generated."""
        self.predictions += 1
        self._predicted.setdefault(key, rl_tokens)
        while len(self._predicted) > self._waiting_limit:
            self._predicted.popitem(last=False)

    def on_finished(self, key: SequenceKey, output_tokens: int, *, censored: bool) -> None:
        """Scores the prediction. A censored answer has no true length to compare with."""
        self.finished += 1
        predicted = self._predicted.pop(key, None)
        if predicted is not None and not censored:
            self._errors_tokens.append(output_tokens - predicted)

    def summary(self) -> dict[str, float | int]:
        """Over the window: mean absolute error, shares within 50 and 100 tokens, share that ran longer."""
        errors = self._errors_tokens
        scored = len(errors)
        result: dict[str, float | int] = {
            "predictions": self.predictions,
            "finished": self.finished,
            "scored": scored,
        }
        if scored:
            result["mae_tokens"] = round(sum(map(abs, errors)) / scored, 1)
            result["within_50_share"] = round(sum(abs(e) <= 50 for e in errors) / scored, 3)
            result["within_100_share"] = round(sum(abs(e) <= 100 for e in errors) / scored, 3)
            result["too_short_share"] = round(sum(e > 0 for e in errors) / scored, 3)
        return result

    def check_integrity(self) -> None:
        """Raises AssertionError when a bound is broken."""
        assert len(self._predicted) <= self._waiting_limit
        assert len(self._errors_tokens) <= self.finished
