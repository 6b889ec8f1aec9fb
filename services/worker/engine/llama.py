"""The Llama architecture written out for packed rows: transformers' arithmetic in fewer calls.

On one core transformers' modules cost a flat 1 to 2 ms a step, which is most of a small model's step at small
batches. Queries, keys and values come from one matrix product, gate and up projection from another; residuals
are added by the product that makes what is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from services.worker.engine.attention import PagedAttention
from services.worker.engine.logits import Logits
from services.worker.engine.paged import Shape


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer's weights; matrices as `[out, in]`, as `torch.nn.Linear` keeps them."""

    input_norm: torch.Tensor
    query_key_value: torch.Tensor
    output: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def is_plain(module: Any) -> bool:
    """Whether a LlamaForCausalLM uses nothing that `LlamaForward` leaves out."""
    config = module.config
    biased = any(name.endswith("proj.bias") for name, _ in module.named_parameters())
    return config.hidden_act == "silu" and not biased and next(module.parameters()).dtype is torch.float32


class LlamaForward:
    """A `Forward` for a plain `LlamaForCausalLM`, whose own weights become views of the joined ones."""

    def __init__(self, module: Any, attention: PagedAttention) -> None:
        config = module.config
        self._attention = attention
        self._head_dim = module.model.layers[0].self_attn.head_dim
        self._q_heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._eps: float = config.rms_norm_eps
        self._shape = Shape(module.model.layers[0].self_attn.scaling)
        self._embedding = module.model.embed_tokens.weight
        self._rotary = module.model.rotary_emb
        self._norm = module.model.norm.weight
        self._head = module.lm_head.weight
        self._layers = [_join(layer) for layer in module.model.layers]

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        """See `services.worker.engine.forward.Forward`."""
        hidden = functional.embedding(tokens, self._embedding)
        cos, sin = self._rotary(hidden, positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, hidden, cos, sin)
            hidden = torch.addmm(hidden, attended, layer.output.t())
            gate, up = functional.linear(self._normed(hidden, layer.post_norm), layer.gate_up).chunk(2, -1)
            hidden = torch.addmm(hidden, functional.silu(gate) * up, layer.down.t())
        return Logits(functional.linear(self._normed(hidden[kept], self._norm), self._head))

    def _attend(
        self, index: int, layer: _Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        projected = functional.linear(self._normed(hidden, layer.input_norm), layer.query_key_value)
        heads = projected.view(hidden.shape[0], -1, self._head_dim)
        rotated = heads[:, : self._q_heads + self._kv_heads]
        values = heads[:, self._q_heads + self._kv_heads :]
        half = self._head_dim // 2
        turned = torch.cat((-rotated[..., half:], rotated[..., :half]), -1)
        rotated = torch.addcmul(rotated * cos, turned, sin)
        queries, keys = rotated[:, : self._q_heads], rotated[:, self._q_heads :]
        return self._attention.attend(index, queries, keys, values, self._shape).flatten(1)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self._eps)


def _join(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        query_key_value=_joined((attention.q_proj, attention.k_proj, attention.v_proj)),
        output=attention.o_proj.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=_joined((mlp.gate_proj, mlp.up_proj)),
        down=mlp.down_proj.weight,
    )


def _joined(linears: Sequence[Any]) -> torch.Tensor:
    """One matrix of several linear layers. Their own weights become views of it: nothing is held twice."""
    joined = torch.cat([linear.weight.data for linear in linears])
    first = 0
    for linear in linears:
        rows = linear.weight.shape[0]
        linear.weight.data = joined[first : first + rows]
        first += rows
    return joined
