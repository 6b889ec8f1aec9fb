"""A plain Llama on a CUDA device: nine kernel launches per layer, all of which a CUDA graph can contain.

Weights are joined (`forward.py`), one kernel rotates and writes to the pools, and `addmm` adds the
residuals."""

from collections.abc import Sequence
from typing import Any

import torch

from services.worker.engine.attention import PagedAttention
from services.worker.engine.forward import JoinedLayer, LlamaPass, is_plain
from services.worker.engine.gpu.attention import attend_paged, compile_ahead, gated, rotate_and_write
from services.worker.engine.gpu.backend import TritonBackend
from services.worker.engine.gpu.graphs import CudaCapture, DecodeGraphs, GraphLimits
from services.worker.engine.gpu.spans import Heads
from services.worker.engine.gpu.streaming import GpuStream
from services.worker.engine.native.families import is_rotation_fixed

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


class CudaLlama(LlamaPass):
    """Computes the logits of the backend's current step; arguments and result as of `compute`."""

    def __init__(
        self,
        module: Any,
        backend: TritonBackend,
        max_positions: int,
        gate: PagedAttention | None = None,
        layers: Sequence[JoinedLayer] | None = None,
    ) -> None:
        super().__init__(module, layers)
        self._backend, self._gate = backend, gate
        self._of_kv = Heads(self._q_heads // self._kv_heads, self._kv_heads)
        self._angles = _angles(self._rotary, max_positions, self._embedding.device)

    __call__ = LlamaPass.compute

    @torch.inference_mode()
    def compile_ahead(self) -> None:
        """Compile the kernels for chunks, which no captured decode uses."""
        k_pool, v_pool = self._backend.pools[0]
        query = self._embedding.new_zeros(1, self._q_heads, self._head_dim)
        compile_ahead(k_pool, v_pool, query, self._scaling)

    def _attend(self, index: int, heads: torch.Tensor, turns: Any) -> torch.Tensor:
        step, (k_pool, v_pool) = self._backend.step, self._backend.pools[index]
        gate = self._backend.gate or self._gate
        if gate is not None:
            gate.enter(index)
        rotate_and_write(heads, self._angles, turns, step.slots, k_pool, v_pool)
        queries = heads[:, : self._q_heads]
        output, _ = attend_paged(k_pool, v_pool, step.spans(self._of_kv), queries, self._scaling)
        if gate is not None:
            gate.leave(index)
        return output.flatten(1)

    def _gated(self, joined: torch.Tensor) -> torch.Tensor:
        return gated(joined)


def _angles(rotary: Any, max_positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, fp32 `[positions, head_dim / 2]`; both halves of a head share them."""
    positions = torch.arange(max_positions, device=device)
    with torch.inference_mode():
        cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=device), positions[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
