"""Costs of Pie's swapping, in windows for the controller, and the gain of more blocks. Pure."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, median

from services.worker.pie.core.expansion import Window
from shared.average import averaged

_WEIGHT = 0.1
"""Weight of the newest step in averages."""
_LATEST_DECODES, _LEAST_DECODES, _LEAST_RANGE = 128, 8, 1.2


class Direction(StrEnum):
    """Which way KV goes: from the host to the device, or back."""

    IN = "in"
    OUT = "out"


class SwapMeter:
    """Sums since the start, and since the last window."""

    def __init__(self) -> None:
        self.stall_s = 0.0
        """In which the computation waited for KV."""
        self.compute_s = 0.0
        """Time of all steps, without the waits."""
        self.moved_bytes = dict.fromkeys(Direction, 0)
        self.iterations = 0
        self._swap_s: dict[Direction, list[float]] = {direction: [] for direction in Direction}
        self._used_blocks = 0
        self._tokens = 0
        self._work_rates: list[float] = []
        self._step_times: list[float] = []
        self._decodes: deque[tuple[int, float]] = deque(maxlen=_LATEST_DECODES)
        self.step_s = 0.0
        """One step's computation, smoothed; 0 before the first."""
        self._before = (0.0, 0.0, 0, 0)

    @property
    def stall_share(self) -> float:
        """Waiting over computing, since the start."""
        return self.stall_s / self.compute_s if self.compute_s else 0.0

    @property
    def decoding_rows(self) -> float:
        """Median rows of the latest iterations without a prompt; 0 before the first."""
        return median(tokens for tokens, _ in self._decodes) if self._decodes else 0.0

    def on_stall(self, waited_s: float) -> None:
        self.stall_s += waited_s

    def on_copied(self, direction: Direction, sent_bytes: int, took_s: float) -> None:
        self.moved_bytes[direction] += sent_bytes
        self._swap_s[direction].append(took_s)

    def window_stall_s(self) -> float:
        """Waited since the last window."""
        return self.stall_s - self._before[0]

    def on_step(
        self, tokens: int, compute_s: float, stall_s: float, used_blocks: int, *, is_decoding: bool
    ) -> None:
        """One iteration; `is_decoding`: no prompt is in it."""
        self.iterations += 1
        if is_decoding and compute_s > 0:
            self._work_rates.append(used_blocks / (compute_s + stall_s))
            self._decodes.append((tokens, compute_s))
        self._step_times.append(compute_s)
        self.step_s = averaged(self.step_s or None, compute_s, _WEIGHT)
        self.compute_s += compute_s
        self._tokens += tokens
        self._used_blocks = max(self._used_blocks, used_blocks)

    def close_window(
        self, iterations: int, swap_ins: int, early_swap_ins: int, capacity_blocks: int
    ) -> Window:
        """Return the sums since the last call. Time without steps, in which nobody asked, does not count.
        `swap_ins`: layers that were brought in since the start, `early_swap_ins` of them early."""
        stall_s, compute_s, ins, early = self._before
        self._before = (self.stall_s, self.compute_s, swap_ins, early_swap_ins)
        window = Window(
            iterations=iterations,
            tokens=self._tokens,
            elapsed_s=self._before[0] - stall_s + self._before[1] - compute_s,
            compute_s=self._before[1] - compute_s,
            stall_s=self._before[0] - stall_s,
            swap_ins=self._before[2] - ins,
            early_swap_ins=self._before[3] - early,
            used_blocks=self._used_blocks,
            capacity_blocks=capacity_blocks,
            swap_s=max(fmean(times or [0.0]) for times in self._swap_s.values()),
            steps_s=tuple(self._step_times),
            work_rate=median(self._work_rates) if self._work_rates else 0.0,
            fixed_share=fixed_share(self._decodes),
        )
        self._work_rates, self._step_times = [], []
        self._tokens = self._used_blocks = 0
        for times in self._swap_s.values():
            times.clear()
        return window


def fixed_share(steps: Iterable[tuple[int, float]]) -> float:
    """Return the share of steps' time (tokens, seconds) that does not grow with tokens; 0: unknown.
    Taken from the medians of the smaller and of the larger third, so that outliers do not count."""
    ordered = sorted(steps)
    third = len(ordered) // 3
    if third < _LEAST_DECODES:
        return 0.0
    (few, short_s), (many, long_s) = (
        (median(tokens for tokens, _ in part), median(took_s for _, took_s in part))
        for part in (ordered[:third], ordered[-third:])
    )
    if many <= few or many < _LEAST_RANGE * few:
        return 0.0
    middle, took_s = (few + many) / 2, (short_s + long_s) / 2
    per_token_s = max(0.0, (long_s - short_s) / (many - few))
    return max(0.0, 1 - per_token_s * middle / took_s) if took_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a decoding step: a fixed time, and a time for each row. Copies come on top: 40 ms and 5 ms a
    row; 8 rows fill the memory; 1.8 times as many blocks, 4 ms of copies now 8 rows in 80 ms, 100 tokens/s;
    then 14.4 rows in 112 + 4 ms, 124 tokens/s: a gain of 0.24"""

    fixed_s: float
    row_s: float

    @classmethod
    def of(cls, few: tuple[int, float], many: tuple[int, float]) -> "DecodeCost":
        """Return the cost, from steps of two sizes as (rows, seconds)."""
        (few_rows, few_s), (many_rows, many_s) = few, many
        row_s = max(0.0, (many_s - few_s) / (many_rows - few_rows))
        return cls(max(0.0, few_s - few_rows * row_s), row_s)

    def gain(self, rows: float, ratio: float, copies_s: float) -> float:
        """Return the gain of throughput, as a share, of `ratio` times as many rows with `copies_s` of copying
        in each step; 0: nothing runs."""
        now_s = self.fixed_s + rows * self.row_s
        then_s = self.fixed_s + rows * ratio * self.row_s + copies_s
        return ratio * now_s / then_s - 1 if rows > 0 and then_s > 0 else 0.0
