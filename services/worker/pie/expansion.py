"""How much to expand: Pie's adaptive controller of the FIFO's length. Pure.

It is told of windows of iterations and answers with the length wanted. Up: a tenth of the swap-ins served
the next token, so the link has time to spare, and the blocks there are are in use. A raise is kept only if
throughput rose. Down: the computation waited for KV. After any drop it holds for four windows, twice as
long each time a raise at the same length fails again. Low demand: blocks that nobody uses are given back.
Source: papers/004 §3.4; algorithms.md §6.
"""

from dataclasses import dataclass
from enum import StrEnum

from services.worker.pie.sizes import expansion, higher, lower


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Shares are of 1."""

    early_share: float = 0.10
    """Swap-ins that found no host layer needed in this token's computation: above it there is room."""
    stall_share: float = 0.01
    """Waiting over computing."""
    heavy_stall: float = 10.0
    """So many times `stall_share` is believed at once; less has to last two windows."""
    gain: float = 0.01
    """Throughput that a raise must bring."""
    pressure: float = 0.90
    """Blocks in use, of those there are, that make a raise worth trying."""
    idle: float = 0.80
    """Blocks in use, of those of the next lower step, that make it enough."""
    hold_windows: int = 4
    longest_hold_windows: int = 32
    settle_windows: int = 1
    """After a raise, before the windows that judge it."""
    judge_windows: int = 1
    idle_windows: int = 4


@dataclass(frozen=True, slots=True)
class Window:
    """What a number of iterations came to."""

    iterations: int
    tokens: int
    """Sampled."""
    elapsed_s: float
    compute_s: float
    """Of `elapsed_s`, in layers whose KV was there."""
    stall_s: float
    """Waiting for layers."""
    swap_ins: int
    early_swap_ins: int
    used_blocks: int
    """At most, in the window."""
    capacity_blocks: int
    swap_s: float = 0.0
    """One swap, the slower direction, mean; 0: none was seen."""
    work_blocks: float = 0.0
    """Blocks in use, summed over the iterations that only decode."""
    work_s: float = 0.0
    """Those iterations' time, waits included."""

    @property
    def throughput(self) -> float:
        """Blocks attended to per second, where there are iterations to measure it in, else tokens per
        second.

        Tokens per second vary twofold with the lengths of those who happen to run; what a raise brings is a
        few per cent. At equal lengths the two are proportional.
        """
        if self.work_s > 0:
            return self.work_blocks / self.work_s
        return self.tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0


class Reason(StrEnum):
    """Why the length is what it is since the last window."""

    HELD = "held"
    ROOM = "room"
    STALLED = "stalled"
    NO_GAIN = "no gain"
    KEPT = "kept"
    IDLE = "idle"
    RESIZING = "resizing"


