"""Paged attention for transformers models, registered through their attention interface.

It gets every layer's query, key and value, writes K and V to the paged pools and attends over the blocks of
the current step, in C++, Triton or plain torch."""

import ctypes
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface

from services.worker.core.decodes import DecodeBatch
from services.worker.engine import paged
from services.worker.engine.backends import NativeBackend, PartialBackend, Pools, TorchBackend
from services.worker.engine.contract import RemoteMeter, rows_of
from services.worker.engine.native import library as native
from services.worker.engine.native.weights import Arena
from services.worker.engine.partition import Homes, split_by_window
from services.worker.engine.remote import RemoteAttention, decode_blocks, merge_into
from services.worker.engine.spans import PackedSpans, Span, pack_step
from services.worker.kv.tiers.resident import ResidentKv
from shared.clock import Clock, monotonic_s
from shared.errors import ConfigError

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
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
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

    Call `begin` before each forward with the spans of the packed input. `mode`: see `native.library.choose`.
    With `resident` some blocks are in host memory, and `enter` waits for each layer's copies."""

    packed: PackedSpans
    """The engine's own part of the current step, without a window."""

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
        clock: Clock = monotonic_s,
    ) -> None:
        self.name = f"kvasir_{next(_numbers)}"
        self._block_tokens, self._device, self._dtype = block_tokens, device, dtype
        self.threads = threads
        self.meter = RemoteMeter()
        self._remote: tuple[Homes, RemoteAttention] | None = None
        self._clock = clock
        self._waited_s, self._remote_blocks = 0.0, 0
        """Seconds that the current step spent on creditors, and its `remote.decode_blocks`."""
        self._slots: torch.Tensor | None = None
        self._own: dict[int, PackedSpans] = {}
        """The engine's own part of a partitioned step, by window."""
        self.is_partitioned = False
        """Whether rows of the current step see keys that other workers hold."""
        self.is_reading = False
        """Whether the running step reads KV from other workers or the host. Any thread may read this."""
        self.windows = [shape.window_tokens for shape in layers]
        """`window_tokens` of each layer."""
        self.resident = resident
        if resident is not None:
            self.pools = resident.pools()
        else:
            self.pools = [make_pools(shape, kv_blocks, block_tokens, dtype, device) for shape in layers]
        self.library = native.choose(mode, device=device, dtype=dtype)
        """The native library if it computes the attention; else None."""
        self.triton = _make_triton(self.pools, block_tokens, device) if mode != "torch" else None
        self.native: NativeBackend | None = None
        self._stepped: TorchBackend | TritonBackend | None = None
        """The backend if it is not the native one."""
        if self.library is not None:
            self.native = NativeBackend(self.library, self.pools, threads, in_arena=resident is not None)
        else:
            self._stepped = self.triton or self._in_torch(self.pools)
        self.begin((), 0)
        self._partial: PartialBackend = self.triton or self.partial_backend(self.pools)
        AttentionInterface.register(self.name, self)

    @property
    def slots(self) -> torch.Tensor:
        """int64 `[rows]` on the device: slots that the step's K and V are written to."""
        if self._slots is None:
            self._slots = paged.to_device(torch.from_numpy(self.packed.slots), self._device)
        return self._slots

    def partial_backend(self, pools: Sequence[Pools]) -> PartialBackend:
        """Return a backend for attention over parts of the keys, for use by one thread.

        `pools`: the engine's own, or others of the same shape in host memory."""
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
        return TorchBackend(pools, self._block_tokens, self._dtype, arena=arena)

    def extend(self, homes: Homes, remote: RemoteAttention) -> None:
        """Allow blocks at other workers from now on."""
        self._remote = homes, remote

    def begin(self, spans: Sequence[Span], decodes: int, batch: DecodeBatch | None = None) -> None:
        """Prepare a step of packed spans, which come after a `batch`. In torch, the first `decodes`, with the
        batch, have one token each and are sorted.

        Raises ValueError for a block without a holder or a table short of its span."""
        resident, self.is_partitioned = self.resident, False
        locate = None if resident is None else resident.locate
        packed = pack_step(batch, spans, self._block_tokens, locate)
        if self._remote is not None and packed.blocks.size:
            homes, remote = self._remote
            if int(packed.blocks.max()) >= homes.own_blocks:
                packed = self._begin_partitioned(packed, homes, remote)
        if resident is not None:
            resident.point(packed.blocks)
        self.is_reading = self.is_partitioned or (resident is not None and resident.is_streaming)
        self.packed, self._slots = packed, None
        if self.native is not None:
            self.native.packed = packed
        elif self._stepped is not None:
            if batch is not None and self.triton is None:
                spans = [*(Span(row.first_position, 1, row.blocks) for row in rows_of(batch)), *spans]
            self._stepped.begin(spans, decodes, packed, None if resident is None else resident.tables)

    def _begin_partitioned(self, packed: PackedSpans, homes: Homes, remote: RemoteAttention) -> PackedSpans:
        """Return the engine's own part of the step, and begin the creditors' parts if there are any."""
        windows = sorted(set(self.windows))
        kinds = split_by_window(packed, homes, self._block_tokens, windows)
        others = [part for _, *parts in kinds for part in parts]
        if not others:
            return packed
        self.is_partitioned = True
        self._own = {window: kind[0].spans for window, kind in zip(windows, kinds, strict=True)}
        began_s, self._remote_blocks = self._clock(), decode_blocks(others)
        remote.begin(others)
        self._waited_s = self._clock() - began_s
        return kinds[0][0].spans

    def own_part(self, layer: int) -> PackedSpans:
        """Return the engine's own part of a layer's attention in a partitioned step."""
        return self._own[self.windows[layer]]

    def end(self) -> None:
        """End the step after its last layer. Raises CreditorLost."""
        if self.is_partitioned and self._remote is not None:
            began_s = self._clock()
            self._remote[1].end()
            self.meter.on_step(self._waited_s + self._clock() - began_s, self._remote_blocks)
        if self.resident is not None:
            self.resident.end(is_complete=True)
        self.is_reading = False

    def abandon(self) -> None:
        """End a failed step. Creditors remain usable for the next one."""
        self.is_reading = False
        if self.is_partitioned and self._remote is not None:
            self._remote[1].abandon()
        if self.resident is not None:
            self.resident.end(is_complete=False)

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

        `query` `[1, q_heads, rows, head_dim]`, `key` and `value` `[1, kv_heads, rows, …]`."""
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
        partitioned step."""
        if self.is_partitioned:
            self._partial.write(layer, keys, values, self.slots)
            self.send(layer, queries, keys, values, shape)
            self.enter(layer)
            output, lse = self._partial.attend_part(layer, self.own_part(layer), queries, shape)
            self.leave(layer)
            self.join(layer, output, lse)
            return output.to(queries.dtype)
        backend = self.native or self._stepped
        assert backend is not None
        self.enter(layer)
        backend.write(layer, keys, values, self.slots)
        attended = backend.attend(layer, queries, keys, values, shape, window_tokens)
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

        All tensors `[rows, heads, dim]`, with all rows of the step. Raises CreditorLost."""
        if self._remote is not None:
            given, began_s = _in_ram(queries, keys, values), self._clock()
            self._remote[1].send(layer, *given, shape)
            self._waited_s += self._clock() - began_s

    def join(self, layer: int, output: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge the creditors' results into the engine's own part of the layer, in place.

        `output` `[rows, q_heads, value_dim]` and `lse` `[rows, q_heads]`, fp32. Raises CreditorLost."""
        if self._remote is None:
            return
        parts = self._remote[1].collect(layer)
        while True:
            began_s = self._clock()
            found = next(parts, None)
            self._waited_s += self._clock() - began_s
            if found is None:
                return
            rows, part, part_lse = (each.to(output.device) for each in found)
            merge_into(output, lse, part, part_lse, rows, self.library)


