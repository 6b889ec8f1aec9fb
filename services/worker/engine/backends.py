"""Attention backends of `PagedAttention` on a CPU: the C++ operator, and its reference in plain torch."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from services.worker.engine import paged
from services.worker.engine.layout import Layout, build
from services.worker.engine.native import library as native
from services.worker.engine.spans import PackedSpans, Span, pack

Pools = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer; see `engine.paged`."""
Tables = Callable[[], torch.Tensor | None]
"""Returns a step's block tables, int32 on the device, if they change from layer to layer; else None."""


class PartialBackend(Protocol):
    """Attention over a part of the keys, whose results can be merged."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write `keys`, `values` `[rows, kv_heads, …]` to `slots`, int64 `[rows]`; skip slots of -1."""

    def attend_part(
        self, layer: int, packed: PackedSpans, queries: torch.Tensor, shape: paged.Shape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs `[rows, q_heads, value_dim]` and log-sum-exps `[rows, q_heads]`, both fp32.

        `queries` `[rows, q_heads, head_dim]`. Zeros and −inf for a row that sees no key."""


class NativeBackend:
    """Attention by the C++ operator, over pools in host memory."""

    packed: PackedSpans
    """The current step, for `attend`."""

    def __init__(
        self, library: ctypes.CDLL, pools: Sequence[Pools], threads: int, *, in_arena: bool = False
    ) -> None:
        """`in_arena`: the pools have one size and are contiguous in memory; each may read the others."""
        self._library, self._threads = library, threads
        reach, last = len(pools[0][0]) if in_arena else 0, len(pools) - 1
        self.pools = [
            native.describe_pool(*each, before=layer * reach, behind=(last - layer) * reach)
            for layer, each in enumerate(pools)
        ]
        self._digests: Sequence[native.KvDigests | None] | ctypes.Array[native.KvDigests]
        self._digests = [None] * len(pools)
        """Digests that verify each layer's blocks on read and write; None: not verified."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        native.write(self._library, self.pools[layer], keys, values, slots, self._digests[layer])

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        shape: paged.Shape,
        window_tokens: int | None,
    ) -> torch.Tensor:
        spans = native.describe_spans(self.packed, window_tokens)
        return native.attend(self._library, self.pools[layer], spans, queries, shape, self._threads)

    def attend_part(
        self, layer: int, packed: PackedSpans, queries: torch.Tensor, shape: paged.Shape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spans, lse = native.describe_spans(packed), torch.empty(queries.shape[:2])
        how = shape, self._threads, lse, self._digests[layer]
        output = native.attend(self._library, self.pools[layer], spans, queries, *how)
        return output.float(), lse


class TorchBackend:
    """Reference backend: gathers the blocks and attends over the copies in torch."""

    def __init__(
        self, pools: Sequence[Pools], block_tokens: int, dtype: torch.dtype, *, arena: Pools | None = None
    ) -> None:
        """`arena`: all pools, of one size and contiguous in memory; each may read the others."""
        self._pools, self._arena = pools, arena
        self._block_tokens, self._dtype = block_tokens, dtype
        self._device = pools[0][0].device
        self._scratch = paged.GatherScratch(self._device)
        self._spans: Sequence[Span] = ()
        self._decodes = 0
        self._packed = pack((), 1)
        self._tables = torch.empty(0, dtype=torch.int32, device=self._device)
        self._layouts: dict[int | None, Layout] = {}

    def begin(
        self, spans: Sequence[Span], decodes: int, packed: PackedSpans, tables: Tables | None = None
    ) -> None:
        """Begin a step; see `PagedAttention.begin`."""
        self._spans, self._decodes, self._packed = spans, decodes, packed
        changing = None if tables is None else tables()
        self._tables = torch.from_numpy(packed.blocks).to(self._device) if changing is None else changing
        self._layouts.clear()

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        kept = slots >= 0
        if not bool(kept.all()):
            keys, values, slots = keys[kept], values[kept], slots[kept]
        paged.write(*self._pools[layer], keys, values, slots)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        shape: paged.Shape,
        window_tokens: int | None,
    ) -> torch.Tensor:
        """Attend over all keys that each row sees; return `[rows, q_heads, value_dim]`.

        `queries` `[rows, q_heads, head_dim]`; `keys`, `values` `[rows, kv_heads, …]`: the step's, already
        written."""
        k_pool, v_pool = self._readable(layer)
        groups, spans = self._layout(window_tokens)
        output = queries.new_empty(queries.shape[0], queries.shape[1], values.shape[2])
        for group in groups:
            rows = slice(group.start, group.end)
            tables = self._located(layer, self._tables[group.tables])
            output[rows], _ = paged.attend_blocks(
                queries[rows], k_pool, v_pool, tables, group.mask, shape, self._scratch
            )
        for span in spans:
            rows = slice(span.start, span.end)
            parts = []
            if span.mask is None:
                parts.append(paged.attend_chunk(queries[rows], keys[rows], values[rows], shape))
            if span.context_tokens:
                table = self._located(layer, self._tables[span.table])
                context = k_pool, v_pool, table, span.context_tokens, shape, self._scratch
                parts.append(paged.attend_context(queries[rows], *context, mask=span.mask))
            if len(parts) > 1:
                outputs, lses = zip(*parts, strict=True)
                parts = [paged.merge(torch.stack(outputs), torch.stack(lses))]
            output[rows] = parts[0][0]
        return output

    def attend_part(
        self, layer: int, packed: PackedSpans, queries: torch.Tensor, shape: paged.Shape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_pool, v_pool = self._readable(layer)
        output = torch.zeros(queries.shape[0], queries.shape[1], v_pool.shape[3], device=queries.device)
        lse = torch.full(queries.shape[:2], float("-inf"), device=queries.device)
        for span in range(len(packed.first_position)):
            rows = slice(int(packed.first_row[span]), int(packed.first_row[span + 1]))
            start, at = int(packed.table_position[span]), int(packed.table_start[span])
            first, tokens = int(packed.first_position[span]) - start, int(packed.key_end[span]) - start
            if tokens <= 0 or rows.start == rows.stop:
                continue
            table = torch.from_numpy(packed.blocks[at : at - (-tokens // self._block_tokens)])
            output[rows], lse[rows] = paged.attend_part(
                queries[rows],
                k_pool,
                v_pool,
                self._located(layer, table.long().to(k_pool.device)),
                tokens,
                first,
                shape,
                packed.window_tokens,
            )
        return output, lse

    def _readable(self, layer: int) -> Pools:
        """Return the pools that a layer reads: its own, or the arena."""
        return self._pools[layer] if self._arena is None else self._arena

    def _located(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return the indices of a layer's blocks in the pools that it reads."""
        return blocks if self._arena is None else blocks + layer * len(self._pools[0][0])

    def _layout(self, window_tokens: int | None) -> Layout:
        if window_tokens not in self._layouts:
            # Uses indices into the step's tables instead of block ids, because the ids may change.
            pairs = zip(self._spans, self._packed.table_start.tolist(), strict=False)
            self._layouts[window_tokens] = build(
                [
                    Span(span.first_position, span.count, range(start, start + len(span.blocks)))
                    for span, start in pairs
                ],
                self._decodes,
                block_tokens=self._block_tokens,
                window_tokens=window_tokens,
                dtype=self._dtype,
                device=self._device,
            )
        return self._layouts[window_tokens]
