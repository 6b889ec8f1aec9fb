"""How much to expand: Pie's adaptive controller of the FIFO's length. Pure.

It is told of windows of iterations and answers with the length wanted. Up: a tenth of the swap-ins served the
next token, so the link has time to spare, and the blocks there are are in use; after each raise that was
kept, by twice as many layers. A raise is kept only if throughput rose. Down: the computation waited for KV;
if much, at once to what fits. After any drop it holds for four windows, twice as long each time a raise to
the same length fails again. Low demand: blocks that nobody uses are given back. Source: papers/004 §3.4;
algorithms.md §6."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from services.worker.pie.core.sizes import expansion, higher, lower


@dataclass(frozen=True, slots=True)
class Expansion:
    """What a worker's Pie is at: a value to be reported upward."""

    fifo_layers: int
    capacity_blocks: int
    """What plans may count on."""
    growable_blocks: int
    """More, if the level rose by one."""
    stall_share: float

    def details(self) -> dict[str, float]:
        """For a worker's status."""
        return {
            "pie_fifo_layers": self.fifo_layers,
            "pie_growable_blocks": self.growable_blocks,
            "pie_stall_share": round(self.stall_share, 5),
        }


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a window counts as heavy or idle; shares are of 1."""

    early_share: float = 0.10
    """Swap-ins that found no host layer needed in this token's computation: above it there is room."""
    stall_share: float = 0.01
    """Waiting over computing."""
    foreseen: float = 0.25
    """Of `stall_share`: waits that a length may cause, as far as the last steps tell, and still fits."""
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
    settle_windows: int = 4
    """After a raise, before windows judge it: until the new blocks are in use, at most so many."""
    judge_windows: int = 4
    """At most; a gain in the mean of the first ones is enough."""
    idle_windows: int = 4
    longest_stride: int = 8
    """Layers in one raise."""


@dataclass(frozen=True, slots=True)
class Window:
    """What a number of iterations came to, taken together."""

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
    steps_s: tuple[float, ...] = ()
    """Each iteration's computation; empty: take the mean."""
    fixed_share: float = 0.0
    """Of a decoding iteration's computation, what does not grow with its batch; 0: not known."""
    work_rate: float = 0.0
    """Blocks in use per second, waits included, in iterations that only decode; median. 0: none did."""

    @property
    def rates(self) -> tuple[float, float]:
        """Throughput measured in two ways: tokens per second, and `work_rate`. Tokens per second vary twofold
        with the lengths of those who happen to run, while a raise may bring a few per cent; blocks attended
        to per second vary less, but know nothing of what is computed twice."""
        return self.tokens / self.elapsed_s if self.elapsed_s > 0 else 0.0, self.work_rate


class Reason(StrEnum):
    """Why the length is what it is since the last window."""

    HELD = "held"
    ROOM = "room"
    STALLED = "stalled"
    NO_GAIN = "no gain"
    KEPT = "kept"
    IDLE = "idle"
    RESIZING = "resizing"
    TOO_SLOW = "too slow"
    """The link: swaps at the new length would not be over in time."""


