"""Any decoder folder loads; what cannot be computed here is refused with a reason."""

from pathlib import Path

import pytest
import torch
import transformers

from services.worker.engine.attention import LayerShape
from services.worker.engine.loading import describe, load
from shared.errors import ConfigError
from tests.services.worker.conftest import ARCHITECTURES, MAX_POSITIONS, VOCABULARY, ModelFactory


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_layer_is_described_by_what_it_keeps(architecture: str, make_model: ModelFactory) -> None:
    described = describe(make_model(architecture))
    grouped = LayerShape(2, 8 if architecture == "qwen2" else 16, 8 if architecture == "qwen2" else 16)
    expected = LayerShape(4, 8, 8) if architecture.startswith("opt") else grouped
    assert described.layers == (expected, expected)
    assert (described.vocabulary, described.max_positions) == (VOCABULARY, MAX_POSITIONS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_is_loaded_in_the_dtype_asked_for(model_folder: Path, dtype: str) -> None:
    loaded = load(str(model_folder), dtype=dtype, device="cpu")
    assert loaded.dtype is getattr(torch, dtype)
    assert not loaded.module.training and len(loaded.layers) == 2


def test_weights_survive_the_folder(model_folder: Path, make_model: ModelFactory) -> None:
    loaded = load(str(model_folder), dtype="float32", device="cpu")
    original = dict(make_model("llama").named_parameters())
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter, original[name])


def test_an_unknown_dtype_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="float64"):
        load(str(model_folder), dtype="float64", device="cpu")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model"):
        load(str(tmp_path), dtype="float32", device="cpu")


def test_layers_without_attention_are_refused() -> None:
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(ConfigError, match="attention in layers"):
        describe(transformers.Qwen3NextForCausalLM(config))


def test_attention_sinks_are_refused() -> None:
    config = transformers.GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    with pytest.raises(ConfigError, match="s_aux"):
        describe(transformers.GptOssForCausalLM(config))


def test_context_is_limited_to_what_is_computed_exactly() -> None:
    settings = ARCHITECTURES["llama"][1] | {"intermediate_size_mlp": 48, "num_local_experts": 2}
    chunked = transformers.Llama4TextConfig(**settings, attention_chunk_size=40)
    assert describe(transformers.Llama4ForCausalLM(chunked)).max_positions == 40
    scaled = transformers.LlamaConfig(
        **ARCHITECTURES["llama"][1],
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    )
    assert describe(transformers.LlamaForCausalLM(scaled)).max_positions == 64
