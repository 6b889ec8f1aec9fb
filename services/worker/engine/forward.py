"""Forward passes from packed tokens to logits: in C++, with Triton, or with transformers' modules.

Call `PagedAttention.begin` first."""

from typing import Any, Protocol

import torch

from services.worker.engine.attention import PagedAttention
from services.worker.engine.loading import LoadedModel, native_obstacle, replace_attention
from services.worker.engine.native.llama import NativeLlama
from services.worker.engine.paged import to_device
from services.worker.engine.sampler import Logits
from services.worker.engine.states import StateTap
from shared.log import canonical, get_logger

_log = get_logger("worker.forward")


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
    """Return the fastest forward pass: our own for known families on CUDA devices and in fp32 on CPUs, else
    transformers'. Logs which, and why.

    `release` frees the module's weights if the pass has packed copies. The CUDA pass does not fill `tap`."""
    if attention.triton is not None:
        from services.worker.engine.gpu import decoder  # imports Triton

        if decoder.is_computable(model.module):
            whole = decoder.with_graphs(
                model.module, attention.triton, model.max_positions, gate=attention, windows=attention.windows
            )
            divided = TransformersForward(model, attention)

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
    canonical(_log, "computes with transformers' modules", why=why)
    return TransformersForward(model, attention, tap)