def _in_ram(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `[rows, heads, dim]` tensors in host memory; from a GPU as fp32, in one copy."""
    given = queries, keys, values
    if queries.device.type == "cpu":
        return given
    joined = torch.cat([each.flatten(1) for each in given], 1).float().cpu()
    parts = torch.split(joined, [each[0].numel() for each in given], 1)
    queries, keys, values = (part.view(each.shape) for part, each in zip(parts, given, strict=True))
    return queries, keys, values


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
    key_size = (kv_blocks, shape.kv_heads, paged.stored_dim(shape.head_dim, dtype), block_tokens)
    value_size = (kv_blocks, shape.kv_heads, block_tokens, paged.stored_dim(shape.value_dim, dtype))
    if device.type != "cpu":
        key, value = (torch.zeros(size, dtype=dtype, device=device) for size in (key_size, value_size))
        return key, value
    sizes = [math.prod(size) * dtype.itemsize for size in (key_size, value_size)]
    # Blocks are scattered: with small pages nearly every access costs a page-table walk.
    arena = Arena(sum(-(-size // _ALIGNED_BYTES) for size in sizes) * _ALIGNED_BYTES // 4)
    key, value = (arena.take(-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES // 4).view(dtype) for size in sizes)
    return key[: math.prod(key_size)].view(key_size), value[: math.prod(value_size)].view(value_size)
