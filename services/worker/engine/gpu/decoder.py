"""Steps of the known families (`native/families.py`) on a CUDA device, which CUDA graphs can contain: nine
kernel launches for a layer of Llama's.

Weights are joined, one kernel rotates and writes to the pools, and `addmm` adds the residuals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from services.worker.engine.attention import PagedAttention
from services.worker.engine.contract import most_sequences
from services.worker.engine.gpu.attention import attend_paged, compile_ahead, rotate_and_write
from services.worker.engine.gpu.backend import TritonBackend
from services.worker.engine.gpu.graphs import CudaCapture, DecodeGraphs, GraphLimits
from services.worker.engine.gpu.mlp import compile_experts, gated, mixed, normed
from services.worker.engine.gpu.spans import Heads
from services.worker.engine.gpu.streaming import GpuStream
from services.worker.engine.native.families import (
    Family,
    activation,
    family_of,
    norm_weight,
    obstacle,
    rotations_of,
)
from services.worker.engine.paged import to_device


def is_computable(module: Any) -> bool:
    """Return whether `CudaDecoder` supports a causal language model. It rotates whole heads only."""
    rope = getattr(module.config, "rope_parameters", None) or {}
    return not obstacle(module) and rope.get("partial_rotary_factor") in (None, 1.0)


def with_graphs(
    module: Any,
    backend: TritonBackend,
    max_positions: int,
    *,
    max_batch: int = 0,
    gate: PagedAttention | None = None,
    windows: Sequence[int] = (),
) -> DecodeGraphs:
    """Return a `forward.Forward` for a CUDA device, with its decodes captured as graphs.

    `max_batch`: largest batch of a graph; 0: as many sequences as the pools are meant for.
    `gate` waits for each layer's KV. `windows`: `LayerShape.window_tokens` of each layer, if any has one."""
    max_batch = max_batch or most_sequences(len(backend.pools[0][0]) * backend.block_tokens)
    limits = GraphLimits(max_batch, -(-max_positions // backend.block_tokens))
    decoder = CudaDecoder(module, backend, max_positions, gate, windows)
    decoder.compile_ahead()
    stream = None if gate is None or gate.resident is None else gate.resident.stream
    fetches = stream if isinstance(stream, GpuStream) else None
    graphs = DecodeGraphs(decoder, backend, limits, CudaCapture(), fetches)
    graphs.capture_all()
    return graphs


@dataclass(frozen=True, slots=True)
class JoinedLayer:
    """Weights of one decoder layer; matrices `[out, in]`, those of experts `[experts, out, in]`."""

    norms: dict[str, torch.Tensor]
    """By their names in `Family.norms`."""
    query_key_value: torch.Tensor
    bias: torch.Tensor | None
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    router: torch.Tensor | None
    """`[experts, hidden size]`."""


def join_layer(layer: Any, family: Family) -> JoinedLayer:
    """Return the weights of a layer: Q, K and V as one matrix, gate and up as another.

    The layer's own weights become views of them."""
    heads = [layer.get_submodule(name) for name in family.heads]
    experts = getattr(layer.mlp, "experts", None)
    if experts is None:
        gate_up = _joined([layer.get_submodule(name) for name in family.gates])
        down = layer.get_submodule(family.down).weight
    else:
        gate_up, down = experts.gate_up_proj, experts.down_proj
    return JoinedLayer(
        norms={
            name: norm_weight(layer.get_submodule(part), family.norm_offset)
            for name, part in family.norms.items()
        },
        query_key_value=_joined(heads),
        bias=None if heads[0].bias is None else torch.cat([head.bias for head in heads]),
        output=layer.get_submodule(family.output).weight,
        gate_up=gate_up,
        down=down,
        router=None if experts is None else layer.mlp.gate.weight,
    )


def _joined(linears: Sequence[Any]) -> torch.Tensor:
    joined: torch.Tensor = linears[0].weight.data
    if len(linears) == 1:
        return joined
    joined = torch.cat([linear.weight.data for linear in linears])
    for linear, rows in zip(
        linears, torch.split(joined, [len(each.weight) for each in linears]), strict=True
    ):
        linear.weight.data = rows
    return joined


class CudaDecoder:
    """Computes the logits of the backend's current step."""

    def __init__(
        self,
        module: Any,
        backend: TritonBackend,
        max_positions: int,
        gate: PagedAttention | None = None,
        windows: Sequence[int] = (),
    ) -> None:
        config, body, attention = module.config, module.model, module.model.layers[0].self_attn
        family = family_of(module)
        self._backend, self._gate = backend, gate
        self._head_dim: int = attention.head_dim
        self._q_heads: int = config.num_attention_heads
        self._heads = Heads(self._q_heads // config.num_key_value_heads, config.num_key_value_heads)
        self._scaling: float = attention.scaling
        self._softcap: float | None = getattr(config, "attn_logit_softcapping", None)
        self._logits_softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._eps: float = config.rms_norm_eps
        self._activation = activation(config)
        self._choices: int = getattr(config, "num_experts_per_tok", None) or 0
        self._sums_to_one: bool = getattr(config, "norm_topk_prob", True)
        self._embedding, self._head = body.embed_tokens.weight, module.lm_head.weight
        scale = config.hidden_size**0.5 if family.scales_embedding else 1.0
        self._scale = float(torch.tensor(scale, dtype=self._embedding.dtype))
        self._norm = norm_weight(body.norm, family.norm_offset)
        self._layers = [join_layer(layer, family) for layer in body.layers]
        self._windows = list(windows) or [0] * len(self._layers)
        self._angles = rotations_of(module, max_positions)

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `[kept, vocabulary]` and the head's input `[kept, hidden size]` of the rows `kept`.

        `tokens`, `positions` int64 `[rows]`, `kept` int64."""
        device = self._embedding.device
        tokens, positions, kept = (to_device(each, device) for each in (tokens, positions, kept))
        hidden = functional.embedding(tokens, self._embedding)
        if self._scale != 1.0:
            hidden = hidden * self._scale
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, hidden, positions)
            hidden = self._added(hidden, attended, layer.output, layer.norms.get("attended_norm"))
            entering = self._normed(hidden, layer.norms["post_norm"])
            if layer.router is not None:
                hidden = hidden + self._mixed(entering, layer.router, layer)
                continue
            found = gated(functional.linear(entering, layer.gate_up), self._activation)
            hidden = self._added(hidden, found, layer.down, layer.norms.get("mlp_norm"))
        found = self._normed(hidden[kept], self._norm)
        logits = functional.linear(found, self._head)
        if self._logits_softcap:
            logits = torch.tanh(logits / self._logits_softcap) * self._logits_softcap
        return logits, found

    @torch.inference_mode()
    def compile_ahead(self) -> None:
        """Compile the kernels for chunks, which no captured decode uses."""
        query = self._embedding.new_zeros(1, self._q_heads, self._head_dim)
        for window in set(self._windows):
            compile_ahead(*self._backend.pools[0], query, self._scaling, self._softcap, window or None)
        for layer in self._layers:
            if layer.router is not None:
                row = self._embedding[:1]
                compile_experts(row, self._choices, layer.gate_up, layer.down, self._activation)
                break

    def _attend(
        self, index: int, layer: JoinedLayer, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        entering = self._normed(hidden, layer.norms["input_norm"])
        projected = functional.linear(entering, layer.query_key_value, layer.bias)
        joined = projected.view(hidden.shape[0], -1, self._head_dim)
        step, (k_pool, v_pool) = self._backend.step, self._backend.pools[index]
        gate = self._backend.gate or self._gate
        if gate is not None:
            gate.enter(index)
        norms = None
        if "query_norm" in layer.norms:
            norms = layer.norms["query_norm"], layer.norms["key_norm"], self._eps
        rotate_and_write(joined, self._angles[index], positions, step.slots, k_pool, v_pool, norms)
        queries, spans = joined[:, : self._q_heads], step.spans(self._heads)
        window = self._windows[index] or None
        output, _ = attend_paged(k_pool, v_pool, spans, queries, self._scaling, self._softcap, window)
        if gate is not None:
            gate.leave(index)
        return output.flatten(1)

    def _added(
        self, hidden: torch.Tensor, entering: torch.Tensor, weight: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `hidden` plus the product, which Gemma norms first."""
        if norm is None:
            return torch.addmm(hidden, entering, weight.t())
        return normed(functional.linear(entering, weight), norm, self._eps, hidden)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype == hidden.dtype:
            return functional.rms_norm(hidden, weight.shape, weight, self._eps)
        return normed(hidden, weight, self._eps)

    def _mixed(self, entering: torch.Tensor, router: torch.Tensor, layer: JoinedLayer) -> torch.Tensor:
        shares = functional.linear(entering, router).float().softmax(-1)
        shares, chosen = torch.topk(shares, self._choices, dim=-1)
        if self._sums_to_one:
            shares = shares / shares.sum(-1, keepdim=True)
        return mixed(entering, shares, chosen, layer.gate_up, layer.down, self._activation)
