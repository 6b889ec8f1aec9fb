"""Paged attention for transformers models, registered through their attention interface.

transformers passes every layer's query, key and value to the registered function, and builds no mask for an
implementation without a mask function. This one writes K and V to the paged pools and attends over the blocks
of the current step, in C++, Triton or plain torch.
"""

import ctypes
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

from services.worker.engine import paged
from services.worker.engine.backends import (
    Backend,
    NativeBackend,
    PartialBackend,
    Pools,
    TorchBackend,
    no_tables,
)
from services.worker.engine.native import library as native
from services.worker.engine.native.arena import Arena
from services.worker.engine.partition import Homes, split_by_window
from services.worker.engine.remote import MeteredRemote, RemoteAttention, merge_into
from services.worker.engine.spans import PackedSpans, Span, pack
from services.worker.kv.tiers.resident import ResidentKv
from shared.errors import ConfigError, InternalError

if TYPE_CHECKING:
    from services.worker.engine.gpu.backend import TritonBackend

_log = logging.getLogger("kvasir.worker.attention")
_numbers = count()
_ALIGNED_BYTES = 64
_UNSUPPORTED = ("s_aux", "head_mask", "position_bias")
"""Arguments that change the scores in ways that `engine.paged` does not support."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of a layer's K and V per token."""

    kv_heads: int
    head_dim: int
    value_dim: int
    window_tokens: int = 0
    """Sliding window: a token sees itself and the `window_tokens - 1` before it; 0: no window."""


class LayerProbe:
    """Stand-in for attention that records the `LayerShape` of each layer while one token runs through."""

    def __init__(self) -> None:
        self.name = f"kvasir_probe_{next(_numbers)}"
        self.layers: dict[int, LayerShape] = {}
        AttentionInterface.register(self.name, self)

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        found = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
        found += ["more than causal masking"] if not getattr(module, "is_causal", True) else []
        if found or attention_mask is not None or module.layer_idx in self.layers:
            what = ", ".join(found) or "a mask of its own, or KV shared between layers"
            raise ConfigError(f"this model's attention uses {what}, which this engine does not compute")
        window_tokens = kwargs.get("sliding_window") or 0
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3], window_tokens)
        self.layers[module.layer_idx] = shape
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


