"""Packs the weights of a transformers Llama into panels for `llama.h`.

`release` frees the module's own copies, so that it can no longer compute."""

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.worker.engine.llama_parts import JoinedLayer
from services.worker.engine.native.library import ADDRESS, INT32, INT64, declare

_PROTOTYPES = {
    "gemm_packed_floats": (INT64, (INT32, INT32)),
    "gemm_packed_pair_floats": (INT64, (INT32, INT32)),
    "gemm_pack": (None, (ADDRESS, INT64, INT32, INT32, ADDRESS)),
    "gemm_pack_pair": (None, (ADDRESS, ADDRESS, INT64, INT32, INT32, ADDRESS)),
}
_ROTARY_CHUNK = 4096


_PAGE_BYTES = 2 << 20
_FLOAT_BYTES = 4


class Arena:
    """Memory for weights or KV, in huge pages if possible: consecutive fp32 tensors, which keep it alive.

    The mapping is private: Linux backs shared memory with huge pages only if configured to. With small pages
    a killed worker's sockets stay open while its pages are freed."""

    def __init__(self, floats: int) -> None:
        size = max(floats * _FLOAT_BYTES, 1) + _PAGE_BYTES
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.float32)
        start = -whole.data_ptr() % _PAGE_BYTES // _FLOAT_BYTES
        self._free = whole[start : start + floats]

    def take(self, floats: int) -> torch.Tensor:
        """Return the next tensor `[floats]`, zeroed. Raises ValueError if the arena is full."""
        if floats > len(self._free):
            raise ValueError(f"{floats} floats wanted of {len(self._free)}")
        taken, self._free = self._free[:floats], self._free[floats:]
        return taken


class Gemm:
    """The packing functions of `gemm.h`. Only C++ calls the product itself."""

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library, _PROTOTYPES)
        self._library = library

    def packed_floats(self, outputs: int, inputs: int) -> int:
        """Return the number of floats of a packed matrix `[outputs, inputs]`."""
        return int(self._library.gemm_packed_floats(outputs, inputs))

    def packed_pair_floats(self, outputs: int, inputs: int) -> int:
        """Return the number of floats of two matrices of this shape, packed as a pair."""
        return int(self._library.gemm_packed_pair_floats(outputs, inputs))

    def pack(self, weights: Sequence[torch.Tensor], arena: Arena) -> torch.Tensor:
        """Pack matrices `[outputs, inputs]` fp32 as one, with concatenated outputs."""
        joined = torch.cat(list(weights)) if len(weights) > 1 else weights[0].contiguous()
        outputs, inputs = joined.shape
        packed = arena.take(self.packed_floats(outputs, inputs))
        self._library.gemm_pack(joined.data_ptr(), inputs, outputs, inputs, packed.data_ptr())
        return packed

    def pack_pair(self, gate: torch.Tensor, up: torch.Tensor, arena: Arena) -> torch.Tensor:
        """Pack two matrices of equal shape for the SiLU product."""
        gate, up = gate.contiguous(), up.contiguous()
        outputs, inputs = gate.shape
        packed = arena.take(self.packed_pair_floats(outputs, inputs))
        pair = gate.data_ptr(), up.data_ptr()
        self._library.gemm_pack_pair(*pair, inputs, outputs, inputs, packed.data_ptr())
        return packed


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All weights of a model, for `llama.h`."""

    layers: tuple[JoinedLayer, ...]
    """Packed except for the norms."""
    embedding: torch.Tensor | None
    """`[vocabulary, hidden]`; None: tied to the head."""
    final_norm: torch.Tensor
    head: torch.Tensor
    cosine: torch.Tensor
    """`[positions, head_dim / 2]`, like `sine`."""
    sine: torch.Tensor


def pack(library: ctypes.CDLL, module: Any, positions: int, *, release: bool) -> ModelWeights:
    """Return the packed weights of a plain LlamaForCausalLM, and its rotations up to `positions`."""
    body, head = module.model, module.lm_head.weight
    tied = body.embed_tokens.weight.data_ptr() == head.data_ptr()
    gemm = Gemm(library)
    arena = Arena(_floats(gemm, module))
    layers = tuple(_layer(gemm, arena, layer, release) for layer in body.layers)
    embedding = None if tied else body.embed_tokens.weight.detach().contiguous()
    packed = gemm.pack([head], arena)
    if release:
        _release([module.lm_head, body.embed_tokens] if tied else [module.lm_head])
    return ModelWeights(layers, embedding, body.norm.weight.detach(), packed, *rotation(module, positions))


def rotation(module: Any, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the module's rotary embedding, `[positions, head_dim / 2]` each."""
    like = torch.empty(1, dtype=torch.float32)
    parts = []
    for first in range(0, positions, _ROTARY_CHUNK):
        chunk = torch.arange(first, min(first + _ROTARY_CHUNK, positions))[None]
        cosine, sine = module.model.rotary_emb(like, chunk)
        half = cosine.shape[-1] // 2
        parts.append((cosine[0, :, :half], sine[0, :, :half]))
    return torch.cat([part[0] for part in parts]).contiguous(), torch.cat([part[1] for part in parts])


def _floats(gemm: Gemm, module: Any) -> int:
    attention, mlp = module.model.layers[0].self_attn, module.model.layers[0].mlp
    joined = sum(len(linear.weight) for linear in (attention.q_proj, attention.k_proj, attention.v_proj))
    layer = gemm.packed_floats(joined, attention.q_proj.weight.shape[1])
    layer += gemm.packed_floats(*attention.o_proj.weight.shape)
    layer += gemm.packed_pair_floats(*mlp.gate_proj.weight.shape)
    layer += gemm.packed_floats(*mlp.down_proj.weight.shape)
    return layer * len(module.model.layers) + gemm.packed_floats(*module.lm_head.weight.shape)


def _layer(gemm: Gemm, arena: Arena, layer: Any, release: bool) -> JoinedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    weights = JoinedLayer(
        input_norm=layer.input_layernorm.weight.detach(),
        query_key_value=gemm.pack([linear.weight for linear in projections], arena),
        output=gemm.pack([attention.o_proj.weight], arena),
        post_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=gemm.pack_pair(mlp.gate_proj.weight, mlp.up_proj.weight, arena),
        down=gemm.pack([mlp.down_proj.weight], arena),
    )
    if release:
        _release([*projections, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj])
    return weights


def _release(linears: Sequence[Any]) -> None:
    for linear in linears:
        linear.weight.data = torch.empty(0)
