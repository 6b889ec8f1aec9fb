"""A module's weights and rotation arrive unchanged in the form that the C++ Llama reads."""

from typing import Any

import pytest
import torch
import transformers

from services.worker.engine.native.library import load
from services.worker.engine.native.weights import pack, rotation
from tests.services.worker.engine.native.products import multiply


def make_module(tied: bool) -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=70,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=10,
        max_position_embeddings=9000,
        tie_word_embeddings=tied,
    )
    module: Any = transformers.LlamaForCausalLM(config)
    return module.eval().requires_grad_(False)


def unpacked(matrix: torch.Tensor, inputs: int, outputs: int) -> torch.Tensor:
    """By a product with the identity, `[outputs, inputs]`."""
    columns = torch.empty(inputs, outputs)
    multiply(torch.eye(inputs), matrix, columns)
    return columns.T


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_come_back_out_of_their_panels(tied: bool) -> None:
    module = make_module(tied)
    weights = pack(load(), module, 16, release=False)
    attention = module.model.layers[0].self_attn
    joined = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(unpacked(weights.layers[0].query_key_value, 24, 40), joined)
    assert torch.equal(unpacked(weights.head, 24, 70), module.lm_head.weight)
    assert (weights.embedding is None) == tied
    assert weights.embedding is None or torch.equal(weights.embedding, module.model.embed_tokens.weight)


def test_released_weights_are_gone_and_the_norms_are_not() -> None:
    module = make_module(True)
    pack(load(), module, 16, release=True)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    assert {name for name, size in sizes.items() if size} == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    }


def test_the_table_is_the_modules_rotation_at_every_position() -> None:
    module = make_module(True)
    cosine, sine = rotation(module, 8200)
    assert cosine.shape == sine.shape == (8200, 5)
    for position in (0, 1, 4095, 4096, 8199):
        expected = module.model.rotary_emb(torch.empty(1), torch.tensor([[position]]))
        torch.testing.assert_close(cosine[position].repeat(2), expected[0][0, 0], rtol=0, atol=1e-6)
        torch.testing.assert_close(sine[position].repeat(2), expected[1][0, 0], rtol=0, atol=1e-6)
