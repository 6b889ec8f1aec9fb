"""Remaining answer lengths from predictions, and work in seconds at measured speeds.

An answer that outlives its prediction is expected to continue for E[RL − g | RL > g], from the prediction's
quantiles. Source: papers/003 §2.3 (padding), §3.2.2 (under-prediction); algorithms.md §1.
"""

from math import ceil

from services.scheduler.policy.contract import Task
from services.scheduler.policy.options import TwoQueueOptions
from shared.average import averaged
from shared.messages.commands import LengthPrediction

_WEIGHT = 1 / 256
_ENOUGH = 32
"""Number of answers before predictions are corrected."""
_MOST = 4.0
_NEAR = 0.15
"""Smaller relative errors are ignored."""


class Calibration:
    """Ratio of actual to predicted lengths at one worker, as a running average."""

    def __init__(self) -> None:
        self._answers = 0
        self._actual_tokens = self._predicted_tokens = 0.0
        self._unpredicted = 0
        self._unpredicted_tokens = 0.0

    def learn(self, predicted_tokens: int | None, actual_tokens: int) -> None:
        """Record the final length of an answer. `predicted_tokens`: None if there was no prediction."""
        if predicted_tokens is None:
            self._unpredicted += 1
            weight = max(_WEIGHT, 1 / self._unpredicted)
            self._unpredicted_tokens = averaged(self._unpredicted_tokens, actual_tokens, weight)
            return
        self._answers += 1
        weight = max(_WEIGHT, 1 / self._answers)
        self._actual_tokens = averaged(self._actual_tokens, actual_tokens, weight)
        self._predicted_tokens = averaged(self._predicted_tokens, predicted_tokens, weight)

    @property
    def factor(self) -> float:
        """Factor to multiply predictions by, from 1/4 to 4."""
        if self._answers < _ENOUGH or self._predicted_tokens <= 0:
            return 1.0
        factor = self._actual_tokens / self._predicted_tokens
        return 1.0 if abs(factor - 1) < _NEAR else min(_MOST, max(1 / _MOST, factor))

    def default_tokens(self, configured_tokens: int) -> int:
        """Return the assumed length of an answer without a prediction."""
        if self._unpredicted < _ENOUGH:
            return configured_tokens
        return max(1, round(self._unpredicted_tokens))


_TAIL = 0.25
"""Share of its length by which an answer beyond its prediction grows."""


def expected_rest_tokens(prediction: LengthPrediction, generated_tokens: float) -> float:
    """Return E[RL − g | RL > g]. Mass is uniform between quantiles, with 5 % between the last and 1.25 ×
    it."""
    edges = [0.0]
    for tokens in (
        prediction.p50_tokens,
        prediction.p80_tokens,
        prediction.p90_tokens,
        prediction.p95_tokens,
    ):
        edges.append(max(edges[-1], float(tokens)))
    edges.append(edges[-1] * (1 + _TAIL))
    mass = area = 0.0
    for low, high, share in zip(edges, edges[1:], (0.5, 0.3, 0.1, 0.05, 0.05), strict=False):
        if high > generated_tokens:
            start = max(low, generated_tokens)
            part = share * (high - start) / (high - low) if high > low else share
            mass += part
            area += part * ((start + high) / 2 - generated_tokens)
    return area / mass if mass > 0 else _TAIL * generated_tokens


