"""CUDA graphs for decode steps: replays the graph that was captured for the batch size, without the host.

Batches are padded to captured sizes; a padded row is at position 0, sees no key and writes nothing. Steps
that fetch blocks from the host have graphs of their own, which contain the copies (`streaming.py`). All
other steps (chunks, larger batches, longer tables) run the forward pass directly."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine import paged
from services.worker.engine.gpu.backend import TritonBackend
from services.worker.engine.gpu.spans import (
    DECODE_ROWS,
    TABLE_END,
    DeviceSpans,
    Heads,
    Tiles,
    choose_splits,
    tile_shape,
)
from services.worker.engine.gpu.streaming import GpuStream
from services.worker.engine.sampler import Logits
from services.worker.engine.spans import PackedSpans, pack

_log = logging.getLogger("kvasir.worker.graphs")
_WARM_UPS = 2
"""Calls before a capture, to compile kernels and allocate workspaces."""

Results = tuple[torch.Tensor, torch.Tensor]
"""Logits `[kept, vocabulary]` and the head's input `[kept, hidden size]`."""
Compute = Callable[[], Results]
GraphReplay = Callable[[], Results]
Computation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Results]
"""A forward pass that can be captured; arguments as in `forward.Forward`."""
Capture = Callable[[Compute], GraphReplay]
"""Turns a computation on static tensors into a function that replays it, with static results."""


