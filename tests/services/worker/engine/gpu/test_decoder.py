"""The steps of a CUDA device say what transformers' modules say, for every family."""

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (make setup-gpu)")

from services.worker.engine.gpu.decoder import CudaDecoder, is_computable
from services.worker.engine.gpu.mlp import gated, mixed
from services.worker.engine.loading import describe
from services.worker.engine.native.families import FAMILIES
from services.worker.engine.spans import Span
from tests.services.worker.engine.gpu.test_graphs import begin, llama_backend
from tests.services.worker.engine.native.test_families import make_module

WORDS, POSITIONS = 97, 64
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
WHOLE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
STEPS = ([(0, 0, 20)], [(0, 20, 1), (1, 0, 28)], [(0, 21, 1), (1, 28, 1)], [(0, 22, 8), (1, 29, 1)])
"""Each a list of (sequence, first position, tokens)."""


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, WHOLE if name.startswith("Phi3") else {}) for name in FAMILIES),
        ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    ],
)
def test_chunks_and_decodes_say_what_transformers_says(
    device: torch.device, name: str, settings: dict[str, Any]
) -> None:
    module = make_module(name, **settings).requires_grad_(False).to(device)
    assert is_computable(module)
    tokens = torch.randint(WORDS, (2, 30), generator=torch.Generator().manual_seed(1)).to(device)
    joined = copy.deepcopy(module)
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = module(input_ids=tokens).logits
    backend = llama_backend(joined)
    windows = [shape.window_tokens for shape in describe(copy.deepcopy(module)).layers]
    decoder = CudaDecoder(joined, backend, POSITIONS, windows=windows)
    tables = (list(range(0, 8)), list(range(8, 16)))
    allowed = 3e-4 * max(1.0, float(expected.abs().max()))
    for step in STEPS:
        begin(backend, [Span(first, count, tables[sequence]) for sequence, first, count in step])
        rows = [(sequence, first + at) for sequence, first, count in step for at in range(count)]
        sequences, places = (torch.tensor(each, device=device) for each in zip(*rows, strict=True))
        with torch.inference_mode():
            logits, _ = decoder(tokens[sequences, places], places, torch.arange(len(rows), device=device))
        torch.testing.assert_close(logits, expected[sequences, places], rtol=0, atol=allowed)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}),
        ("LlamaForCausalLM", DYNAMIC),
        ("Phi3ForCausalLM", {}),
        ("GraniteForCausalLM", {}),
    ],
)
def test_what_it_does_not_know_it_says(name: str, settings: dict[str, Any]) -> None:
    assert not is_computable(make_module(name, **settings))


@pytest.mark.parametrize(("activation", "approximate"), [("silu", None), ("gelu_pytorch_tanh", "tanh")])
def test_gating_survives_values_of_any_size(
    device: torch.device, activation: str, approximate: str | None
) -> None:
    joined = torch.randn(3, 2 * 1500, generator=torch.Generator().manual_seed(2)) * 200
    gate, up = joined.chunk(2, -1)
    act = torch.nn.functional.silu(gate)
    if approximate is not None:
        act = torch.nn.functional.gelu(gate, approximate=approximate)
    found = gated(joined.to(device), activation).cpu()
    torch.testing.assert_close(found, act * up, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("rows", "experts", "choices"), [(1, 3, 1), (40, 5, 2), (150, 2, 2), (7, 128, 8)])
def test_experts_get_their_rows_whatever_is_chosen(
    device: torch.device, rows: int, experts: int, choices: int
) -> None:
    """Some experts get none, one gets most."""
    dice = torch.Generator().manual_seed(rows)
    width, inner = 24, 70
    entering = torch.randn(rows, width, generator=dice)
    gate_up = torch.randn(experts, 2 * inner, width, generator=dice) * 0.2
    down = torch.randn(experts, width, inner, generator=dice) * 0.2
    liking = torch.rand(rows, experts, generator=dice)
    liking[:, 0] += 0.7
    shares, chosen = torch.topk(liking, choices, dim=-1)
    wanted = torch.zeros(rows, width)
    for row in range(rows):
        for share, expert in zip(shares[row], chosen[row], strict=True):
            gate, up = (gate_up[expert] @ entering[row]).chunk(2)
            wanted[row] += share * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    parts = [each.to(device) for each in (entering, shares, chosen, gate_up, down)]
    found = mixed(parts[0], parts[1], parts[2], parts[3], parts[4], "silu").cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
