"""How wrong predictions are on the whole, learned from how long answers became; and what to expect of one
that nobody has predicted.

A predictor that is always too high leaves memory idle, one that is always too low leads to evictions: both
show in the ratio of what answers were to what they were said to be, so lengths are multiplied by it. It
forgets: the last few hundred answers count. Cancelled answers do not: nobody knows how long they would be.
Source: our own; algorithms.md §1 demands only that wrong predictions break nothing.
"""

_WEIGHT = 1 / 256
_ENOUGH = 32
"""Answers before anything is corrected."""
_MOST = 4.0
_NEAR = 0.15
"""A smaller error is none."""


class Calibration:
    """One worker's."""

    def __init__(self) -> None:
        self._answers = 0
        self._actual_tokens = self._predicted_tokens = 0.0
        self._unpredicted = 0
        self._unpredicted_tokens = 0.0

    def learn(self, predicted_tokens: int | None, actual_tokens: int) -> None:
        """An answer is over, of so many tokens as it really had. None: nobody had predicted it."""
        if predicted_tokens is None:
            self._unpredicted += 1
            weight = max(_WEIGHT, 1 / self._unpredicted)
            self._unpredicted_tokens += weight * (actual_tokens - self._unpredicted_tokens)
            return
        self._answers += 1
        weight = max(_WEIGHT, 1 / self._answers)
        self._actual_tokens += weight * (actual_tokens - self._actual_tokens)
        self._predicted_tokens += weight * (predicted_tokens - self._predicted_tokens)

    @property
    def factor(self) -> float:
        """What predictions are to be multiplied by: between 1/4 and 4."""
        if self._answers < _ENOUGH or self._predicted_tokens <= 0:
            return 1.0
        factor = self._actual_tokens / self._predicted_tokens
        return 1.0 if abs(factor - 1) < _NEAR else min(_MOST, max(1 / _MOST, factor))

    def default_tokens(self, configured_tokens: int) -> int:
        """For one that nobody has predicted."""
        if self._unpredicted < _ENOUGH:
            return configured_tokens
        return max(1, round(self._unpredicted_tokens))