class PagedAttention:
    """The KV pools of all layers, and attention over them for one step at a time.

    Call `begin` before each forward with the spans of the packed input; the first `decodes` have one token
    each and are sorted by position. `mode`: see `native.library.choose`. With `resident` some blocks are in
    host memory, and `enter` waits for each layer's copies.
    """

    library: ctypes.CDLL | None
    """The native library if it computes the attention; else None."""
    native_spans: native.Spans
    """The step's own spans without a window, valid until the next `begin`; set only with `library`."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        kv_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        mode: native.AttentionMode = "auto",
        threads: int = 1,
        resident: ResidentKv | None = None,
    ) -> None:
        self.name = f"kvasir_{next(_numbers)}"
        self._block_tokens = block_tokens
        self._device = device
        self._dtype = dtype
        self.threads = threads
        self._remote: tuple[Homes, MeteredRemote] | None = None
        self._is_reading = False
        self._slots: torch.Tensor | None = None
        self._own: dict[int, PackedSpans] = {}
        """The engine's own part of a partitioned step, by window."""
        self.windows = [shape.window_tokens for shape in layers]
        """`window_tokens` of each layer."""
        self.resident = resident
        if resident is not None:
            self.pools = resident.pools()
        else:
            self.pools = [make_pools(shape, kv_blocks, block_tokens, dtype, device) for shape in layers]
        self.library = native.choose(mode, device=device, dtype=dtype)
        self._native: NativeBackend | None = None
        if self.library is not None:
            in_arena = resident is not None
            self._native = NativeBackend(self.library, self.pools, threads, in_arena=in_arena)
        self.triton = _make_triton(self.pools, block_tokens, device) if mode != "torch" else None
        self._backend: Backend = self._native or self.triton or self._in_torch(self.pools)
        self.begin((), 0)
        self._partial: PartialBackend = self.triton or self.partial_backend(self.pools)
        AttentionInterface.register(self.name, self)

    @property
    def slots(self) -> torch.Tensor:
        """int64 `[rows]` on the device: slots that the step's K and V are written to."""
        if self._slots is None:
            self._slots = paged.to_device(torch.from_numpy(self._packed.slots), self._device)
        return self._slots

    @property
    def is_reading(self) -> bool:
        """Whether the running step reads KV from other workers or the host. Any thread may call this."""
        return self._is_reading

    @property
    def is_partitioned(self) -> bool:
        """Whether rows of the current step see keys that other workers hold."""
        return bool(self._own)

    def partial_backend(self, pools: Sequence[Pools]) -> PartialBackend:
        """Return a backend for attention over parts of the keys, for use by one thread.

        `pools`: the engine's own, or others of the same shape in host memory.
        """
        device = pools[0][0].device
        library = self.library_for(device)
        if library is not None:
            in_arena = self.resident is not None and pools is self.pools
            return NativeBackend(library, pools, self.threads, in_arena=in_arena)
        triton = None if self.triton is None else _make_triton(pools, self._block_tokens, device)
        return triton or self._in_torch(pools)

    def library_for(self, device: torch.device) -> ctypes.CDLL | None:
        """Return the native library for pools on `device`; None if torch or Triton computes there."""
        if device.type == self._device.type:
            return self.library
        return native.choose("auto", device=device, dtype=self._dtype)

    def _in_torch(self, pools: Sequence[Pools]) -> TorchBackend:
        arena = self.resident.arena if self.resident is not None and pools is self.pools else None
        return TorchBackend(pools, self._block_tokens, self._dtype, pools[0][0].device, arena=arena)

    def extend(self, homes: Homes, remote: RemoteAttention) -> None:
        """Allow blocks at other workers from now on."""
        self._remote = homes, MeteredRemote(remote)

    @property
    def remote_block_s(self) -> float:
        """See `MeteredRemote.block_s`."""
        return 0.0 if self._remote is None else self._remote[1].block_s

    @property
    def remote_total_s(self) -> float:
        """Total seconds that steps have waited for creditors since the start."""
        return 0.0 if self._remote is None else self._remote[1].total_s

    def begin(self, spans: Sequence[Span], decodes: int) -> None:
        """Prepare a step. Raises ValueError for a block without a holder or a table short of its span."""
        self._own = {}
        resident = self.resident
        packed = pack(spans, self._block_tokens, None if resident is None else resident.locate)
        if self._remote is not None and not self._remote[0].are_own(packed.blocks):
            packed = self._begin_partitioned(packed, *self._remote)
        if resident is not None:
            resident.point(packed.blocks)
        self._is_reading = self.is_partitioned or (resident is not None and resident.is_streaming)
        self._packed, self._slots = packed, None
        self._backend.begin(spans, decodes, packed, no_tables if resident is None else resident.tables)
        if self._native is not None:
            self.native_spans = self._native.spans(None)

    def _begin_partitioned(self, packed: PackedSpans, homes: Homes, remote: RemoteAttention) -> PackedSpans:
        """Return the engine's own part of the step, and begin the creditors' parts if there are any."""
        windows = sorted(set(self.windows))
        kinds = split_by_window(packed, homes, self._block_tokens, windows)
        others = [part for _, *parts in kinds for part in parts]
        if not others:
            return packed
        self._own = {window: kind[0].spans for window, kind in zip(windows, kinds, strict=True)}
        remote.begin(others)
        return kinds[0][0].spans

    def end(self) -> None:
        """End the step after its last layer. Raises CreditorLost."""
        if self._own and self._remote is not None:
            self._remote[1].end()
        if self.resident is not None:
            self.resident.end(is_complete=True)
        self._is_reading = False

    def abandon(self) -> None:
        """End a failed step. Creditors remain usable for the next one."""
        self._is_reading = False
        if self._own and self._remote is not None:
            self._remote[1].abandon()
        if self.resident is not None:
            self.resident.end(is_complete=False)

    @property
    def stream(self) -> tuple[int | None, float]:
        """Address of the step's stream (`stream.h`; None: no host blocks) and seconds a layer may wait."""
        return (None, 0.0) if self.resident is None else self.resident.stream_of_step

    def native_pool(self, layer: int) -> native.KvPool:
        """Return a layer's pools, valid while this object lives. Raises InternalError without a library."""
        if self._native is None:
            raise InternalError("pools are described for the native library, and there is none")
        return self._native.pool(layer)

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend as transformers calls it; return `[1, rows, q_heads, value_dim]`.

        `query` `[1, q_heads, rows, head_dim]`, `key` and `value` `[1, kv_heads, rows, …]`.
        """
        shape = paged.Shape(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap)
        queries, keys, values = (packed[0].transpose(0, 1) for packed in (query, key, value))
        output = self.attend(module.layer_idx, queries, keys, values, shape, sliding_window)
        return output.unsqueeze(0), None

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        shape: paged.Shape,
        window_tokens: int | None = None,
    ) -> torch.Tensor:
        """Write `keys`, `values` `[rows, kv_heads, …]` to their slots, then attend.

        `queries` `[rows, q_heads, head_dim]` → `[rows, q_heads, value_dim]`. Raises CreditorLost in a
        partitioned step.
        """
        if self._own:
            own = self._own[self.windows[layer]]
            return self._attend_partitioned(layer, own, self._partial, queries, keys, values, shape)
        self.enter(layer)
        self._backend.write(layer, keys, values, self.slots)
        attended = self._backend.attend(layer, queries, keys, values, shape, window_tokens)
        self.leave(layer)
        return attended

    def enter(self, layer: int) -> None:
        """Wait until the layer's KV is on the device."""
        if self.resident is not None:
            self.resident.enter(layer)

    def leave(self, layer: int) -> None:
        """Release the layer's KV for this step."""
        if self.resident is not None:
            self.resident.leave(layer)

    def send(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: paged.Shape
    ) -> None:
        """Let the creditors start on their parts of a layer, in a partitioned step.

        All tensors `[rows, heads, dim]`, with all rows of the step. Raises CreditorLost.
        """
        if self._remote is not None:
            self._remote[1].send(layer, *_in_ram(queries, keys, values), shape)

    def join(self, layer: int, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the creditors' results into the engine's own part of the layer, in place.

        `output` `[rows, q_heads, value_dim]` and `lse` `[rows, q_heads]`, fp32. Raises CreditorLost.
        """
        if self._remote is not None:
            for found in self._remote[1].collect(layer):
                rows, part, part_lse = (each.to(output.device) for each in found)
                merge_into(output, lse, part, part_lse, rows, self.library)

    def _attend_partitioned(
        self,
        layer: int,
        own: PackedSpans,
        backend: PartialBackend,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        shape: paged.Shape,
    ) -> torch.Tensor:
        backend.write(layer, keys, values, self.slots)
        self.send(layer, queries, keys, values, shape)
        self.enter(layer)
        output, lse = backend.attend_part(layer, own, queries, shape)
        self.leave(layer)
        self.join(layer, output, lse)
        return output.to(queries.dtype)


def _in_ram(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `[rows, heads, dim]` tensors in host memory; from a GPU as fp32, in one copy."""
    if queries.device.type == "cpu":
        return queries, keys, values
    rows, q_size, k_size = len(queries), queries[0].numel(), keys[0].numel()
    came = torch.cat([queries.flatten(1), keys.flatten(1), values.flatten(1)], 1).float().cpu()
    return (
        came[:, :q_size].view(rows, *queries.shape[1:]),
        came[:, q_size : q_size + k_size].view(rows, *keys.shape[1:]),
        came[:, q_size + k_size :].view(rows, *values.shape[1:]),
    )


def _make_triton(pools: Sequence[Pools], block_tokens: int, device: torch.device) -> "TritonBackend | None":
    """Return the Triton backend for a CUDA device; None on others, and with a warning without Triton."""
    if device.type != "cuda":
        return None
    try:
        from services.worker.engine.gpu.backend import TritonBackend  # CUDA builds of torch bring Triton
    except ImportError as error:
        _log.warning("no Triton (%s): attention runs in plain torch, which is much slower", error)
        return None
    return TritonBackend(pools, block_tokens, device)


def make_pools(
    shape: LayerShape, kv_blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
) -> Pools:
    """Return zeroed K and V pools of one layer; see `engine.paged` for their shapes."""
    key_size = (kv_blocks, shape.kv_heads, shape.head_dim, block_tokens)
    value_size = (kv_blocks, shape.kv_heads, block_tokens, shape.value_dim)
    if device.type != "cpu":
        return (
            torch.zeros(key_size, dtype=dtype, device=device),
            torch.zeros(value_size, dtype=dtype, device=device),
        )
    sizes = [math.prod(size) * dtype.itemsize for size in (key_size, value_size)]
    # Blocks are scattered: with small pages nearly every access costs a page-table walk.
    arena = Arena(sum(-(-size // _ALIGNED_BYTES) for size in sizes) * _ALIGNED_BYTES // 4)
    key, value = (arena.take(-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES // 4).view(dtype) for size in sizes)
    return key[: math.prod(key_size)].view(key_size), value[: math.prod(value_size)].view(value_size)
