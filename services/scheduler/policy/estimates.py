"""Estimates of policies: remaining answer lengths, work in seconds, speeds and rates, and block usage.

An answer that outlives its prediction is expected to continue for E[RL − g | RL > g], from the prediction's
quantiles. Source: papers/003 §2.3 (padding), §3.2.2 (under-prediction); algorithms.md §1.
"""

from collections.abc import Sequence
from math import ceil, exp
from typing import Any

import numpy as np
import numpy.typing as npt

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


_PRIOR_S = 1.0
"""Worker seconds that the initial rate counts for."""
_MEMORY_S = 30.0
"""Time constant of forgetting, in seconds of full workers."""
_LEAST = 1e-6
_FULL_AFTER_S = 1.0
"""Seconds of waiting after which workers count as full."""
_LONGEST_TICK_S = 1.0
"""Longest time that one tick counts."""


class DrainRate:
    """Measures the seconds of work that one worker completes per second while requests wait."""

    def __init__(self) -> None:
        self._done_s = self._full_s = _PRIOR_S
        """Weighted completed work and full worker time."""
        self._counted_s = _PRIOR_S
        """Full worker time at the last end."""
        self._ended_s = 0.0
        """Work that ended since the last tick."""
        self._quiet_s = 0.0
        """Time since the last end; nothing is forgotten meanwhile, because long answers may end together."""
        self._since_s: float | None = None
        """Start of the present wait."""
        self._is_open = False
        """Whether a sequence has ended since the workers are full; measurement starts there."""
        self._ticked_s: float | None = None

    @property
    def per_worker(self) -> float:
        """Completed work per second, above 0."""
        return max(_LEAST, self._done_s / self._full_s)

    def end(self, work_s: float) -> None:
        """Count the end of a sequence whose expected work was `work_s`."""
        self._ended_s += max(0.0, work_s)

    def on_tick(self, now_s: float, workers: int, *, is_waited: bool) -> None:
        """Advance time; call often. `is_waited`: requests wait now."""
        passed_s = 0.0 if self._ticked_s is None else min(now_s - self._ticked_s, _LONGEST_TICK_S)
        self._ticked_s = now_s
        ended_s, self._ended_s = self._ended_s, 0.0
        if not is_waited or workers == 0:
            self._since_s, self._is_open = None, False
            self._forget(passed_s)
            return
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < _FULL_AFTER_S:
            return
        if not self._is_open:
            self._is_open = ended_s > 0
            return
        self._full_s += passed_s * workers
        self._quiet_s += passed_s
        if ended_s > 0:
            kept = exp(-self._quiet_s / _MEMORY_S)
            added_s = self._full_s - self._counted_s
            self._full_s = self._counted_s = self._counted_s * kept + added_s
            self._done_s = self._done_s * kept + ended_s
            self._quiet_s = 0.0

    def _forget(self, passed_s: float) -> None:
        """Return slowly to the initial rate while nothing waits."""
        kept = exp(-passed_s / _MEMORY_S)
        self._done_s = _PRIOR_S + (self._done_s - _PRIOR_S) * kept
        self._full_s = _PRIOR_S + (self._full_s - _PRIOR_S) * kept
        self._counted_s = _PRIOR_S + (self._counted_s - _PRIOR_S) * kept


BUCKET_TOKENS = 32
MAX_BUCKETS = 256
_Blocks = npt.NDArray[np.int64]
_LEAST_BUCKET_TOKENS = 4
_OVERCOUNT = 1 / 16
_NOTHING: _Blocks = np.zeros(0, dtype=np.int64)
_INDICES = np.arange(MAX_BUCKETS, dtype=np.int64)


def bucket_tokens(rests: Sequence[int], kv_tokens: int) -> int:
    """Return the best bucket width, a power of two, for the remaining tokens of the running sequences. A
    bucket overcounts each by up to its width; together at most a sixteenth of the KV, if the bucket count
    allows."""
    longest = max(rests, default=0)
    width = BUCKET_TOKENS
    while (
        width > _LEAST_BUCKET_TOKENS
        and len(rests) * width > kv_tokens * _OVERCOUNT
        and longest <= width // 2 * MAX_BUCKETS
    ):
        width //= 2
    return width


