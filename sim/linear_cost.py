"""A linear cost fitted to a live run's steps: a fixed part, tokens prefilled, sequences decoded, contexts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_STEPS = 20


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step of a live worker."""

    prefilled_tokens: int
    decoded_tokens: int
    step_s: float
    context_tokens: int = 0
    """Sum of the decodes' contexts."""


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Implements `CostModel`."""

    name: str
    fixed_s: float
    prefill_token_s: float
    sequence_s: float
    context_s: float = 0.0
    """Seconds for each token that a decode attends to."""

    def step_s(self, chunks: Sequence[tuple[int, int]], decodes: int, context_tokens: int) -> float:
        if not chunks and not decodes:
            return 0.0
        tokens = sum(end - first for first, end in chunks)
        decode_s = self.sequence_s * decodes + self.context_s * context_tokens
        return self.fixed_s + self.prefill_token_s * tokens + decode_s

    def times(self, factor: float) -> "LinearCost":
        """Everything so many times as long."""
        parts = (self.fixed_s, self.prefill_token_s, self.sequence_s, self.context_s)
        return LinearCost(self.name, *(factor * part for part in parts))


def fit_linear(steps: Sequence[MeasuredStep], *, name: str, overhead_s: float = 0.0) -> LinearCost:
    """Least squares over relative errors, slopes not negative; `overhead_s` is added to every step. Raises
    ValueError for fewer than `LEAST_STEPS` steps."""
    if len(steps) < LEAST_STEPS:
        raise ValueError(f"{len(steps)} steps are too few to fit a cost to; {LEAST_STEPS} are needed")
    took_s = np.array([step.step_s for step in steps])
    columns = np.array(
        [(1.0, step.prefilled_tokens, step.decoded_tokens, step.context_tokens) for step in steps]
    )
    used = [index for index in range(4) if columns[:, index].any()]
    while True:
        solved, *_ = np.linalg.lstsq(columns[:, used] / took_s[:, None], np.ones(len(steps)), rcond=None)
        negative = [index for index, value in zip(used, solved, strict=True) if value < 0]
        if not negative:
            break
        used = [index for index in used if index not in negative]
    parts = dict(zip(used, (float(value) for value in solved), strict=True))
    fixed_s, *slopes = (parts.get(index, 0.0) for index in range(4))
    return LinearCost(name, fixed_s + overhead_s, *slopes)