class LengthEstimates:
    """Padded remaining lengths under one worker's options."""

    def __init__(
        self, options: TwoQueueOptions, block_tokens: int, calibration: Calibration | None = None
    ) -> None:
        """`calibration`: None leaves predictions uncorrected."""
        self._options = options
        self._calibration = calibration
        self._block_tokens = block_tokens

    def whole_tokens(self, prediction: LengthPrediction | None, max_tokens: int) -> int:
        """Return the predicted length of the whole answer, not padded."""
        if prediction is None:
            tokens = self._options.default_tokens
            if self._calibration is not None:
                tokens = self._calibration.default_tokens(tokens)
        else:
            tokens = round(self._raw_tokens(prediction) * self._factor(prediction))
        return max(1, min(max_tokens, tokens))

    def learn(self, prediction: LengthPrediction | None, generated_tokens: int) -> None:
        """Record the final length of an answer; `prediction` is its first one."""
        is_news = prediction is None or not prediction.is_calibrated
        if self._calibration is not None and is_news:
            raw = None if prediction is None else self._raw_tokens(prediction)
            self._calibration.learn(raw, generated_tokens)

    def _factor(self, prediction: LengthPrediction) -> float:
        """Return the factor for a prediction; 1 if its predictor calibrated it."""
        if self._calibration is None or prediction.is_calibrated:
            return 1.0
        return self._calibration.factor

    def _raw_tokens(self, prediction: LengthPrediction) -> int:
        name = self._options.length
        tokens = prediction.rl_tokens if name == "mean" else getattr(prediction, f"{name}_tokens")
        return max(1, int(tokens))

    def rest_tokens(self, prediction: LengthPrediction | None, generated_tokens: int, max_tokens: int) -> int:
        """Return the padded remaining tokens: at least one block's, at most the limit's remainder."""
        rest: float = self.whole_tokens(prediction, max_tokens) - generated_tokens
        if rest <= 0:
            factor = 1.0 if prediction is None else self._factor(prediction)
            rest = (
                _TAIL * generated_tokens
                if prediction is None
                else factor * expected_rest_tokens(prediction, generated_tokens / factor)
            )
        padded = max(ceil(rest * (1 + self._options.pad)), self._block_tokens)
        return max(1, min(padded, max_tokens - generated_tokens))


_SPEED_WEIGHT = 0.2
_PREFILL_TOKENS_PER_S = 4000.0
_STEP_S = 0.025
_MEMORY_TOKENS = 16_384


class WorkerSpeeds:
    """Smoothed speeds of a worker; those of a modest accelerator until measured."""

    def __init__(self) -> None:
        self._measured: list[float | None] = [None, None]
        self.prefill_tokens_per_s, self.decode_step_s = _PREFILL_TOKENS_PER_S, _STEP_S

    @property
    def are_measured(self) -> bool:
        """Whether both speeds are measured."""
        return None not in self._measured

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        """Record measured speeds; 0 means not measured."""
        if prefill_tokens_per_s > 0:
            speed = averaged(self._measured[0], prefill_tokens_per_s, _SPEED_WEIGHT)
            self.prefill_tokens_per_s = self._measured[0] = speed
        if decode_step_s > 0:
            step_s = averaged(self._measured[1], decode_step_s, _SPEED_WEIGHT)
            self.decode_step_s = self._measured[1] = step_s

    def work_s(self, prefill_tokens: int, decode_tokens: int) -> float:
        """Return the seconds that this work takes on an idle worker."""
        return prefill_tokens / self.prefill_tokens_per_s + decode_tokens * self.decode_step_s

    def occupied_s(
        self, prefill_tokens: int, decode_tokens: int, memory_tokens: float | None, cached_tokens: int = 0
    ) -> float:
        """Return the seconds of a whole worker: prefill time, and decode time by its share of the KV."""
        held_share = (prefill_tokens + decode_tokens / 2) / (memory_tokens or _MEMORY_TOKENS)
        computed_s = (prefill_tokens - cached_tokens) / self.prefill_tokens_per_s
        return computed_s + held_share * decode_tokens * self.decode_step_s

    def deadline_s(self, task: Task, answer_tokens: int, slo_scale: float) -> float:
        """Return the task's deadline, or one from its expected work, on the clock of `task.arrival_s`."""
        if task.deadline_s is not None:
            return task.deadline_s
        return task.arrival_s + slo_scale * self.work_s(task.prompt_tokens, answer_tokens)
