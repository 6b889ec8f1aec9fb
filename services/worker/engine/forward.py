"""From packed tokens to logits: through transformers' own forward, or a faster one where there is one.

Both attend through `PagedAttention`, which must have been told of the step before.
"""

from typing import Protocol

import torch
from transformers.models.llama import LlamaForCausalLM

from services.worker.engine.attention import PagedAttention
from services.worker.engine.llama import LlamaForward, is_plain
from services.worker.engine.loading import LoadedModel, replace_attention


class Forward(Protocol):
    """One pass over packed rows."""

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """`tokens`, `positions` int64 `[rows]`, `kept` int64, rows wanted → logits `[kept, vocabulary]`."""
        ...


class TransformersForward:
    """Any decoder: transformers' modules, with our attention in every layer."""

    def __init__(self, model: LoadedModel, attention: PagedAttention) -> None:
        self._module = model.module
        replace_attention(model.module, attention.name)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        output = self._module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            # An empty index would be valid here, but some models slice with it in ways that are not.
            logits_to_keep=kept if kept.numel() else torch.zeros_like(tokens[:1]),
        )
        logits: torch.Tensor = output.logits[0, : kept.numel()]
        return logits


def make_forward(model: LoadedModel, attention: PagedAttention) -> Forward:
    """The fast path for plain fp32 Llamas, transformers' forward for everything else."""
    if isinstance(model.module, LlamaForCausalLM) and is_plain(model.module):
        return LlamaForward(model.module, attention)
    return TransformersForward(model, attention)
