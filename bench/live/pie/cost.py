"""Cost of the longest queue per step, and bytes copied.

Equal decode steps take turns with Pie, and without it on as many blocks (which takes more device memory).
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.kit.turns import order_of
from bench.live.pie.sides import BLOCK_TOKENS, HOST_MB, Ground
from services.worker.core.sampling import SamplePoint
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import load
from services.worker.pie.core.meter import Direction
from services.worker.pie.core.sizes import slot_blocks
from services.worker.pie.settings import PieSettings
from shared.messages.sequence import Sampling

_BLOCKS_EACH = 8
"""Blocks of a sequence; decodes start in the last but one."""
_SLICE_STEPS = 8
_GREEDY = Sampling(seed=0, max_tokens=1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one step, as medians over slices."""

    step_s: float
    engine_cpu_s: float
    """CPU time of the engine's thread."""
    cpu_s: float
    """CPU time of all threads."""
    in_bytes: float
    out_bytes: float
    stall_share: float


class _Stepper:
    """One engine with every block in use, measured in slices of steps."""

    def __init__(self, ground: Ground, fifo_layers: int, layers: int) -> None:
        blocks = slot_blocks(layers, fifo_layers or layers - 1, ground.device_blocks)
        pie = PieSettings(
            enabled=fifo_layers > 0,
            expansion="fixed",
            fifo_layers=fifo_layers,
            host_mb=HOST_MB,
            bandwidth_limit=ground.bandwidth,
        )
        self.engine = TorchEngine(
            load(str(ground.model), dtype="float32", device="cpu"),
            kv_blocks=ground.device_blocks if fifo_layers else blocks,
            block_tokens=BLOCK_TOKENS,
            release=True,
            pie=pie,
        )
        pool = self.engine.make_pool()
        self._tables = [pool.allocate(_BLOCKS_EACH) for _ in range(blocks // _BLOCKS_EACH)]
        self._steps = 0
        self._slices: list[tuple[float, float, float]] = []

    def take(self) -> None:
        began = time.perf_counter(), time.thread_time(), time.process_time()
        for _ in range(_SLICE_STEPS):
            self.engine.step(self._rows())
        ended = time.perf_counter(), time.thread_time(), time.process_time()
        wall, thread, process = ((b - a) / _SLICE_STEPS for a, b in zip(began, ended, strict=True))
        self._slices.append((wall, thread, process))

    def _rows(self) -> list[Row]:
        """Return decode rows at different positions within a block, one token further each time."""
        first, span = (_BLOCKS_EACH - 2) * BLOCK_TOKENS, 2 * BLOCK_TOKENS
        rows = []
        for index, blocks in enumerate(self._tables):
            position = first + (self._steps + 5 * index) % span
            rows.append(Row([3 + index], position, blocks, SamplePoint(_GREEDY, 0, 0)))
        self._steps += 1
        return rows

    def moved(self) -> tuple[float, float, float, float]:
        """Return bytes in and out, and seconds stalled and computed, so far."""
        if self.engine.pie is None:
            return 0.0, 0.0, 0.0, 0.0
        meter = self.engine.pie.meter
        bytes_in, bytes_out = (meter.moved_bytes[each] for each in (Direction.IN, Direction.OUT))
        return bytes_in, bytes_out, meter.stall_s, meter.compute_s

    def cost(self, before: Sequence[float]) -> Cost:
        steps = _SLICE_STEPS * len(self._slices)
        bytes_in, bytes_out, stalled_s, computed_s = (
            now - was for now, was in zip(self.moved(), before, strict=True)
        )
        wall, thread, process = (statistics.median(each) for each in zip(*self._slices, strict=True))
        share = stalled_s / computed_s if computed_s else 0.0
        return Cost(wall, thread, process, bytes_in / steps, bytes_out / steps, share)

    def forget(self) -> None:
        self._slices.clear()

    def close(self) -> None:
        if self.engine.pie is not None:
            self.engine.pie.close()


def compare(ground: Ground, layers: int, slices: int) -> tuple[Cost, Cost]:
    """Return the costs without Pie, and with the longest queue."""
    steppers = [_Stepper(ground, fifo_layers, layers) for fifo_layers in (0, layers - 1)]
    try:
        for each in steppers:
            each.take()
            each.take()
            each.forget()
        before = [each.moved() for each in steppers]
        for turn in range(slices):
            for index in order_of(turn, len(steppers)):
                steppers[index].take()
        plain, queued = (each.cost(was) for each, was in zip(steppers, before, strict=True))
        return plain, queued
    finally:
        for each in steppers:
            each.close()


def figures(plain: Cost, queued: Cost) -> dict[str, float]:
    return {
        "step_vs_none": queued.step_s / plain.step_s,
        "step_engine_cpu_vs_none": queued.engine_cpu_s / plain.engine_cpu_s,
        "step_cpu_vs_none": queued.cpu_s / plain.cpu_s,
        "step_ms": queued.step_s * 1e3,
        "step_mb_in": queued.in_bytes / 1e6,
        "step_mb_out": queued.out_bytes / 1e6,
        "step_stall_share": queued.stall_share,
    }