class ExpansionController:
    """Decides for one worker. `most` bounds the length (the model's layers, the host's memory)."""

    def __init__(
        self,
        layers: int,
        most: int,
        thresholds: Thresholds | None = None,
        fifo_layers: int = 0,
        swaps: Callable[[int], int] = lambda fifo_layers: fifo_layers,
    ) -> None:
        """`swaps`: how many a step waits for at a length, in time with its computation."""
        self.fifo_layers = fifo_layers
        self._swaps = swaps
        self.reason = Reason.HELD
        self.most = most
        self._layers = layers
        self._at = thresholds or Thresholds()
        self._hold = 0
        self._stalled = 0
        self._idle = 0
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
        """The length wanted from now on; windows in which slots change size decide nothing."""
        if is_resizing:
            self.reason = Reason.RESIZING
            return self.fifo_layers
        self._recent = [*self._recent, window.rates][-self._at.judge_windows :]
        self.reason = self._decide(window)
        return self.fifo_layers

    @property
    def is_holding(self) -> bool:
        """After a drop: nothing is raised for some windows."""
        return self._hold > 0

    def set_level(self, fifo_layers: int) -> None:
        """Somebody else has decided: what is measured from now on is judged from there."""
        self.fifo_layers = self._before = fifo_layers
        self._trial, self._trial_windows, self._stalled, self._idle, self._hold = None, 0, 0, 0, 0
        self._recent = []

    @property
    def heavy_share(self) -> float:
        """Of the computation: who waits longer drops at once."""
        return self._at.heavy_stall * self._at.stall_share

    def fits(self, swap_s: float, steps_s: Sequence[float], ratio: float) -> bool:
        """Whether, at the length wanted, layers would be back in time for steps such as these. `swap_s` was
        measured; slots will hold `ratio` times as many blocks."""
        return self._is_in_time(self.fifo_layers, swap_s * ratio, steps_s)

    def refuse(self) -> int:
        """A raise turned out not to fit before any block was given out; the length to return to."""
        self.reason = self._fail(Reason.TOO_SLOW)
        return self.fifo_layers

    def _decide(self, window: Window) -> Reason:
        if self.fifo_layers and self._is_stalled(window):
            if self._trial is not None:
                return self._fail(Reason.STALLED)
            return self._drop(Reason.STALLED, to=self._fitting_below(window), hold=self._longer_hold())
        if self._trial is not None:
            judged = self._judge(window)
            return judged if judged is not Reason.KEPT else self._raise_if_room(window, judged)
        if self._hold:
            self._hold -= 1
            return Reason.HELD
        if self._is_idle(window):
            return self._drop(Reason.IDLE)
        return self._raise_if_room(window, Reason.HELD)

    def _is_stalled(self, window: Window) -> bool:
        share = window.stall_s / window.compute_s if window.compute_s > 0 else 0.0
        self._stalled = self._stalled + 1 if share > self._at.stall_share else 0
        return self._stalled > 1 or share > self.heavy_share

    def _is_idle(self, window: Window) -> bool:
        if not self.fifo_layers:
            return False
        blocks = window.capacity_blocks * self._ratio(lower(self.fifo_layers))
        self._idle = self._idle + 1 if window.used_blocks <= self._at.idle * blocks else 0
        return self._idle >= self._at.idle_windows

    def _raise_if_room(self, window: Window, otherwise: Reason) -> Reason:
        wanted = self._highest_fitting(window)
        if wanted <= self.fifo_layers or window.used_blocks < self._at.pressure * window.capacity_blocks:
            return otherwise
        early = window.early_swap_ins / window.swap_ins if window.swap_ins else 1.0
        if self.fifo_layers and early < self._at.early_share:
            return otherwise
        self._trial, self._trial_windows = self._rates(), 0
        self._recent = []
        self._before = self.fifo_layers
        self.fifo_layers = wanted
        return Reason.ROOM

    def _highest_fitting(self, window: Window) -> int:
        """Within one raise; the present length when there is none."""
        if not self.fifo_layers:
            return min(higher(0), self.most)
        wanted = min(self.fifo_layers + self._stride, self.most)
        while wanted > self.fifo_layers and not self._is_fitting(wanted, window):
            wanted -= 1
        return wanted

    def _fitting_below(self, window: Window) -> int:
        """One less; far less where swaps take far too long."""
        wanted = lower(self.fifo_layers)
        while wanted and not self._is_fitting(wanted, window):
            wanted = lower(wanted)
        return wanted

    def _is_fitting(self, wanted: int, window: Window) -> bool:
        if not window.swap_s or not window.compute_s:
            return True
        steps_s = window.steps_s or (window.compute_s / window.iterations,)
        return self._is_in_time(wanted, window.swap_s * self._ratio(wanted), steps_s)

    def _is_in_time(self, fifo_layers: int, swap_s: float, steps_s: Sequence[float]) -> bool:
        """q swaps while n − 1 layers compute: in half of the steps, and with few waits in all of them. Steps
        of few sequences are short, while a swap takes what it takes."""
        turn_s, share = self._swaps(fifo_layers) * swap_s, (self._layers - 1) / self._layers
        waits_s = sum(max(0.0, turn_s - share * each) for each in steps_s)
        is_rare = waits_s <= self._at.foreseen * self._at.stall_share * sum(steps_s)
        return is_rare and turn_s <= share * median(steps_s)

    def _ratio(self, other: int) -> float:
        """Blocks with a FIFO of `other`, over those now."""
        return expansion(self._layers, other) / expansion(self._layers, self.fifo_layers)

    def _judge(self, window: Window) -> Reason:
        assert self._trial is not None
        self._trial_windows += 1
        is_filled = window.used_blocks >= self._at.pressure * window.capacity_blocks
        if self._trial_windows == 1 or (not is_filled and self._trial_windows <= self._at.settle_windows):
            self._recent = []
            return Reason.HELD
        goals = [(1 + self._at.gain) * before for before in self._trial]
        has_risen = any(now > 0 and now >= goal for now, goal in zip(self._rates(), goals, strict=True))
        if has_risen or self._is_gain_shown(window):
            self._failures.pop(self.fifo_layers, None)
            self._stride = min(2 * self._stride, self._at.longest_stride)
            self._trial = None
            return Reason.KEPT
        return Reason.HELD if len(self._recent) < self._at.judge_windows else self._fail(Reason.NO_GAIN)

    def _is_gain_shown(self, window: Window) -> bool:
        """Whether steps of different sizes say that so much larger batches bring enough, and nobody waits.
        One raise brings a few per cent, between windows whose throughput varies twofold."""
        larger = 1 / self._ratio(self._before)
        gain = larger / (window.fixed_share + (1 - window.fixed_share) * larger) - 1
        return gain >= self._at.gain and window.stall_s <= self._at.stall_share * window.compute_s

    def _rates(self) -> tuple[float, ...]:
        """Means of the last windows that count."""
        return tuple(sum(rates) / len(rates) for rates in zip(*self._recent, strict=True))

    def _fail(self, reason: Reason) -> Reason:
        return self._drop(reason, to=self._before, hold=self._longer_hold())

    def _longer_hold(self) -> int:
        """This length failed once more."""
        failures = self._failures[self.fifo_layers] = self._failures.get(self.fifo_layers, 0) + 1
        return min(self._at.longest_hold_windows, self._at.hold_windows << (failures - 1))

    def _drop(self, reason: Reason, *, to: int | None = None, hold: int | None = None) -> Reason:
        self._hold = self._at.hold_windows if hold is None else hold
        self.fifo_layers = lower(self.fifo_layers) if to is None else to
        self._trial, self._trial_windows, self._stalled, self._idle = None, 0, 0, 0
        self._recent = []
        self._stride = 1
        return reason

    def check_integrity(self) -> None:
        """AssertionError when the length is none that there can be, or a hold is longer than any may be."""
        assert self.fifo_layers == 0 or 3 <= self.fifo_layers <= self.most
        assert 0 <= self._hold <= max(self._at.hold_windows, self._at.longest_hold_windows)
