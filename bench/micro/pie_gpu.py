"""`python -m bench pie-gpu`: Pie's real copies beside the computation of Llama-2-13B's shapes.

Steps of one token for a batch, layer by layer through the worker's own store: matrix products with one
layer's weights (all layers use the same: they are larger than any cache) and a pass over the layer's KV.
Overlap by the device's clock: a step with a queue, all blocks of its expansion in use, against one on as many
blocks with every layer in place, on a device of so much more memory.
Needs a CUDA device; `measure` itself runs anywhere. Source: papers/004 §5.
"""

import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.micro.gpu.bench import cuda_device
from bench.micro.gpu.steps import BLOCK_TOKENS, DTYPE, MODELS, Shape
from services.worker.engine.attention import LayerShape, make_pools
from services.worker.pie.assembly import LayerPie, assemble
from services.worker.pie.core.sizes import slot_blocks
from services.worker.pie.memory import BlockShape
from services.worker.pie.settings import PieSettings

_QUEUES = (3, 4, 6, 10, 17, 25)
_HOST_MB = 1 << 17
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of a step, and what its copies came to."""

    step_s: float
    stall_share: float
    """The host's waits over computing: an upper bound of the device's."""
    bytes_per_s: float
    """Of one direction, while it copied; 0 without copies."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=32, help="sequences [%(default)s]")
    parser.add_argument("--gb", type=float, default=3.0, help="of KV on the device [%(default)s]")
    parser.add_argument("--queues", nargs="+", type=int, default=list(_QUEUES), help="layers swapped")
    parser.add_argument("--steps", type=int, default=48)


def run(context: Context) -> Outcome:
    """Raises ConfigError where there is no CUDA device."""
    device, flags, shape = cuda_device(), context.arguments, MODELS["llama2_13b"]
    steps = 12 if context.quick else flags.steps
    block_bytes = shape.kv_bytes(1, BLOCK_TOKENS) * shape.layers
    blocks = int(flags.gb * 1e9 // block_bytes)
    compute = layer_of(shape, flags.batch, device)
    figures: dict[str, float] = {}
    rows = []
    for fifo_layers in flags.queues[-2:] if context.quick else flags.queues:
        used = slot_blocks(shape.layers, fifo_layers, blocks)
        plain = measure(shape, 0, used, used, compute, device, steps, batch=flags.batch)
        found = measure(shape, fifo_layers, blocks, used, compute, device, steps, batch=flags.batch)
        figures[f"step_vs_none_q{fifo_layers}"] = found.step_s / plain.step_s
        figures[f"stall_share_q{fifo_layers}"] = max(0.0, found.step_s / plain.step_s - 1)
        figures[f"host_wait_share_q{fifo_layers}"] = found.stall_share
        figures[f"gb_s_q{fifo_layers}"] = found.bytes_per_s / 1e9
        rows.append((fifo_layers, found.step_s * 1e3, plain.step_s * 1e3, found.bytes_per_s / 1e9))
    name = torch.cuda.get_device_properties(device).name
    table = Table("a step with a queue", ("layers", "ms", "ms without", "GB/s"), rows)
    return Outcome(figures, 0, [table], [f"device: {name}; KV {flags.gb:g} GB, batch {flags.batch}"])


def layer_of(
    shape: Shape, batch: int, device: torch.device, dtype: torch.dtype = DTYPE
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """One layer's computation for `batch` tokens: its products, and a pass over its K and V."""
    rows = (shape.q_heads + 2 * shape.kv_heads) * shape.head_dim
    sizes = [(shape.hidden, rows), (shape.q_heads * shape.head_dim, shape.hidden)]
    sizes += [(shape.hidden, 2 * shape.intermediate), (shape.intermediate, shape.hidden)]
    weights = [torch.randn(size, dtype=dtype, device=device) for size in sizes]
    inputs = [torch.randn(batch, size[0], dtype=dtype, device=device) for size in sizes]

    def compute(keys: torch.Tensor, values: torch.Tensor) -> None:
        for one, weight in zip(inputs, weights, strict=True):
            torch.matmul(one, weight)
        keys.amax()
        values.amax()

    return compute


def measure(
    shape: Shape,
    fifo_layers: int,
    device_blocks: int,
    used_blocks: int,
    compute: Callable[[torch.Tensor, torch.Tensor], None],
    device: torch.device,
    steps: int,
    dtype: torch.dtype = DTYPE,
    batch: int = 1,
) -> Overlap:
    """Median of `steps` steps, after a quarter as many, with the first `used_blocks` blocks in use.

    A step writes to one block for each of `batch` sequences, as far as the store is told.
    """
    settings = PieSettings(enabled=True, expansion="fixed", fifo_layers=fifo_layers, host_mb=_HOST_MB)
    layer = LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim)
    pie = assemble(
        settings,
        [BlockShape(shape.kv_heads, shape.head_dim, shape.head_dim, BLOCK_TOKENS, dtype)] * shape.layers,
        lambda blocks: make_pools(layer, blocks, BLOCK_TOKENS, dtype, device),
        device_blocks=device_blocks,
        device=device,
    )
    assert isinstance(pie, LayerPie), "whole layers, without the native library"
    used, written = range(used_blocks), range(0, used_blocks, max(1, used_blocks // batch))
    pie.store.attach(lambda: used)
    try:
        for _ in range(max(2, steps // 4)):
            _step(pie, used_blocks, written, compute, device)
        meter = pie.store.meter
        moved, copied_s = sum(meter.moved_bytes.values()), meter.copying_s
        stalled_s, computed_s = sum(meter.stall_s), meter.compute_s
        times = [_step(pie, used_blocks, written, compute, device) for _ in range(steps)]
        moved, copied_s = sum(meter.moved_bytes.values()) - moved, meter.copying_s - copied_s
        stalled_s, computed_s = sum(meter.stall_s) - stalled_s, meter.compute_s - computed_s
    finally:
        pie.store.close(_DEADLINE_S)
    share = stalled_s / computed_s if computed_s else 0.0
    return Overlap(statistics.median(times), share, moved / copied_s if copied_s else 0.0)


@torch.inference_mode()
def _step(
    pie: LayerPie,
    used_blocks: int,
    written: Sequence[int],
    compute: Callable[[torch.Tensor, torch.Tensor], None],
    device: torch.device,
) -> float:
    """Seconds, by the device's clock where it has one."""
    store = pie.store
    store.step_begins((), (written,))
    clock = _clock(device)
    for layer in range(store.controller.table.layers):
        keys, values = store.enter(layer)
        compute(keys[:used_blocks], values[:used_blocks])
        store.leave(layer)
    store.step_ends(0, is_decoding=True)
    return clock()


def _clock(device: torch.device) -> Callable[[], float]:
    """Started; called once, it says how long ago."""
    if device.type != "cuda":
        began_s = time.perf_counter()
        return lambda: time.perf_counter() - began_s
    make_event: Any = torch.cuda.Event
    began, ended = make_event(enable_timing=True), make_event(enable_timing=True)
    began.record()

    def stop() -> float:
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    return stop
