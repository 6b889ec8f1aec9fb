"""The device's Llama says what transformers' modules say, and keeps keys and values where they belong."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytest.importorskip("triton", reason="Triton is not installed (make setup-gpu)")

from services.worker.engine.gpu.attention import gated
from services.worker.engine.gpu.backend import TritonBackend
from services.worker.engine.gpu.graphs import DecodeGraphs, GraphLimits
from services.worker.engine.gpu.llama import CudaLlama, is_computable, with_graphs
from services.worker.engine.spans import Span, pack
from tests.services.worker.engine.gpu.capturing import capture_for

VOCABULARY, POSITIONS, BLOCK_TOKENS, BLOCKS = 40, 64, 4, 16
TRAINED = Path(__file__).parents[5] / "models" / "tiny_chat"


def make_module(device: torch.device, **settings: Any) -> Any:
    torch.manual_seed(4)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "head_dim": 24}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=POSITIONS, **settings)
    module: Any = transformers.LlamaForCausalLM(config)
    return module.eval().requires_grad_(False).to(device)


def backend_for(module: Any, block_tokens: int = BLOCK_TOKENS) -> TritonBackend:
    config, head_dim = module.config, module.model.layers[0].self_attn.head_dim
    size, device = (BLOCKS, config.num_key_value_heads), module.lm_head.weight.device
    pools = [
        (
            torch.zeros(*size, head_dim, block_tokens, device=device),
            torch.zeros(*size, block_tokens, head_dim, device=device),
        )
        for _ in range(config.num_hidden_layers)
    ]
    return TritonBackend(pools, block_tokens, device)


def begin(backend: TritonBackend, spans: list[Span]) -> None:
    backend.begin(spans, 0, pack(spans, backend.block_tokens))


@pytest.mark.parametrize("rotation", ["default", "llama3"])
def test_chunks_and_decodes_say_what_transformers_says(device: torch.device, rotation: str) -> None:
    rope: dict[str, Any] = {"rope_type": rotation, "rope_theta": 10000.0}
    if rotation == "llama3":
        rope |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 32}
    module = make_module(device, rope_parameters=rope)
    assert is_computable(module)
    tokens = torch.randint(VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(1)).to(device)
    with torch.inference_mode():
        expected = module(input_ids=tokens).logits
    joined = copy.deepcopy(module)
    backend = backend_for(joined)
    llama = CudaLlama(joined, backend, POSITIONS)
    tables = (list(range(0, 8)), list(range(8, 16)))
    for step in ([(0, 0, 20)], [(0, 20, 1), (1, 0, 28)], [(0, 21, 1), (1, 28, 1)], [(0, 22, 8), (1, 29, 1)]):
        begin(backend, [Span(first, count, tables[sequence]) for sequence, first, count in step])
        rows = [(sequence, first + at) for sequence, first, count in step for at in range(count)]
        sequences, places = (torch.tensor(each, device=device) for each in zip(*rows, strict=True))
        with torch.inference_mode():
            logits, _ = llama(tokens[sequences, places], places, torch.arange(len(rows), device=device))
        torch.testing.assert_close(logits, expected[sequences, places], rtol=1e-4, atol=1e-4)


def test_joining_weights_leaves_the_module_as_it_was(device: torch.device) -> None:
    module = make_module(device)
    joined = copy.deepcopy(module)
    CudaLlama(joined, backend_for(joined), POSITIONS)
    for (name, mine), theirs in zip(joined.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    projections = joined.model.layers[0].self_attn
    assert projections.q_proj.weight.untyped_storage().data_ptr() == (
        projections.v_proj.weight.untyped_storage().data_ptr()
    )


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    "settings", [{"attention_bias": True}, {"hidden_act": "gelu"}, {"rope_parameters": DYNAMIC}]
)
def test_what_it_does_not_know_it_says(settings: dict[str, Any]) -> None:
    assert not is_computable(make_module(torch.device("cpu"), **settings))


def test_gating_survives_values_of_any_size(device: torch.device) -> None:
    joined = torch.randn(3, 2 * 1500, generator=torch.Generator().manual_seed(2)) * 200
    gate, up = joined.chunk(2, -1)
    torch.testing.assert_close(
        gated(joined.to(device)).cpu(), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5
    )


@pytest.mark.gpu
def test_captured_decodes_say_what_transformers_says() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    device = torch.device("cuda")
    module = make_module(device)
    tokens = torch.randint(VOCABULARY, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = module(input_ids=tokens.to(device)).logits[0]
    backend = backend_for(module)
    forward = with_graphs(module, backend, POSITIONS)
    with torch.inference_mode():
        for place in range(30):
            begin(backend, [Span(place, 1, list(range(8)))])
            at, kept = torch.tensor([place]), torch.zeros(1, dtype=torch.int64)
            logits = forward(tokens[0, at], at, kept).values
            torch.testing.assert_close(logits[0], expected[place], rtol=1e-3, atol=1e-3)


def test_a_trained_model_writes_what_transformers_would(device: torch.device) -> None:
    """Prompts and decodes in one batch, the decodes replayed: every token the likeliest, or a near tie."""
    factory: Any = transformers.LlamaForCausalLM
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(TRAINED)
    original = factory.from_pretrained(TRAINED, dtype=torch.float32).eval().requires_grad_(False)
    module = copy.deepcopy(original).to(device)
    backend = backend_for(module, block_tokens=16)
    llama = CudaLlama(module, backend, max_positions=128)
    forward = DecodeGraphs(llama, backend, GraphLimits(max_batch=2, max_blocks=8), capture_for(device))
    forward.capture_all()
    prompts = [tokenizer(prompt).input_ids for prompt in ("What is rain?", "Hello!")]
    sequences, done = [list(prompt) for prompt in prompts], [0, 0]
    for _ in range(60 if device.type == "cuda" else 4):
        rows = [(row, at) for row, own in enumerate(sequences) for at in range(done[row], len(own))]
        counts = [len(own) - at for own, at in zip(sequences, done, strict=True)]
        begin(backend, [Span(done[row], counts[row], list(range(8 * row, 8 * row + 8))) for row in (0, 1)])
        tokens = torch.tensor([sequences[row][at] for row, at in rows])
        positions = torch.tensor([at for _, at in rows])
        ends = torch.tensor([counts[0] - 1, sum(counts) - 1])
        with torch.inference_mode():
            chosen = forward(tokens, positions, ends).values.argmax(-1).tolist()
        done = [len(own) for own in sequences]
        sequences = [[*own, token] for own, token in zip(sequences, chosen, strict=True)]
    for prompt, own in zip(prompts, sequences, strict=True):
        with torch.inference_mode():
            logits = original(input_ids=torch.tensor([own])).logits[0, len(prompt) - 1 : -1]
        written = logits.gather(1, torch.tensor(own[len(prompt) :])[:, None]).squeeze(1)
        assert (logits.amax(-1) - written).max() <= 1e-3
