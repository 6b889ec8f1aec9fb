"""Parts of a decoder layer, by architecture: the table for the steps in C++ and on CUDA devices."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")
_EXPERTS = ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_ROTARY_CHUNK = 4096
_MOST_EXPERTS = 512
"""`LLAMA_MOST_EXPERTS` of `llama.h`."""
GATES = {"silu": 2, "gelu_pytorch_tanh": 3}
"""`GemmEpilogue` of `gemm.h`, by the name of the activation."""


@dataclass(frozen=True, slots=True)
class Family:
    """Names of a layer's parts in transformers' modules; of norms None where there is none."""

    heads: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """One after the other the rows of queries, keys and values."""
    gates: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    output: str = "self_attn.o_proj"
    down: str = "mlp.down_proj"
    norms: dict[str, str] = field(
        default_factory=lambda: {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    )
    """By their names in `llama.h`."""
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    scales_embedding: bool = False


_PLAIN = Family()
_HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "input_norm": "input_layernorm",
    "attended_norm": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "mlp_norm": "post_feedforward_layernorm",
}
FAMILIES = {
    "LlamaForCausalLM": _PLAIN,
    "MistralForCausalLM": _PLAIN,
    "Qwen2ForCausalLM": _PLAIN,
    "Qwen3ForCausalLM": Family(norms=_PLAIN.norms | _HEAD_NORMS),
    "Gemma2ForCausalLM": Family(norms=_GEMMA_NORMS, norm_offset=1.0, scales_embedding=True),
    "Gemma3ForCausalLM": Family(norms=_GEMMA_NORMS | _HEAD_NORMS, norm_offset=1.0, scales_embedding=True),
    "MixtralForCausalLM": _PLAIN,
    "Qwen3MoeForCausalLM": Family(norms=_PLAIN.norms | _HEAD_NORMS),
    "Phi3ForCausalLM": Family(heads=("self_attn.qkv_proj",), gates=("mlp.gate_up_proj",)),
}
"""By the class of transformers."""


def family_of(module: Any) -> Family:
    """Return the family of a module that `obstacle` finds none for."""
    return FAMILIES[type(module).__name__]


def obstacle(module: Any) -> str:
    """Return why our own steps do not compute a causal language model; empty if they do."""
    name = type(module).__name__
    if name not in FAMILIES:
        return f"it computes {', '.join(FAMILIES)}, and this is {name}"
    config = module.config
    if activation(config) not in GATES:
        return f"the activation is {activation(config)}"
    if not is_rotation_fixed(config):
        return "rotations depend on the length"
    if module.model.layers[0].self_attn.head_dim % 2:
        return "heads have an odd size"
    if experts_of(config) > _MOST_EXPERTS:
        return f"there are more than {_MOST_EXPERTS} experts"
    known = {*_known(FAMILIES[name]), *_EXPERTS}
    parts = (part for layer in module.model.layers for part, _ in layer.named_parameters())
    unknown = sorted({part for part in parts if part not in known})
    return f"a layer has {', '.join(unknown)}" if unknown else ""


def experts_of(config: Any) -> int:
    """Return the number of experts of a layer; 0: none."""
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0


def activation(config: Any) -> str:
    """Return the name of the MLP's activation."""
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", ""))


def is_rotation_fixed(config: Any) -> bool:
    """Return whether rotations depend on the position alone, not on the longest sequence."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    return all(each.get("rope_type", "default") in _FIXED_ROTATIONS for each in kinds)


def norm_weight(norm: Any, offset: float) -> torch.Tensor:
    """Return the weights of a norm as its family multiplies by them."""
    weight: torch.Tensor = norm.weight.detach()
    return (weight.float() + offset).contiguous() if offset else weight


def rotations_of(module: Any, positions: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return cosines and sines `[positions, rotated / 2]` of each layer, fp32."""
    kinds = getattr(module.config, "layer_types", None) or []
    count = module.config.num_hidden_layers
    if not isinstance(next(iter((module.config.rope_parameters or {}).values()), None), dict):
        return [rotation(module, positions)] * count
    made = {kind: rotation(module, positions, kind) for kind in set(kinds)}
    return [made[kind] for kind in kinds]


def rotation(module: Any, positions: int, kind: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of the module's rotary embedding, `[positions, rotated / 2]` each.

    `kind`: type of the layer, where each has its own."""
    device = module.lm_head.weight.device
    like = torch.empty(1, dtype=torch.float32, device=device)
    parts = []
    for first in range(0, positions, _ROTARY_CHUNK):
        chunk = torch.arange(first, min(first + _ROTARY_CHUNK, positions), device=device)[None]
        cosine, sine = module.model.rotary_emb(like, chunk, *([] if kind is None else [kind]))
        half = cosine.shape[-1] // 2
        parts.append((cosine[0, :, :half], sine[0, :, :half]))
    return torch.cat([part[0] for part in parts]).contiguous(), torch.cat([part[1] for part in parts])


def _known(family: Family) -> Iterator[str]:
    for name in (*family.heads, *family.gates, family.output, family.down, *family.norms.values()):
        yield f"{name}.weight"
    yield from (f"{name}.bias" for name in family.heads)
