"""Cost of a step that swaps KV: the model's cost plus stalls of the paper's swap controller.

A step's layers take equal times; a swap takes the bytes of the step's context over the link's bandwidth.
Stalls come from running the controller at that ratio (`timeline.settle`). There are none if every layer is
back in time, which a test compares with the controller. As in the paper, swapping a layer moves as many bytes
out as in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from services.worker.core.costs import CostModel
from services.worker.pie.core.expansion import Window
from sim.pie.timeline import Pace, Steady, settle

_COMPUTE_TICKS = 100
_GRID = 1.05
"""Ratios of swap time to compute time are rounded up to powers of this."""


@dataclass(frozen=True, slots=True)
class PieModel:
    """KV size of a model, in bytes per token and layer."""

    name: str
    cost: str
    layers: int
    token_layer_bytes: int

    def capacity_blocks(self, device_bytes: float, block_tokens: int) -> int:
        return int(device_bytes // (self.layers * self.token_layer_bytes * block_tokens))


@dataclass(frozen=True, slots=True)
class Interconnect:
    """Bandwidth of a link in bytes per second, by direction."""

    to_device: float
    to_host: float
    source: str


GH200 = Interconnect(419e9, 371e9, "papers/004 §2.4, measured with nvbandwidth")


def is_in_time(layers: int, fifo_layers: int, swap_in: float, swap_out: float, compute: float) -> bool:
    """Whether layers are back before they are needed: q swaps fit into the computation of n − 2 layers."""
    return fifo_layers * max(swap_in, swap_out) <= (layers - 2) * compute


@lru_cache(maxsize=65536)
def _settled(layers: int, fifo_layers: int, exponent_in: int, exponent_out: int) -> Steady:
    swap_in, swap_out = (
        max(1, math.ceil(_COMPUTE_TICKS * _GRID**exponent)) for exponent in (exponent_in, exponent_out)
    )
    return settle(layers, fifo_layers, Pace(_COMPUTE_TICKS, swap_in, swap_out), warm_tokens=4, tokens=4)


def steady(layers: int, fifo_layers: int, swap_in_s: float, swap_out_s: float, compute_s: float) -> Steady:
    """Return stalls and early swaps per token with `fifo_layers` layers in the queue."""
    if not fifo_layers or not compute_s:
        return Steady(0.0, 0.0, 0.0)
    slower = max(swap_in_s, swap_out_s) / compute_s
    if is_in_time(layers, fifo_layers, swap_in_s, swap_out_s, compute_s):
        early = max(0.0, 1 - (fifo_layers - 1) * slower / layers)
        return Steady(0.0, early, min(layers, layers / max(slower, 1e-9)))
    exponents = [math.ceil(math.log(each / compute_s, _GRID)) for each in (swap_in_s, swap_out_s)]
    return _settled(layers, fifo_layers, *exponents)


@dataclass
class PieCost:
    """A `CostModel` with a queue of variable length, which also collects windows as a worker's meter does."""

    base: CostModel
    model: PieModel
    link: Interconnect
    fifo_layers: int = 0
    background_bytes_s: float = 0.0
    """Other traffic on the link, in each direction."""
    iterations: int = 0
    stall_s: float = 0.0
    compute_s: float = 0.0
    _tokens: int = 0
    _swap_ins: float = 0.0
    _early: float = 0.0
    _work_tokens: int = 0
    _work_s: float = 0.0
    _swap_s: float = 0.0
    _before: tuple[float, float] = field(default=(0.0, 0.0))

    @property
    def name(self) -> str:
        return f"{self.base.name}+pie"

    def step_s(self, chunks: Sequence[tuple[int, int]], decodes: int, context_tokens: int) -> float:
        took_s = self.base.step_s(chunks, decodes, context_tokens)
        tokens = context_tokens + sum(end for _, end in chunks)
        swap_s, found = self._swaps(tokens, took_s)
        self._add(took_s, found, decodes, swap_s)
        if not chunks:
            self._work_tokens += tokens
            self._work_s += took_s * (1 + found.stall_share)
        return took_s * (1 + found.stall_share)

    def _swaps(self, tokens: int, took_s: float) -> tuple[float, Steady]:
        """Return swap time and stalls: each swap moves the whole context of the step."""
        layers, moved = self.model.layers, tokens * self.model.token_layer_bytes
        swap_in_s = moved / max(self.link.to_device - self.background_bytes_s, 1.0)
        swap_out_s = moved / max(self.link.to_host - self.background_bytes_s, 1.0)
        found = steady(layers, self.fifo_layers, swap_in_s, swap_out_s, took_s / layers)
        return max(swap_in_s, swap_out_s), found

    def _add(self, took_s: float, found: Steady, decodes: int, swap_s: float) -> None:
        self.iterations += 1
        self.compute_s += took_s
        self.stall_s += took_s * found.stall_share
        self._tokens += decodes
        self._swap_ins += found.swap_ins
        self._early += found.swap_ins * found.early_share
        self._swap_s += swap_s

    def close_window(self, elapsed_s: float, capacity_blocks: int, used_blocks: int) -> Window:
        """Return the window since the last call and start a new one."""
        compute_s, stall_s = self._before
        window = Window(
            iterations=self.iterations,
            tokens=self._tokens,
            elapsed_s=elapsed_s,
            compute_s=self.compute_s - compute_s,
            stall_s=self.stall_s - stall_s,
            swap_ins=round(100 * self._swap_ins),
            early_swap_ins=round(100 * self._early),
            used_blocks=used_blocks,
            capacity_blocks=capacity_blocks,
            swap_s=self._swap_s / max(1, self.iterations) if self.fifo_layers else 0.0,
            work_rate=self._work_tokens / self._work_s if self._work_s else 0.0,
        )
        self._before = (self.compute_s, self.stall_s)
        self.iterations = self._tokens = self._work_tokens = 0
        self._swap_ins = self._early = self._swap_s = self._work_s = 0.0
        return window
