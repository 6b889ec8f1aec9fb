"""`python -m bench pie-gpu`: Pie's real copies during a computation of Llama-2-13B's shapes.

Decode steps of a batch, layer by layer through the worker's block store. Each layer is its matrix products
(all layers share weights larger than any cache) and a pass over the KV that it reads.
"""

import statistics
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.micro.gpu.bench import cuda_device
from bench.micro.gpu.steps import BLOCK_TOKENS, DTYPE, MODELS, Shape
from services.worker.core.settings import PieSettings
from services.worker.engine.attention import LayerShape, make_pools
from services.worker.engine.stream import stream_opener
from services.worker.kv.core.fetch_buffers import Blocks
from services.worker.pie.blocks import BlockPie, assemble
from services.worker.pie.core.meter import Direction
from services.worker.pie.core.sizes import slot_blocks

_QUEUES = (3, 4, 6, 10, 17, 25)
_HOST_MB = 1 << 17


@dataclass(frozen=True, slots=True)
class Overlap:
    """Duration of a step in seconds, and of its copies."""

    step_s: float
    stall_share: float
    """Stall time over compute time."""
    bytes_per_s: float
    """Rate of copies to the device; 0 without copies."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=32, help="sequences [%(default)s]")
    parser.add_argument("--gb", type=float, default=3.0, help="of KV on the device [%(default)s]")
    parser.add_argument("--queues", nargs="+", type=int, default=list(_QUEUES), help="levels")
    parser.add_argument("--steps", type=int, default=48)


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError if there is no CUDA device."""
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
        figures[f"wait_share_q{fifo_layers}"] = found.stall_share
        figures[f"gb_s_q{fifo_layers}"] = found.bytes_per_s / 1e9
        rows.append((fifo_layers, found.step_s * 1e3, plain.step_s * 1e3, found.bytes_per_s / 1e9))
    name = torch.cuda.get_device_properties(device).name
    table = Table("a step with blocks outside", ("level", "ms", "ms without", "GB/s"), rows)
    return Outcome(figures, 0, [table], [f"device: {name}; KV {flags.gb:g} GB, batch {flags.batch}"])


def layer_of(
    shape: Shape, batch: int, device: torch.device, dtype: torch.dtype = DTYPE
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return one layer's computation for `batch` tokens: its products, and a pass over K and V."""
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
    """Return the median of `steps` steps after a warm-up. Each reads `used_blocks` blocks and writes one
    block for each of `batch` sequences."""
    settings = PieSettings(enabled=True, expansion="fixed", fifo_layers=fifo_layers)
    layer = LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim)
    pie = assemble(
        settings,
        [layer] * shape.layers,
        lambda blocks: make_pools(layer, blocks, BLOCK_TOKENS, dtype, device),
        stream_opener(None, device),
        device_blocks=device_blocks,
        host_bytes=_HOST_MB << 20,
    )
    used = np.array(pie.make_pool(BLOCK_TOKENS).allocate(used_blocks), dtype=np.int32)
    written = used[:: max(1, used_blocks // batch)]
    try:
        for _ in range(max(2, steps // 4)):
            _step(pie, used, written, compute, device)
        before = pie.kv.figures()
        computed_s, moved = pie.meter.compute_s, pie.meter.moved_bytes[Direction.IN]
        times = [_step(pie, used, written, compute, device) for _ in range(steps)]
        after = pie.kv.figures()
        computed_s = pie.meter.compute_s - computed_s
        moved = pie.meter.moved_bytes[Direction.IN] - moved
    finally:
        pie.close()
    stalled_s, fetch_s = after.stall_s - before.stall_s, after.fetch_s - before.fetch_s
    share = stalled_s / computed_s if computed_s else 0.0
    return Overlap(statistics.median(times), share, moved / fetch_s if fetch_s else 0.0)


@torch.inference_mode()
def _step(
    pie: BlockPie,
    used: Blocks,
    written: Blocks,
    compute: Callable[[torch.Tensor, torch.Tensor], None],
    device: torch.device,
) -> float:
    """Return the seconds of one step, by the device's clock if it has one. Each layer reads as many blocks
    as its tables have; their position does not affect the time."""
    kv = pie.kv
    pie.step_begins()
    clock = _clock(device)
    kv.point(kv.locate(used, written).copy())
    keys, values = kv.arena
    for layer in range(kv.layers):
        kv.enter(layer)
        first = min(layer * kv.residency.device_blocks, len(keys) - len(used))
        compute(keys[first : first + len(used)], values[first : first + len(used)])
        kv.leave(layer)
    kv.end(is_complete=True)
    took_s = clock()
    pie.step_ends(0, is_decoding=True)
    return took_s


def _clock(device: torch.device) -> Callable[[], float]:
    """Start a clock; calling the result once returns the elapsed seconds."""
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
