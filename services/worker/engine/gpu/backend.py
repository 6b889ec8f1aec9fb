"""Attention backend of `PagedAttention` on a CUDA device, with Triton kernels.

A step is either built from its spans (`begin`), or uses static arrays for CUDA graphs (`fixed`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from services.worker.engine.backends import Pools, Tables
from services.worker.engine.gpu.attention import attend_paged, compile_ahead, write_kv
from services.worker.engine.gpu.spans import DeviceSpans, Heads, pack
from services.worker.engine.paged import Shape, to_device
from services.worker.engine.spans import PackedSpans, Span


class Step(Protocol):
    """Rows of a step in the form that the kernels need."""

    slots: torch.Tensor
    """int64 `[rows]` on the device: slots for K and V; below 0: not written."""

    def spans(self, heads: Heads) -> DeviceSpans: ...


class Gate(Protocol):
    """Hooks around each layer's attention, to wait for its KV."""

    def enter(self, layer: int) -> None:
        """Called before the layer attends."""

    def leave(self, layer: int) -> None:
        """Called after the layer has attended."""


class TritonBackend:
    """Attention on one CUDA device, as `TorchBackend` computes it."""

    def __init__(self, pools: Sequence[Pools], block_tokens: int, device: torch.device) -> None:
        self.pools, self.block_tokens, self.device = pools, block_tokens, device
        self.multiprocessors = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        )
        self.packed: PackedSpans | None = None
        """Spans that `begin` was called with."""
        self.gate: Gate | None = None
        """Gate of the step inside `fixed`, or None."""
        self._tables: Tables | None = None
        self._step: Step | None = None
        self._compiled: set[tuple[object, ...]] = set()
        """Kinds of layers whose kernels are compiled."""

    def begin(
        self, spans: Sequence[Span], decodes: int, packed: PackedSpans, tables: Tables | None = None
    ) -> None:
        """Begin a step; copies nothing to the device yet. `tables` must end with `TABLE_END`."""
        self.packed, self._tables, self._step = packed, tables, None

    @contextmanager
    def fixed(self, step: Step, gate: Gate | None = None) -> Iterator[None]:
        """Use `step` for the calls inside, instead of the spans of `begin`."""
        before, self._step, self.gate = self._step, step, gate
        try:
            yield
        finally:
            self._step, self.gate = before, None

    @property
    def step(self) -> Step:
        """The current step. Raises RuntimeError before the first `begin`."""
        if self._step is None:
            if self.packed is None:
                raise RuntimeError("attention before `begin`")
            tables = None if self._tables is None else self._tables()
            self._step = _PackedStep(self.packed, self, tables)
        return self._step

    def upload(self, packed: PackedSpans, heads: Heads) -> DeviceSpans:
        """Return spans and their tiles on the device."""
        return pack(packed, heads, device=self.device, multiprocessors=self.multiprocessors)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write `keys`, `values` `[rows, kv_heads, …]` to `slots`, int64 `[rows]` on the device."""
        keys, values = _heads_contiguous(keys), _heads_contiguous(values)
        write_kv(*self.pools[layer], keys, values, slots)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        shape: Shape,
        window_tokens: int | None,
    ) -> torch.Tensor:
        k_pool, v_pool = self.pools[layer]
        kv_heads = k_pool.shape[1]
        spans = self.step.spans(Heads(queries.shape[1] // kv_heads, kv_heads))
        queries = _heads_contiguous(queries)
        kind = (queries.shape[1:], queries.dtype, k_pool.shape[1:], shape.softcap, window_tokens)
        if kind not in self._compiled:
            self._compiled.add(kind)
            compile_ahead(k_pool, v_pool, queries[:1], shape.scaling, shape.softcap, window_tokens)
        output, _ = attend_paged(k_pool, v_pool, spans, queries, shape.scaling, shape.softcap, window_tokens)
        return output

    def attend_part(
        self, layer: int, packed: PackedSpans, queries: torch.Tensor, shape: Shape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_pool, v_pool = self.pools[layer]
        kv_heads = k_pool.shape[1]
        heads = Heads(queries.shape[1] // kv_heads, kv_heads)
        spans = self.step.spans(heads) if packed is self.packed else self.upload(packed, heads)
        queries = _heads_contiguous(queries.to(k_pool.dtype))  # the dtype that the kernels are compiled for
        window = packed.window_tokens or None
        output, lse = attend_paged(k_pool, v_pool, spans, queries, shape.scaling, shape.softcap, window)
        return output.float(), lse


class _PackedStep:
    """A step of any shape; its arrays are built once per kind of layer."""

    def __init__(self, packed: PackedSpans, backend: TritonBackend, tables: torch.Tensor | None) -> None:
        self._packed, self._backend, self._tables = packed, backend, tables
        self._spans: dict[Heads, DeviceSpans] = {}
        self.slots = to_device(torch.from_numpy(packed.slots), backend.device)

    def spans(self, heads: Heads) -> DeviceSpans:
        found = self._spans.get(heads)
        if found is None:
            found = self._backend.upload(self._packed, heads)
            if self._tables is not None:
                found = replace(found, blocks=self._tables)
            self._spans[heads] = found
        return found


def _heads_contiguous(rows: torch.Tensor) -> torch.Tensor:
    """Return `[rows, heads, dim]` with contiguous heads; transformers passes transposed views."""
    return rows if rows.stride()[1:] == (rows.shape[2], 1) else rows.contiguous()
