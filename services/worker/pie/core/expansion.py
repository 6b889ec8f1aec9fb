"""How much to expand: Pie's adaptive controller of the FIFO's length. Pure.

It judges windows of iterations. It raises the length while blocks are in use and a tenth of the swap-ins come
early, by twice as many layers after each kept raise, and keeps a raise only if throughput rose. It lowers the
length when the computation waits for KV or blocks are idle, and then holds it for some windows, longer each
time the same length fails. Source: papers/004 §3.4; algorithms.md §6."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from services.worker.pie.core.sizes import expansion, higher, lower

_EARLY_SHARE = 0.10
"""Share of early swap-ins above which the link has time to spare."""
_STALL_SHARE = 0.01
"""Largest share of waiting over computing."""
_FORESEEN = 0.25
"""Share of `_STALL_SHARE` that a fitting length may cause, judged by the last steps."""
_HEAVY_SHARE = 10.0 * _STALL_SHARE
"""A larger share of waiting lowers the length at once; less has to last two windows."""
_GAIN = 0.01
"""Throughput that a raise must bring."""
_PRESSURE = 0.90
"""Share of blocks in use that makes a raise worth trying."""
_IDLE = 0.80
"""Share of the next lower length's blocks in use that makes it enough."""
_HOLD_WINDOWS, _LONGEST_HOLD_WINDOWS, _IDLE_WINDOWS = 4, 32, 4
_SETTLE_WINDOWS, _JUDGE_WINDOWS = 4, 4
"""Most windows until new blocks are in use, and most windows that then judge a raise."""
_LONGEST_STRIDE = 8
"""Most layers in one raise."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """The state of a worker's Pie, for reports."""

    fifo_layers: int
    capacity_blocks: int
    """Blocks that plans may count on."""
    growable_blocks: int
    """Further blocks at the next level."""
    stall_share: float

    def details(self) -> dict[str, float]:
        """For a worker's status."""
        return {
            "pie_fifo_layers": self.fifo_layers,
            "pie_growable_blocks": self.growable_blocks,
            "pie_stall_share": round(self.stall_share, 5),
        }


@dataclass(frozen=True, slots=True)
class Window:
    """Sums over some iterations."""

    iterations: int
    tokens: int
    """Sampled tokens."""
    elapsed_s: float
    compute_s: float
    """Part of `elapsed_s`, without waits."""
    stall_s: float
    """Time that layers waited for KV."""
    swap_ins: int
    early_swap_ins: int
    used_blocks: int
    """Maximum in the window."""
    capacity_blocks: int
    swap_s: float = 0.0
    """Mean time of a swap in the slower direction; 0: there was none."""
    steps_s: tuple[float, ...] = ()
    """Computation of each iteration; empty: take the mean."""
    fixed_share: float = 0.0
    """Share of a decoding iteration that does not grow with its batch; 0: unknown."""
    work_rate: float = 0.0
    """Median of blocks in use per second, waits included, while decoding; 0: nothing decoded."""

    @property
    def rates(self) -> tuple[float, float]:
        """Throughput as tokens per second, which vary with sequence lengths, and as `work_rate`, which counts
        recomputed tokens too."""
        return self.tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0, self.work_rate


