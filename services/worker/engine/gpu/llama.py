"""A plain Llama on a CUDA device: nine kernel launches per layer, all of which a CUDA graph can contain.

Weights are joined (`llama_parts.py`), one kernel rotates and writes to the pools, and `addmm` adds the
residuals."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from services.worker.engine.attention import PagedAttention
from services.worker.engine.gpu.attention import attend_paged, compile_ahead, gated, rotate_and_write
from services.worker.engine.gpu.backend import TritonBackend
from services.worker.engine.gpu.graphs import CudaCapture, DecodeGraphs, GraphLimits
from services.worker.engine.gpu.spans import Heads
from services.worker.engine.gpu.streaming import GpuStream
from services.worker.engine.llama_parts import JoinedLayer, is_plain, join_layer
from services.worker.engine.native.families import is_rotation_fixed
from services.worker.engine.paged import to_device

MAX_BATCH = 128
"""Default largest batch of a graph."""


def is_computable(module: Any) -> bool:
    """Return whether `CudaLlama` supports a `LlamaForCausalLM`."""
    is_partial = (getattr(module.config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    return is_plain(module) and is_rotation_fixed(module.config) and not is_partial


def with_graphs(
    module: Any,
    backend: TritonBackend,
    max_positions: int,
    *,
    max_batch: int = MAX_BATCH,
    gate: PagedAttention | None = None,
    layers: Sequence[JoinedLayer] | None = None,
) -> DecodeGraphs:
    """Return a `forward.Forward` for a CUDA device, with its decodes captured as graphs.

    `gate` waits for each layer's KV. `layers`: the joined weights, if they exist already."""
    limits = GraphLimits(max_batch, -(-max_positions // backend.block_tokens))
    llama = CudaLlama(module, backend, max_positions, gate, layers)
    llama.compile_ahead()
    stream = None if gate is None or gate.resident is None else gate.resident.stream
    fetches = stream if isinstance(stream, GpuStream) else None
    graphs = DecodeGraphs(llama, backend, limits, CudaCapture(), fetches)
    graphs.capture_all()
    return graphs


class CudaLlama:
    """Computes the logits of the backend's current step."""

    def __init__(
        self,
        module: Any,
        backend: TritonBackend,
        max_positions: int,
        gate: PagedAttention | None = None,
        layers: Sequence[JoinedLayer] | None = None,
    ) -> None:
        config, body, attention = module.config, module.model, module.model.layers[0].self_attn
        self._backend, self._gate = backend, gate
        self._head_dim: int = attention.head_dim
        self._q_heads: int = config.num_attention_heads
        self._heads = Heads(self._q_heads // config.num_key_value_heads, config.num_key_value_heads)
        self._scaling: float = attention.scaling
        self._eps: float = config.rms_norm_eps
        self._embedding = body.embed_tokens.weight
        self._norm, self._head = body.norm.weight, module.lm_head.weight
        self._layers = layers or [join_layer(layer) for layer in body.layers]
        self._angles = _angles(body.rotary_emb, max_positions, self._embedding.device)

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `[kept, vocabulary]` and the head's input `[kept, hidden size]` of the rows `kept`.

        `tokens`, `positions` int64 `[rows]`, `kept` int64."""
        device = self._embedding.device
        tokens, positions, kept = (to_device(each, device) for each in (tokens, positions, kept))
        hidden = functional.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, hidden, positions)
            hidden = torch.addmm(hidden, attended, layer.output.t())
            gate_up = functional.linear(self._normed(hidden, layer.post_norm), layer.gate_up)
            hidden = torch.addmm(hidden, gated(gate_up), layer.down.t())
        found = self._normed(hidden[kept], self._norm)
        return functional.linear(found, self._head), found

    @torch.inference_mode()
    def compile_ahead(self) -> None:
        """Compile the kernels for chunks, which no captured decode uses."""
        k_pool, v_pool = self._backend.pools[0]
        query = self._embedding.new_zeros(1, self._q_heads, self._head_dim)
        compile_ahead(k_pool, v_pool, query, self._scaling)

    def _attend(
        self, index: int, layer: JoinedLayer, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        projected = functional.linear(self._normed(hidden, layer.input_norm), layer.query_key_value)
        joined = projected.view(hidden.shape[0], -1, self._head_dim)
        step, (k_pool, v_pool) = self._backend.step, self._backend.pools[index]
        gate = self._backend.gate or self._gate
        if gate is not None:
            gate.enter(index)
        rotate_and_write(joined, self._angles, positions, step.slots, k_pool, v_pool)
        queries = joined[:, : self._q_heads]
        output, _ = attend_paged(k_pool, v_pool, step.spans(self._heads), queries, self._scaling)
        if gate is not None:
            gate.leave(index)
        return output.flatten(1)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self._eps)


def _angles(rotary: Any, max_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, fp32 `[positions, head_dim / 2]`; both halves of a head share them."""
    positions = torch.arange(max_positions, device=device)
    with torch.inference_mode():
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=device), positions[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