class UsageProfile:
    """Predicted block usage of one worker's running sequences over time, in buckets of decode steps.

    A sequence may start if the blocks suffice at every predicted completion. If all fit together at their
    ends, no time is needed; arrays are built only otherwise. Source: algorithms.md §1 (Beyond the paper).

        8 blocks of 4 tokens: a grows from 4 to 16 tokens, b from 4 to 8 → 4 and 2 blocks at their ends. c,
        which grows to 16 too, fits: when a and c hold 4 each, b is gone.
    """

    def __init__(
        self,
        growing: Sequence[tuple[int, int, int]],
        constant_blocks: int,
        limit_blocks: int,
        block_tokens: int,
        kv_tokens: int | None = None,
    ) -> None:
        """`growing`: (tokens now, tokens at the end, blocks held) of each running sequence. `kv_tokens`:
        capacity for `bucket_tokens`, None for the default width."""
        self._kv_tokens = kv_tokens
        self._bucket_tokens = BUCKET_TOKENS
        self._block_tokens = block_tokens
        self._limit_blocks = limit_blocks
        self._growing = growing
        self._constant_blocks = constant_blocks
        self._ceiling_blocks = constant_blocks
        """Blocks if all sequences were at their ends together."""
        for _, end, held in growing:
            blocks = -(-end // block_tokens)
            self._ceiling_blocks += blocks if blocks > held else held
        self._started: list[tuple[int, int, int]] | None = []
        """Sequences not yet in the arrays; None once arrays exist."""
        self._peak_blocks = constant_blocks
        self._usage: _Blocks = _NOTHING

    def _most(self, end_tokens: int, held_blocks: int) -> int:
        blocks = -(-end_tokens // self._block_tokens)
        return blocks if blocks > held_blocks else held_blocks

    def _make(self) -> None:
        """Build the arrays."""
        if self._started is None:
            return
        started, self._started = self._started, None
        if self._kv_tokens is not None:
            self._bucket_tokens = bucket_tokens([end - now for now, end, _ in self._growing], self._kv_tokens)
        self._usage = np.full(1, self._constant_blocks, dtype=np.int64)
        if self._growing:
            table: Any = np.array(self._growing, dtype=np.int64)
            now, end = table[:, 0:1], table[:, 1:2]
            self._reach(int((end - now).max()))
            self._usage += self._demand(now, end, table[:, 2:3]).sum(axis=0)
            self._peak_blocks = int(self._usage.max())
        for one in started:
            self._add(*one)

    @property
    def free_blocks(self) -> int:
        """Number of blocks that may be taken for good; negative if there are too few."""
        self._make()
        return self._limit_blocks - self._peak_blocks

    def _reach(self, steps: int) -> None:
        """Extend the arrays to cover `steps`."""
        buckets = min(MAX_BUCKETS, max(1, -(-steps // self._bucket_tokens)))
        missing = buckets - len(self._usage)
        if missing > 0:
            self._usage = np.append(self._usage, np.full(missing, self._constant_blocks, dtype=np.int64))

    def _demand(self, now: Any, end: Any, held: Any) -> Any:
        starts = _INDICES[: len(self._usage)] * self._bucket_tokens
        blocks = -(-np.minimum(end, now + starts + self._bucket_tokens) // self._block_tokens)
        return np.where(starts < np.maximum(end - now, 1), np.maximum(blocks, held), 0)

    def which_fit(self, candidates: Sequence[tuple[int, int, int]]) -> list[bool]:
        """Return for each (tokens now, at the end, blocks held) whether it alone may run to its end."""
        most_blocks = max(self._most(end, held) for _, end, held in candidates)
        if self._ceiling_blocks + most_blocks <= self._limit_blocks:
            return [True] * len(candidates)
        self._make()
        table: Any = np.array(candidates, dtype=np.int64)
        now, end, held = table[:, 0:1], table[:, 1:2], table[:, 2:3]
        peaks: Any = (self._usage + self._demand(now, end, held)).max(axis=1)
        last = self._constant_blocks + -(-table[:, 1] // self._block_tokens)
        steps = table[:, 1] - table[:, 0]
        peaks = np.where(steps > len(self._usage) * self._bucket_tokens, np.maximum(peaks, last), peaks)
        fits: list[bool] = (peaks - table[:, 2] <= self._limit_blocks).tolist()
        return fits

    def fits(self, now_tokens: int, end_tokens: int, held_blocks: int) -> bool:
        """Return `which_fit` for one candidate."""
        if self._ceiling_blocks + self._most(end_tokens, held_blocks) - held_blocks <= self._limit_blocks:
            return True
        self._make()
        demand: _Blocks = self._demand(now_tokens, end_tokens, held_blocks)
        peak = int((self._usage + demand).max())
        if end_tokens - now_tokens > len(self._usage) * self._bucket_tokens:
            peak = max(peak, self._constant_blocks + -(-end_tokens // self._block_tokens))
        return peak - held_blocks <= self._limit_blocks

    def start(self, now_tokens: int, end_tokens: int, held_blocks: int) -> None:
        """Add a sequence that starts; its held blocks were counted as constant until now."""
        self._ceiling_blocks += self._most(end_tokens, held_blocks) - held_blocks
        if self._started is None:
            self._add(now_tokens, end_tokens, held_blocks)
        else:
            self._started.append((now_tokens, end_tokens, held_blocks))

    def _add(self, now_tokens: int, end_tokens: int, held_blocks: int) -> None:
        self._reach(end_tokens - now_tokens)
        self._usage = self._usage + self._demand(now_tokens, end_tokens, held_blocks) - held_blocks
        self._constant_blocks -= held_blocks
        self._peak_blocks = int(self._usage.max())
