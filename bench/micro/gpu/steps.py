"""Decode steps of Llamas with random weights, from token ids to logits, through CUDA graphs."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

BLOCK_TOKENS = 16
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama model."""

    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128

    def kv_bytes(self, batch: int, context_tokens: int) -> int:
        """Return the bytes of one layer's KV that attention reads in a step."""
        return 2 * batch * context_tokens * self.kv_heads * self.head_dim * DTYPE.itemsize


MODELS = {
    "llama2_7b": Shape(32, 4096, 11008, 32, 32, 32000),
    "llama2_13b": Shape(40, 5120, 13824, 40, 40, 32000),
    "llama3_8b": Shape(32, 4096, 14336, 32, 8, 128256),
}


TURNS = 5
_REPLAYS = 10
_COPY_BYTES = 1 << 31

Compute = Callable[[], Any]


def graphed(calls: Sequence[Compute]) -> Callable[[], float]:
    """Return a function that replays all calls as one CUDA graph and returns the seconds of one call."""
    new_stream: Any = torch.cuda.Stream
    stream = new_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    return lambda: replayed_s(graph.replay, len(kept))


def replayed_s(replay: Compute, calls: int) -> float:
    """Return the seconds of one call, by the device's clock."""
    event: Any = torch.cuda.Event
    start, end = event(enable_timing=True), event(enable_timing=True)
    replay()
    start.record()
    for _ in range(_REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _REPLAYS / calls


def copy_bytes_per_s(device: torch.device) -> float:
    """Return the median rate of a copy on the device, read and written bytes together."""
    source = torch.randn(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    measured = [replayed_s(lambda: target.copy_(source), 1) for _ in range(TURNS)]
    return 2 * _COPY_BYTES / statistics.median(measured)


def random_llama(shape: Shape, max_positions: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return transformers' Llama with random weights, created on the device."""
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
    """Return the bytes that a decode step reads: all weights except the embedding table, and all KV."""
    weights = sum(each.numel() * each.element_size() for each in module.parameters())
    embedding = module.get_input_embeddings().weight
    weights -= embedding.numel() * embedding.element_size()
    return int(weights) + shape.layers * shape.kv_bytes(batch, context_tokens)


def random_pools(shape: Shape, blocks: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return random keys and values of every layer."""
    size = (blocks, shape.kv_heads)
    return [
        (
            torch.randn(*size, shape.head_dim, BLOCK_TOKENS, dtype=DTYPE, device=device),
            torch.randn(*size, BLOCK_TOKENS, shape.head_dim, dtype=DTYPE, device=device),
        )
        for _ in range(shape.layers)
    ]


def measure_step(module: Any, shape: Shape, batch: int, context_tokens: int, device: torch.device) -> float:
    """Return the seconds of a decode step in the engine, with its copy of the block tables to the device."""
    from services.worker.engine.gpu.backend import TritonBackend
    from services.worker.engine.gpu.decoder import with_graphs
    from services.worker.engine.spans import Span, pack

    blocks = context_tokens // BLOCK_TOKENS
    backend = TritonBackend(random_pools(shape, batch * blocks, device), BLOCK_TOKENS, device)
    forward = with_graphs(module, backend, context_tokens, max_batch=batch)
    spans = [Span(context_tokens - 1, 1, range(row, batch * blocks, batch)) for row in range(batch)]
    tokens = torch.randint(shape.vocabulary, (batch,))
    positions = torch.full((batch,), context_tokens - 1)
    kept = torch.arange(batch)

    @torch.inference_mode()
    def step() -> None:
        backend.begin(spans, batch, pack(spans, BLOCK_TOKENS))
        forward(tokens, positions, kept)

    return statistics.median(replayed_s(step, 1) for _ in range(TURNS))
