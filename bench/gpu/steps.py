"""Whole decode steps of Llamas with random weights: from token ids to logits, through CUDA graphs."""

import statistics
from typing import Any

import torch

from bench.gpu.shapes import BLOCK_TOKENS, DTYPE, Shape
from bench.gpu.timing import TURNS, replayed_s


def random_llama(shape: Shape, max_positions: int, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' Llama with random weights, made on the device."""
    import transformers

    factory: Any = transformers.AutoModelForCausalLM
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_positions,
    )
    with device:
        return factory.from_config(config, dtype=dtype).eval().requires_grad_(False)


def step_bytes(module: Any, shape: Shape, batch: int, context_tokens: int) -> int:
    """What a decode step has to read: every weight but the embedding table, and all keys and values."""
    weights = sum(each.numel() * each.element_size() for each in module.parameters())
    embedding = module.get_input_embeddings().weight
    weights -= embedding.numel() * embedding.element_size()
    return int(weights) + shape.layers * shape.kv_bytes(batch, context_tokens)


def random_pools(shape: Shape, blocks: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer."""
    size = (blocks, shape.kv_heads)
    return [
        (
            torch.randn(*size, shape.head_dim, BLOCK_TOKENS, dtype=DTYPE, device=device),
            torch.randn(*size, BLOCK_TOKENS, shape.head_dim, dtype=DTYPE, device=device),
        )
        for _ in range(shape.layers)
    ]


def measure_step(module: Any, shape: Shape, batch: int, context_tokens: int, device: torch.device) -> float:
    """Seconds of one decode step as the engine makes it, block tables copied to the device included."""
    from services.worker.engine.gpu.backend import TritonBackend
    from services.worker.engine.gpu.llama import with_graphs
    from services.worker.engine.layout import Span, pack

    blocks = context_tokens // BLOCK_TOKENS
    backend = TritonBackend(random_pools(shape, batch * blocks, device), BLOCK_TOKENS, device)
    forward = with_graphs(module, backend, context_tokens, max_batch=batch)
    spans = [Span(context_tokens - 1, 1, range(row, batch * blocks, batch)) for row in range(batch)]
    tokens = torch.randint(shape.vocabulary, (batch,), device=device)
    positions = torch.full((batch,), context_tokens - 1, device=device)
    kept = torch.arange(batch, device=device)

    @torch.inference_mode()
    def step() -> None:
        backend.begin(spans, batch, pack(spans, BLOCK_TOKENS))
        forward(tokens, positions, kept)

    return statistics.median(replayed_s(step, 1) for _ in range(TURNS))
