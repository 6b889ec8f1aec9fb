"""Forward passes from packed tokens to logits: in C++, in torch, or with transformers' modules.

Call `PagedAttention.begin` first. `LlamaForward` writes the Llama architecture out in torch, because
transformers' modules cost 1 to 2 ms per step on one core."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers.models.llama import LlamaForCausalLM

from services.worker.engine.attention import PagedAttention
from services.worker.engine.loading import LoadedModel, native_obstacle, replace_attention
from services.worker.engine.native.llama import NativeLlama
from services.worker.engine.paged import Shape, to_device
from services.worker.engine.sampler import Logits
from services.worker.engine.states import StateTap
from shared.log import canonical, get_logger

_log = get_logger("worker.forward")


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


class LlamaPass:
    """The pass of a plain `LlamaForCausalLM`, whose own weights become views of the joined ones.

    A subclass attends, and may have kernels of its own."""

    def __init__(
        self, module: Any, layers: Sequence[JoinedLayer] | None = None, tap: StateTap | None = None
    ) -> None:
        """`layers`: the joined weights, if they exist already."""
        config, body, first = module.config, module.model, module.model.layers[0].self_attn
        self._tap, self._head_dim, self._scaling = tap, int(first.head_dim), float(first.scaling)
        self._q_heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._eps: float = config.rms_norm_eps
        self._embedding, self._rotary = body.embed_tokens.weight, body.rotary_emb
        self._norm, self._head = body.norm.weight, module.lm_head.weight
        self._layers = layers or [join_layer(layer) for layer in body.layers]

    def compute(
        self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits `[kept, vocabulary]` and the head's input `[kept, hidden size]` of the rows `kept`.

        `tokens`, `positions` int64 `[rows]`, `kept` int64."""
        device = self._embedding.device
        tokens, positions, kept = (to_device(each, device) for each in (tokens, positions, kept))
        hidden = functional.embedding(tokens, self._embedding)
        angles = self._turns(hidden, positions)
        for index, layer in enumerate(self._layers):
            projected = functional.linear(self._normed(hidden, layer.input_norm), layer.query_key_value)
            heads = projected.view(hidden.shape[0], -1, self._head_dim)
            hidden = torch.addmm(hidden, self._attend(index, heads, angles), layer.output.t())
            gate_up = functional.linear(self._normed(hidden, layer.post_norm), layer.gate_up)
            hidden = torch.addmm(hidden, self._gated(gate_up), layer.down.t())
            if self._tap is not None and index == self._tap.layer:
                self._tap.take(hidden)
        found = self._normed(hidden[kept], self._norm)
        return functional.linear(found, self._head), found

    def _turns(self, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        """Return what `_attend` gets about the rows' positions."""
        return positions

    def _attend(self, index: int, heads: torch.Tensor, turns: Any) -> torch.Tensor:
        """Return attention `[rows, q_heads * head_dim]`; `heads` has queries, keys and values of each row."""
        raise NotImplementedError

    def _gated(self, joined: torch.Tensor) -> torch.Tensor:
        gate, up = joined.chunk(2, -1)
        return functional.silu(gate) * up

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self._eps)


class LlamaForward(LlamaPass):
    """`Forward` in torch."""

    def __init__(
        self,
        module: Any,
        attention: PagedAttention,
        tap: StateTap | None = None,
        layers: Sequence[JoinedLayer] | None = None,
    ) -> None:
        super().__init__(module, layers, tap)
        self._attention, self._shape = attention, Shape(self._scaling)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        logits, hidden = self.compute(tokens, positions, kept)
        return Logits(logits, hidden=hidden)

    def _turns(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary(hidden[:1].float(), positions[None])
        return cos[0, :, None], sin[0, :, None]

    def _attend(self, index: int, heads: torch.Tensor, turns: Any) -> torch.Tensor:
        cos, sin = turns
        rotated = heads[:, : self._q_heads + self._kv_heads].float()
        values = heads[:, self._q_heads + self._kv_heads :]
        half = self._head_dim // 2
        turned = torch.cat((-rotated[..., half:], rotated[..., :half]), -1)
        rotated = torch.addcmul(rotated * cos, turned, sin).to(values.dtype)
        queries, keys = rotated[:, : self._q_heads], rotated[:, self._q_heads :]
        return self._attention.attend(index, queries, keys, values, self._shape).flatten(1)


class Forward(Protocol):
    """A forward pass over packed rows."""

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        """Return logits `[kept, vocabulary]` of the rows `kept`.

        `tokens`, `positions` int64 `[rows]` and `kept` int64, all in host memory."""


class TransformersForward:
    """`Forward` of any decoder: transformers' modules with paged attention in every layer."""

    def __init__(self, model: LoadedModel, attention: PagedAttention, tap: StateTap | None = None) -> None:
        self._module, self._device = model.module, model.device
        self._hidden: torch.Tensor | None = None
        replace_attention(model.module, attention.name)
        layers = getattr(model.module.get_decoder(), "layers", ())
        if tap is not None and tap.layer < len(layers):
            layers[tap.layer].register_forward_hook(lambda module, inputs, output: _tap_output(tap, output))
        model.module.get_output_embeddings().register_forward_pre_hook(self._note_hidden)

    def _note_hidden(self, _: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        self._hidden = arguments[0][0]

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        tokens, positions, kept = (to_device(each, self._device) for each in (tokens, positions, kept))
        count = kept.numel()
        output = self._module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            # Some models cannot slice with an empty index.
            logits_to_keep=kept if count else torch.zeros_like(tokens[:1]),
        )
        hidden, self._hidden = self._hidden, None
        return Logits(output.logits[0, :count], hidden=None if hidden is None else hidden[:count])


def _tap_output(tap: StateTap, output: Any) -> None:
    """Tap a decoder layer's output: states `[1, rows, hidden]`, alone or first in a tuple."""
    states = output[0] if isinstance(output, tuple) else output
    tap.take(states.view(-1, states.shape[-1]))


def make_forward(
    model: LoadedModel,
    attention: PagedAttention,
    *,
    threads: int = 1,
    release: bool = False,
    tap: StateTap | None = None,
) -> Forward:
    """Return the fastest forward pass: for Llamas on CUDA and known families in fp32 a special one, else
    transformers'. Logs which, and why.

    `release` frees the module's weights if the pass has packed copies. The CUDA pass does not fill `tap`."""
    if attention.triton is not None and isinstance(model.module, LlamaForCausalLM):
        from services.worker.engine.gpu import llama as gpu_llama  # imports Triton

        if gpu_llama.is_computable(model.module):
            layers = [join_layer(layer) for layer in model.module.model.layers]
            whole = gpu_llama.with_graphs(
                model.module, attention.triton, model.max_positions, gate=attention, layers=layers
            )
            divided = LlamaForward(model.module, attention, layers=layers)

            def by_reach(tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
                chosen: Forward = divided if attention.is_partitioned else whole
                return chosen(tokens, positions, kept)

            return by_reach
    why, library = native_obstacle(model.module, attention.library), attention.library
    if library is not None and not why:
        native = NativeLlama(
            model.module,
            attention,
            library,
            threads=threads,
            release=release,
            tap=tap,
            precision=model.precision,
        )
        canonical(_log, "computes natively", weights=native.describe_weights())
        return native
    is_llama = isinstance(model.module, LlamaForCausalLM) and is_plain(model.module)
    if is_llama and model.dtype is torch.float32:
        canonical(_log, "computes in torch", why=why)
        return LlamaForward(model.module, attention, tap)
    canonical(_log, "computes with transformers' modules", why=why)
    return TransformersForward(model, attention, tap)