class CudaCapture:
    """Captures CUDA graphs that share one memory pool; only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        stream: Any = torch.cuda.Stream
        self._stream: torch.cuda.Stream = stream()

    def __call__(self, compute: Compute) -> GraphReplay:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = compute()

        def replay() -> Results:
            graph.replay()
            return output

        return replay


def batch_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, 8, steps of 8 up to 64, then doubling up to `max_batch`."""
    sizes = [1, 2, 4, *range(8, 65, 8)]
    while sizes[-1] < max_batch:
        sizes.append(2 * sizes[-1])
    return [*(size for size in sizes if size < max_batch), max_batch]


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Capacity of the static arrays."""

    max_batch: int
    max_blocks: int
    """Number of blocks per sequence, on average over the largest batch."""


class DecodeArrays:
    """Static device arrays for decodes of up to `max_batch` sequences; smaller batches use slices."""

    def __init__(self, limits: GraphLimits, device: torch.device) -> None:
        batch = limits.max_batch
        self.limits = limits
        self.rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self.zeros = torch.zeros(batch, dtype=torch.int32, device=device)
        tables = batch * limits.max_blocks + len(TABLE_END)
        self.pointed = torch.zeros(tables, dtype=torch.int32, device=device)
        """Block ids of a step in which they change per layer."""
        self._flat = torch.zeros(3 * batch + (3 * batch + tables + 1) // 2, dtype=torch.int64, device=device)
        """Everything that changes per step, filled by one copy."""

    def rows_of(self, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, positions and slots, int64 `[batch]` each."""
        flat = self._flat
        return flat[:batch], flat[batch : 2 * batch], flat[2 * batch : 3 * batch]

    def changing(self, batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return first positions, key ends and table starts `[batch]`, and block ids; int32."""
        flat = self._flat[3 * batch :].view(torch.int32)
        return flat[:batch], flat[batch : 2 * batch], flat[2 * batch : 3 * batch], flat[3 * batch :]

    def fits(self, packed: PackedSpans) -> bool:
        """Return whether all spans are decodes and fit into the arrays."""
        count = len(packed.first_position)
        room = packed.blocks.size <= self.limits.max_batch * self.limits.max_blocks
        return 0 < count <= self.limits.max_batch and packed.slots.size == count and room

    def fill(
        self, packed: PackedSpans, batch: int, tokens: npt.ArrayLike = 0, positions: npt.ArrayLike = 0
    ) -> None:
        """Fill the arrays of size `batch` with a step; `tokens` and `positions`: one per span."""
        count = len(packed.first_position)
        wide = np.zeros(3 * batch, np.int64)
        wide[:count], wide[batch : batch + count] = tokens, positions
        wide[2 * batch : 2 * batch + count], wide[2 * batch + count :] = packed.slots, -1
        none = np.zeros(batch - count, np.int32)
        parts = [packed.first_position, none, packed.key_end, none, packed.table_start[:count], none]
        narrow = np.concatenate([*parts, packed.blocks, TABLE_END]).astype(np.int32)
        narrow = np.append(narrow, narrow[: len(narrow) % 2])
        flat = torch.from_numpy(np.concatenate([wide, narrow.view(np.int64)]))
        paged.fill(self._flat, flat)


class DecodeStep:
    """The static arrays as a `Step` of one batch size; `is_streaming`: its tables change per layer."""

    def __init__(
        self, arrays: DecodeArrays, batch: int, backend: TritonBackend, *, is_streaming: bool
    ) -> None:
        self.tokens, self.positions, self.slots = arrays.rows_of(batch)
        self._arrays, self._batch, self._is_streaming = arrays, batch, is_streaming
        self._longest_tokens = arrays.limits.max_blocks * backend.block_tokens
        self._multiprocessors = backend.multiprocessors

    def spans(self, heads: Heads) -> DeviceSpans:
        arrays, batch = self._arrays, self._batch
        first_position, key_end, table_start, blocks = arrays.changing(batch)
        rows, _ = tile_shape(DECODE_ROWS, heads.group)
        splits = choose_splits(batch, heads.kv_heads, self._longest_tokens, self._multiprocessors)
        each = arrays.rows[:batch]
        return DeviceSpans(
            first_row=arrays.rows[: batch + 1],
            first_position=first_position,
            table_start=table_start,
            table_position=arrays.zeros[:batch],
            key_end=key_end,
            blocks=arrays.pointed if self._is_streaming else blocks,
            tiles=(Tiles(each, each, tokens=1, rows=rows, splits=splits),),
        )


class DecodeGraphs:
    """`Forward` that replays decodes as graphs and computes all other steps directly."""

    def __init__(
        self,
        forward: Computation,
        backend: TritonBackend,
        limits: GraphLimits,
        capture: Capture,
        stream: GpuStream | None = None,
    ) -> None:
        """`capture_all` captures the graphs. `stream` fetches blocks from the host."""
        self._forward, self._backend = forward, backend
        self._capture, self._stream = capture, stream
        self._sizes = batch_sizes(limits.max_batch)
        self._arrays = DecodeArrays(limits, backend.device)
        self._kept = torch.arange(limits.max_batch, device=backend.device)
        self._replays: dict[int, GraphReplay] = {}
        self._streamed: dict[int, GraphReplay] = {}
        """Graphs of steps that fetch blocks."""

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture all batch sizes, largest first, so that the smaller graphs fit into its memory."""
        for batch in reversed(self._sizes):
            self._arrays.fill(pack((), self._backend.block_tokens), batch)
            self._replays[batch] = self._captured(batch)
            if self._stream is not None:
                self._streamed[batch] = self._captured(batch, self._stream)
        _log.info("captured decodes of %s sequences as CUDA graphs", ", ".join(map(str, self._sizes)))

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        """See `forward.Forward`. The logits are valid until the next call."""
        packed = self._backend.packed
        if packed is None or not self._replays or not self._arrays.fits(packed):
            logits, hidden = self._forward(tokens, positions, kept)
            return Logits(logits, hidden=hidden)
        rows = len(packed.first_position)
        batch = next(size for size in self._sizes if size >= rows)
        if tokens.device.type == "cpu":
            self._arrays.fill(packed, batch, tokens.numpy(), positions.numpy())
        else:  # Some of them are the last step's, and known there only.
            self._arrays.fill(packed, batch, 0, positions.numpy())
            self._arrays.rows_of(batch)[0][:rows].copy_(tokens)
        logits, hidden = self._replay(batch)
        chosen = slice(rows) if kept.shape[0] == rows else paged.to_device(kept, logits.device)
        return Logits(logits[chosen], hidden=hidden[chosen])

    def _replay(self, batch: int) -> Results:
        found = None if self._stream is None else self._stream.replay(self._streamed[batch])
        return found or self._replays[batch]()

    def _captured(self, batch: int, stream: GpuStream | None = None) -> GraphReplay:
        """Capture a batch size, with the copies of `stream` if it is given."""
        arrays, backend = self._arrays, self._backend
        step = DecodeStep(arrays, batch, backend, is_streaming=stream is not None)
        gate = None if stream is None else stream.fetches.gate(arrays.changing(batch)[3], arrays.pointed)

        def compute() -> Results:
            with backend.fixed(step, gate), gate or nullcontext():
                return self._forward(step.tokens, step.positions, self._kept[:batch])

        return self._capture(compute)