class ExpansionController:
    """Decides for one worker. `most` bounds the length (the model's layers, the host's memory)."""

    def __init__(
        self,
        layers: int,
        most: int,
        fifo_layers: int = 0,
        swaps: Callable[[int], int] = lambda fifo_layers: fifo_layers,
    ) -> None:
        """`swaps`: number of swaps that a step waits for at a length."""
        self.fifo_layers = fifo_layers
        self._swaps = swaps
        self.most = most
        self._layers = layers
        self._hold = self._stalled = self._idle = 0
        self._failures: dict[int, int] = {}
        self._stride = 1
        self._before = fifo_layers
        """Length before the raise that is being tried."""
        self._recent: list[tuple[float, float]] = []
        """Rates of the last windows at this length."""
        self._trial: tuple[float, ...] | None = None
        """Rates before the raise that is being tried."""
        self._trial_windows = 0

    def on_window(self, window: Window, *, is_resizing: bool = False) -> int:
        """Return the length wanted from now on; windows in which slots change size decide nothing."""
        if not is_resizing:
            self._recent = [*self._recent, window.rates][-_JUDGE_WINDOWS:]
            self._decide(window)
        return self.fifo_layers

    @property
    def is_holding(self) -> bool:
        """Whether a drop holds back raises."""
        return self._hold > 0

    def set_level(self, fifo_layers: int) -> None:
        """Set a length that was decided elsewhere, and judge from there."""
        self._drop(fifo_layers, hold=0)
        self._before = fifo_layers

    def is_heavy(self, stall_s: float, compute_s: float) -> bool:
        """Whether so much waiting lowers the length at once."""
        return stall_s > _HEAVY_SHARE * compute_s

    def fits(self, swap_s: float, steps_s: Sequence[float], ratio: float) -> bool:
        """Whether swaps at the present length end in time for such steps. `swap_s` was measured; slots will
        hold `ratio` times as many blocks."""
        return self._is_in_time(self.fifo_layers, swap_s * ratio, steps_s)

    def refuse(self) -> int:
        """Take back a raise before any block is given out; return the length."""
        self._fail()
        return self.fifo_layers

    def _decide(self, window: Window) -> None:
        if self.fifo_layers and self._is_stalled(window):
            if self._trial is not None:
                self._fail()
            else:
                wanted = lower(self.fifo_layers)
                while wanted and not self._is_fitting(wanted, window):
                    wanted = lower(wanted)
                self._drop(wanted, self._longer_hold())
        elif self._trial is not None:
            if self._is_kept(window):
                self._raise_if_room(window)
        elif self._hold:
            self._hold -= 1
        elif self._is_idle(window):
            self._drop(lower(self.fifo_layers), _HOLD_WINDOWS)
        else:
            self._raise_if_room(window)

    def _is_stalled(self, window: Window) -> bool:
        share = window.stall_s / window.compute_s if window.compute_s > 0 else 0.0
        self._stalled = self._stalled + 1 if share > _STALL_SHARE else 0
        return self._stalled > 1 or share > _HEAVY_SHARE

    def _is_idle(self, window: Window) -> bool:
        if not self.fifo_layers:
            return False
        blocks = window.capacity_blocks * self._ratio(lower(self.fifo_layers))
        self._idle = self._idle + 1 if window.used_blocks <= _IDLE * blocks else 0
        return self._idle >= _IDLE_WINDOWS

    def _raise_if_room(self, window: Window) -> None:
        wanted = self._highest_fitting(window)
        if wanted <= self.fifo_layers or window.used_blocks < _PRESSURE * window.capacity_blocks:
            return
        early = window.early_swap_ins / window.swap_ins if window.swap_ins else 1.0
        if self.fifo_layers and early < _EARLY_SHARE:
            return
        self._trial, self._trial_windows = self._rates(), 0
        self._recent = []
        self._before = self.fifo_layers
        self.fifo_layers = wanted

    def _highest_fitting(self, window: Window) -> int:
        """Return the highest fitting length within one raise; else the present one."""
        if not self.fifo_layers:
            return min(higher(0), self.most)
        wanted = min(self.fifo_layers + self._stride, self.most)
        while wanted > self.fifo_layers and not self._is_fitting(wanted, window):
            wanted -= 1
        return wanted

    def _is_fitting(self, wanted: int, window: Window) -> bool:
        if not window.swap_s or not window.compute_s:
            return True
        steps_s = window.steps_s or (window.compute_s / window.iterations,)
        return self._is_in_time(wanted, window.swap_s * self._ratio(wanted), steps_s)

    def _is_in_time(self, fifo_layers: int, swap_s: float, steps_s: Sequence[float]) -> bool:
        """Whether q swaps end while n - 1 layers compute, in half of the steps, and with few waits in all."""
        turn_s, share = self._swaps(fifo_layers) * swap_s, (self._layers - 1) / self._layers
        waits_s = sum(max(0.0, turn_s - share * each) for each in steps_s)
        is_rare = waits_s <= _FORESEEN * _STALL_SHARE * sum(steps_s)
        return is_rare and turn_s <= share * median(steps_s)

    def _ratio(self, other: int) -> float:
        """Return the blocks with a FIFO of `other`, over those now."""
        return expansion(self._layers, other) / expansion(self._layers, self.fifo_layers)

    def _is_kept(self, window: Window) -> bool:
        """Judge the raise that is being tried; whether it is kept."""
        assert self._trial is not None
        self._trial_windows += 1
        is_filled = window.used_blocks >= _PRESSURE * window.capacity_blocks
        if self._trial_windows == 1 or (not is_filled and self._trial_windows <= _SETTLE_WINDOWS):
            self._recent = []
            return False
        goals = [(1 + _GAIN) * before for before in self._trial]
        has_risen = any(now > 0 and now >= goal for now, goal in zip(self._rates(), goals, strict=True))
        if has_risen or self._is_gain_shown(window):
            self._failures.pop(self.fifo_layers, None)
            self._stride = min(2 * self._stride, _LONGEST_STRIDE)
            self._trial = None
            return True
        if len(self._recent) >= _JUDGE_WINDOWS:
            self._fail()
        return False

    def _is_gain_shown(self, window: Window) -> bool:
        """Whether the cost of larger batches shows a gain without waits: throughput alone varies too much."""
        larger = 1 / self._ratio(self._before)
        gain = larger / (window.fixed_share + (1 - window.fixed_share) * larger) - 1
        return gain >= _GAIN and window.stall_s <= _STALL_SHARE * window.compute_s

    def _rates(self) -> tuple[float, ...]:
        """Return the mean rates of the last windows."""
        return tuple(sum(rates) / len(rates) for rates in zip(*self._recent, strict=True))

    def _fail(self) -> None:
        self._drop(self._before, self._longer_hold())

    def _longer_hold(self) -> int:
        """Count another failure of this length; return how long to hold."""
        failures = self._failures[self.fifo_layers] = self._failures.get(self.fifo_layers, 0) + 1
        return min(_LONGEST_HOLD_WINDOWS, _HOLD_WINDOWS << (failures - 1))

    def _drop(self, fifo_layers: int, hold: int) -> None:
        self.fifo_layers, self._hold = fifo_layers, hold
        self._trial, self._trial_windows, self._stalled, self._idle = None, 0, 0, 0
        self._recent = []
        self._stride = 1

    def check_integrity(self) -> None:
        """Raise AssertionError for an impossible length or hold."""
        assert self.fifo_layers == 0 or 3 <= self.fifo_layers <= self.most
        assert 0 <= self._hold <= _LONGEST_HOLD_WINDOWS