class ExpansionController:
    """Decides for one worker. `most` bounds the length (the model's layers, the host's memory)."""

    def __init__(
        self, layers: int, most: int, thresholds: Thresholds | None = None, fifo_layers: int = 0
    ) -> None:
        self.fifo_layers = fifo_layers
        self.reason = Reason.HELD
        self.most = most
        self._layers = layers
        self._at = thresholds or Thresholds()
        self._hold = 0
        self._stalled = 0
        self._idle = 0
        self._failures: dict[int, int] = {}
        self._recent: list[float] = []
        self._trial: float | None = None
        """Throughput before the raise that is being tried."""
        self._trial_windows = 0

    def on_window(self, window: Window, *, is_resizing: bool = False) -> int:
        """The length wanted from now on; windows in which slots change size decide nothing."""
        if is_resizing:
            self.reason = Reason.RESIZING
            return self.fifo_layers
        self.reason = self._decide(window)
        self._recent = [*self._recent, window.throughput][-self._at.judge_windows :]
        return self.fifo_layers

    def _decide(self, window: Window) -> Reason:
        if self.fifo_layers and self._is_stalled(window):
            return self._fail(Reason.STALLED) if self._trial is not None else self._drop(Reason.STALLED)
        if self._trial is not None:
            judged = self._judge(window)
            return self._raise(window) if judged is Reason.KEPT and self._has_room(window) else judged
        if self._hold:
            self._hold -= 1
            return Reason.HELD
        if self._is_idle(window):
            return self._drop(Reason.IDLE)
        if self._has_room(window):
            return self._raise(window)
        return Reason.HELD

    def _is_stalled(self, window: Window) -> bool:
        share = window.stall_s / window.compute_s if window.compute_s > 0 else 0.0
        self._stalled = self._stalled + 1 if share > self._at.stall_share else 0
        is_heavy = share > self._at.heavy_stall * self._at.stall_share
        return self._stalled > 1 or (is_heavy and self._trial_windows != 1)

    def _is_idle(self, window: Window) -> bool:
        if not self.fifo_layers:
            return False
        blocks = window.capacity_blocks * self._ratio(lower(self.fifo_layers))
        self._idle = self._idle + 1 if window.used_blocks <= self._at.idle * blocks else 0
        return self._idle >= self._at.idle_windows

    def _has_room(self, window: Window) -> bool:
        wanted = higher(self.fifo_layers)
        if wanted > self.most or window.used_blocks < self._at.pressure * window.capacity_blocks:
            return False
        if not self.fifo_layers:
            return True
        early = window.early_swap_ins / window.swap_ins if window.swap_ins else 1.0
        return early >= self._at.early_share and self._is_fitting(wanted, window)

    def _is_fitting(self, wanted: int, window: Window) -> bool:
        """Whether a layer would be back in time: q swaps of larger slots within n − 1 layers' computation."""
        if not window.swap_s or not window.compute_s:
            return True
        token_s = window.compute_s / window.iterations
        swap_s = window.swap_s * self._ratio(wanted)
        return wanted * swap_s <= token_s * (self._layers - 1) / self._layers

    def _ratio(self, other: int) -> float:
        """Blocks with a FIFO of `other`, over those now."""
        return expansion(self._layers, other) / expansion(self._layers, self.fifo_layers)

    def _raise(self, window: Window) -> Reason:
        self._trial, self._trial_windows = self._throughput(window), 0
        self._recent = []
        self.fifo_layers = higher(self.fifo_layers)
        return Reason.ROOM

    def _judge(self, window: Window) -> Reason:
        assert self._trial is not None
        self._trial_windows += 1
        if self._trial_windows < self._at.settle_windows + self._at.judge_windows:
            return Reason.HELD
        if self._throughput(window) < (1 + self._at.gain) * self._trial:
            return self._fail(Reason.NO_GAIN)
        self._failures.pop(self.fifo_layers, None)
        self._trial = None
        self._trial_windows = 0
        return Reason.KEPT

    def _throughput(self, window: Window) -> float:
        """Mean of the last windows that count, this one included."""
        rates = [*self._recent, window.throughput][-self._at.judge_windows :]
        return sum(rates) / len(rates)

    def _fail(self, reason: Reason) -> Reason:
        failures = self._failures[self.fifo_layers] = self._failures.get(self.fifo_layers, 0) + 1
        hold = min(self._at.longest_hold_windows, self._at.hold_windows << (failures - 1))
        return self._drop(reason, hold)

    def _drop(self, reason: Reason, hold: int | None = None) -> Reason:
        self._hold = self._at.hold_windows if hold is None else hold
        self.fifo_layers = lower(self.fifo_layers)
        self._trial, self._trial_windows, self._stalled, self._idle = None, 0, 0, 0
        self._recent = []
        return reason

    def check_integrity(self) -> None:
        """AssertionError when the length is none that there can be, or a hold is longer than any may be."""
        assert self.fifo_layers == 0 or 3 <= self.fifo_layers <= self.most
        assert 0 <= self._hold <= max(self._at.hold_windows, self._at.longest_hold_windows)
