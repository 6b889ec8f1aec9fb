"""From packed tokens to logits: in C++, in torch, or through transformers' own forward, the first that can.

All attend through `PagedAttention`, which must have been told of the step before.
"""

from typing import Protocol

import torch
from transformers.models.llama import LlamaForCausalLM

from services.worker.engine.attention import PagedAttention
from services.worker.engine.llama import LlamaForward, is_plain
from services.worker.engine.loading import LoadedModel, replace_attention
from services.worker.engine.logits import Logits
from services.worker.engine.native.llama import NativeLlama, is_computable
from services.worker.pie.llama import SwappedLlama


class Forward(Protocol):
    """One pass over packed rows."""

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        """`tokens`, `positions` int64 `[rows]`, `kept` int64, rows wanted → `[kept, vocabulary]`."""
        ...


class TransformersForward:
    """Any decoder: transformers' modules, with our attention in every layer."""

    def __init__(self, model: LoadedModel, attention: PagedAttention) -> None:
        self._module = model.module
        replace_attention(model.module, attention.name)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor) -> Logits:
        output = self._module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            # An empty index would be valid here, but some models slice with it in ways that are not.
            logits_to_keep=kept if kept.numel() else torch.zeros_like(tokens[:1]),
        )
        return Logits(output.logits[0, : kept.numel()])


def make_forward(
    model: LoadedModel, attention: PagedAttention, *, threads: int = 1, release: bool = False
) -> Forward:
    """The fast paths for Llamas (on CUDA of any dtype, elsewhere fp32), transformers' forward for all else.

    With `release` a path with weights of its own takes the module's away.
    """
    is_fixed = attention.store is None  # CUDA graphs hold on to where the pools were.
    if attention.triton is not None and is_fixed and isinstance(model.module, LlamaForCausalLM):
        from services.worker.engine.gpu import llama as gpu_llama  # imports Triton

        if gpu_llama.is_computable(model.module):
            return gpu_llama.with_graphs(model.module, attention.triton, model.max_positions)
    if not (isinstance(model.module, LlamaForCausalLM) and is_plain(model.module)):
        return TransformersForward(model, attention)
    library = attention.library
    if library is not None and is_computable(model.module):
        if attention.store is not None:
            return SwappedLlama(
                model.module, attention, attention.store, library, threads=threads, release=release
            )
        return NativeLlama(model.module, attention, library, threads=threads, release=release)
    return LlamaForward(model.module, attention)
