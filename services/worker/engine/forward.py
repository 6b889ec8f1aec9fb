"""Forward passes from packed tokens to logits: in C++, in torch, or with transformers' modules.

Call `PagedAttention.begin` first. `LlamaForward` writes the Llama architecture out in torch, because
transformers' modules cost 1 to 2 ms per step on one core."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers.models.llama import LlamaForCausalLM

from services.worker.engine.attention import PagedAttention
from services.worker.engine.llama_parts import JoinedLayer, is_plain, join_layer
from services.worker.engine.loading import LoadedModel, native_obstacle, replace_attention
from services.worker.engine.native.llama import NativeLlama
from services.worker.engine.paged import Shape, to_device
from services.worker.engine.sampler import Logits
from services.worker.engine.states import StateTap
from shared.log import canonical, get_logger

_log = get_logger("worker.forward")


class LlamaForward:
    """`Forward` of a plain `LlamaForCausalLM`, whose own weights become views of the joined ones."""

    def __init__(
        self,
        module: Any,
        attention: PagedAttention,
        tap: StateTap | None = None,
        layers: Sequence[JoinedLayer] | None = None,
    ) -> None:
        """`layers`: the joined weights, if they exist already."""
        config, body, first = module.config, module.model, module.model.layers[0].self_attn
        self._attention, self._tap = attention, tap
        self._head_dim, self._shape = first.head_dim, Shape(first.scaling)
        self._q_heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._eps: float = config.rms_norm_eps
        self._embedding, self._rotary = body.embed_tokens.weight, body.rotary_emb
        self._norm, self._head = body.norm.weight, module.lm_head.weight
        self._layers = layers or [join_layer(layer) for layer in body.layers]

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        device = self._embedding.device
        tokens, positions, kept = (to_device(each, device) for each in (tokens, positions, kept))
        hidden = functional.embedding(tokens, self._embedding)
        cos, sin = self._rotary(hidden[:1].float(), positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, hidden, cos, sin)
            hidden = torch.addmm(hidden, attended, layer.output.t())
            gate, up = functional.linear(self._normed(hidden, layer.post_norm), layer.gate_up).chunk(2, -1)
            hidden = torch.addmm(hidden, functional.silu(gate) * up, layer.down.t())
            if self._tap is not None and index == self._tap.layer:
                self._tap.take(hidden)
        found = self._normed(hidden[kept], self._norm)
        return Logits(functional.linear(found, self._head), hidden=found)

    def _attend(
        self, index: int, layer: JoinedLayer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        projected = functional.linear(self._normed(hidden, layer.input_norm), layer.query_key_value)
        heads = projected.view(hidden.shape[0], -1, self._head_dim)
        rotated = heads[:, : self._q_heads + self._kv_heads].float()
        values = heads[:, self._q_heads + self._kv_heads :]
        half = self._head_dim // 2
        turned = torch.cat((-rotated[..., half:], rotated[..., :half]), -1)
        rotated = torch.addcmul(rotated * cos, turned, sin).to(values.dtype)
        queries, keys = rotated[:, : self._q_heads], rotated[:, self._q_heads :]
        return self._attention.attend(index, queries, keys, values, self._shape).flatten(1)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self._eps)


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
