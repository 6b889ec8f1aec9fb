"""Our attention inside transformers' models, through their attention interface.

transformers builds no mask for an implementation it has no mask function for, and hands every layer's query,
key and value to the registered function. This one writes K and V into the paged pools and attends over the
blocks of the current step. Knows layers and packed rows; no sequence, no sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from transformers import AttentionInterface

from services.worker.engine import paged
from services.worker.engine.layout import Layout, PrefillSpan, Span, build, slots
from shared.errors import ConfigError

_numbers = count()
_UNSUPPORTED = ("s_aux", "head_mask", "position_bias")
"""Arguments that change the scores in ways `services.worker.engine.paged` does not know."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps for each token."""

    kv_heads: int
    head_dim: int
    value_dim: int


class LayerProbe:
    """Stands in for attention while one token runs through a model, and notes what each layer would keep."""

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
        self.layers[module.layer_idx] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


class PagedAttention:
    """The KV pools of all layers, and attention over them for one step at a time.

    `begin` is called before each forward with the spans of the packed input; the first `decodes` have one
    token each and are sorted by position.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        kv_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = f"kvasir_{next(_numbers)}"
        self._block_tokens = block_tokens
        self._dtype = dtype
        self._device = device
        size = (kv_blocks, block_tokens)
        self._k = [torch.zeros(*size, s.kv_heads, s.head_dim, dtype=dtype, device=device) for s in layers]
        self._v = [torch.zeros(*size, s.kv_heads, s.value_dim, dtype=dtype, device=device) for s in layers]
        self._scratch = paged.Scratch(device)
        self._spans: Sequence[Span] = ()
        self._decodes = 0
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._layouts: dict[int | None, Layout] = {}
        AttentionInterface.register(self.name, self)

    def begin(self, spans: Sequence[Span], decodes: int) -> None:
        self._spans = spans
        self._decodes = decodes
        self._slots = torch.tensor(slots(spans, self._block_tokens), device=self._device)
        self._layouts.clear()

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
        """`query` `[1, q_heads, rows, head_dim]`, `key` and `value` `[1, kv_heads, rows, …]`.

        Returns `[1, rows, q_heads, value_dim]`.
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
        """Write `keys`, `values` `[rows, kv_heads, …]` to their slots, then attend over what each row sees.

        `queries` `[rows, q_heads, head_dim]` → `[rows, q_heads, value_dim]`.
        """
        k_pool, v_pool = self._k[layer], self._v[layer]
        k_pool.flatten(0, 1).index_copy_(0, self._slots, keys)
        v_pool.flatten(0, 1).index_copy_(0, self._slots, values)
        layout = self._layout(window_tokens)
        output = queries.new_empty(queries.shape[0], queries.shape[1], values.shape[2])
        for group in layout.groups:
            rows = slice(group.start, group.end)
            output[rows], _ = paged.attend_blocks(
                queries[rows], k_pool, v_pool, group.tables, group.mask, shape, self._scratch
            )
        for span in layout.spans:
            rows = slice(span.start, span.end)
            parts = []
            if span.mask is None:
                parts.append(paged.attend_chunk(queries[rows], keys[rows], values[rows], shape))
            if span.context_tokens:
                parts.append(self._attend_context(queries[rows], k_pool, v_pool, span, shape))
            output[rows] = parts[0][0] if len(parts) == 1 else _merged(parts)
        return output

    def _attend_context(
        self,
        queries: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        span: PrefillSpan,
        shape: paged.Shape,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table, context_tokens = span.table, span.context_tokens
        return paged.attend_context(
            queries, k_pool, v_pool, table, context_tokens, shape, self._scratch, mask=span.mask
        )

    def _layout(self, window_tokens: int | None) -> Layout:
        layout = self._layouts.get(window_tokens)
        if layout is None:
            layout = self._layouts[window_tokens] = build(
                self._spans,
                self._decodes,
                block_tokens=self._block_tokens,
                window_tokens=window_tokens,
                dtype=self._dtype,
                device=self._device,
            )
        return layout


def _merged(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    output, _ = paged.merge(
        torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    )
    return output
