"""Shared parts of the Llama implementations: joined weights and checks of the architecture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class JoinedLayer:
    """Weights of one decoder layer; matrices `[out, in]`."""

    input_norm: torch.Tensor
    query_key_value: torch.Tensor
    output: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def join_layer(layer: Any) -> JoinedLayer:
    """Return the weights of a `LlamaDecoderLayer`: Q, K and V as one matrix, gate and up as another.

    The layer's own weights become views of them."""
    attention, mlp = layer.self_attn, layer.mlp
    return JoinedLayer(
        input_norm=layer.input_layernorm.weight,
        query_key_value=_joined((attention.q_proj, attention.k_proj, attention.v_proj)),
        output=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=_joined((mlp.gate_proj, mlp.up_proj)),
        down=mlp.down_proj.weight,
    )


def _joined(linears: Sequence[Any]) -> torch.Tensor:
    joined = torch.cat([linear.weight.data for linear in linears])
    for linear, rows in zip(
        linears, torch.split(joined, [len(each.weight) for each in linears]), strict=True
    ):
        linear.weight.data = rows
    return joined


def is_plain(module: Any) -> bool:
    """Return whether a LlamaForCausalLM has SiLU and no biases."""
    biased = any(name.endswith("proj.bias") for name, _ in module.named_parameters())
    return module.config.hidden_act == "silu" and not biased
