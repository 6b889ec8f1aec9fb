"""Any decoder folder loads or is refused with a reason; KV is exchanged between equal models only."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.worker.engine.attention import LayerShape
from services.worker.engine.checkpoint import checkpoint_digest, stored_dtype
from services.worker.engine.contract import Row
from services.worker.engine.engine import TorchEngine
from services.worker.engine.loading import describe, layout_name, load, model_digest
from shared.errors import ConfigError
from tests.services.worker.conftest import (
    ARCHITECTURES,
    MAX_POSITIONS,
    VOCABULARY,
    ModelFactory,
    build_model,
    new_model,
)
from tests.services.worker.prefix_rig import make_engine
from tests.stack.running import TINY_CHAT


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_layer_is_described_by_what_it_keeps(architecture: str, make_model: ModelFactory) -> None:
    described = describe(make_model(architecture))
    grouped = LayerShape(2, 8 if architecture == "qwen2" else 16, 8 if architecture == "qwen2" else 16)
    expected = LayerShape(4, 8, 8) if architecture.startswith("opt") else grouped
    windows = {"mistral_window": (12, 12), "gemma2": (12, 0)}.get(architecture, (0, 0))
    assert described.layers == tuple(replace(expected, window_tokens=window) for window in windows)
    assert (described.vocabulary, described.max_positions) == (VOCABULARY, MAX_POSITIONS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_is_loaded_with_its_weights_in_the_dtype_asked_for(
    model_folder: Path, make_model: ModelFactory, dtype: str
) -> None:
    loaded = load(str(model_folder), dtype=dtype, device="cpu")
    assert not loaded.module.training and len(loaded.layers) == 2
    original = dict(make_model("llama").named_parameters())
    for name, parameter in loaded.module.named_parameters():
        assert torch.equal(parameter, original[name].to(getattr(torch, dtype))), name


def test_what_cannot_be_loaded_is_refused(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="float64"):
        load(str(model_folder), dtype="float64", device="cpu")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no model"):
        load(str(tmp_path / "empty"), dtype="float32", device="cpu")


SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


LINEAR: dict[str, Any] = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
LINEAR |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
EXPERTS: dict[str, Any] = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


def test_attention_that_is_not_computed_is_refused() -> None:
    kinds = ["linear_attention", "full_attention"]
    config = transformers.Qwen3NextConfig(
        **SMALL, **LINEAR, **EXPERTS, layer_types=kinds, shared_expert_intermediate_size=16
    )
    with pytest.raises(ConfigError, match="attention in layers"):
        describe(transformers.Qwen3NextForCausalLM(config))
    sinks = transformers.GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ConfigError, match="s_aux"):
        describe(transformers.GptOssForCausalLM(sinks))


def test_context_is_limited_to_what_is_computed_exactly() -> None:
    settings = ARCHITECTURES["llama"][1] | {"intermediate_size_mlp": 48, "num_local_experts": 2}
    chunked = transformers.Llama4TextConfig(**settings, attention_chunk_size=40)
    assert describe(transformers.Llama4ForCausalLM(chunked)).max_positions == 40
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert describe(new_model("llama", rope_parameters=rope)).max_positions == 64


def test_equal_weights_have_one_digest_and_one_changed_number_another() -> None:
    model = build_model("llama")
    other = copy.deepcopy(model)
    assert model_digest(model) == model_digest(other)
    with torch.no_grad():
        next(other.parameters())[3, 5] += 1e-3
    assert model_digest(model) != model_digest(other)
    assert layout_name([LayerShape(2, 16, 16)]) != layout_name([LayerShape(1, 32, 16)])


OTHER_KV: list[dict[str, Any]] = [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
    {"rms_norm_eps": 0.1},
    {"hidden_act": "gelu"},
]
"""Of a configuration: what changes KV and no weight."""


@pytest.mark.parametrize("changed", OTHER_KV, ids=str)
def test_kv_that_the_configuration_makes_different_has_another_fingerprint(changed: dict[str, Any]) -> None:
    """Disk tiers, moves and loans went by the weights alone, and the greedy answer was another model's."""
    engines = [
        TorchEngine(describe(model), kv_blocks=2, block_tokens=4)
        for model in (new_model("llama"), new_model("llama", **changed))
    ]
    for engine in engines:
        engine.step([Row([5, 9, 2, 7, 11, 3, 8, 6], 0, [0, 1], None)])
    mine, theirs = (
        torch.cat([each.flatten() for pair in engine.pools for each in pair]) for engine in engines
    )
    assert not torch.allclose(mine, theirs, atol=1e-3), "or this shows nothing"
    assert len({engine.fingerprint for engine in engines}) == len({engine.weights for engine in engines}) == 2


def test_where_a_model_came_from_and_how_answers_end_are_not(tmp_path: Path) -> None:
    model = new_model("llama")
    model.save_pretrained(tmp_path)
    again = load(str(tmp_path), dtype="float32", device="cpu").module
    assert model_digest(again) == model_digest(model)
    assert model_digest(new_model("llama", eos_token_id=3, use_cache=False)) == model_digest(model)


def test_an_engines_fingerprint_covers_model_dtype_and_block_size() -> None:
    engines = [make_engine(), make_engine(), make_engine(architecture="qwen3")]
    prints = [engine.fingerprint for engine in engines]
    assert prints[0] == prints[1] != prints[2]
    sizes = [TorchEngine(describe(new_model("llama")), kv_blocks=2, block_tokens=size) for size in (4, 8)]
    assert sizes[0].fingerprint != sizes[1].fingerprint and sizes[0].weights == sizes[1].weights
    half = TorchEngine(describe(new_model("llama").to(torch.bfloat16)), kv_blocks=2, block_tokens=4)
    assert half.fingerprint != sizes[0].fingerprint
    model = describe(new_model("llama"))
    short = replace(model, kv_dtype=torch.bfloat16)
    assert 2 * short.block_bytes(4) == model.block_bytes(4)
    assert TorchEngine(short, kv_blocks=2, block_tokens=4).fingerprint not in {
        one.fingerprint for one in sizes
    }
    with pytest.raises(ConfigError, match="leave kv_dtype out"):
        TorchEngine(short, kv_blocks=2, block_tokens=4, attention="torch")


FP32 = "torch.float32"


@pytest.fixture
def tiny_chat(tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(TINY_CHAT, copy)
    return copy


def configure(tiny_chat: Path, **fields: object) -> None:
    path = tiny_chat / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_files_may_be_cut_and_written_otherwise(tiny_chat: Path) -> None:
    held = checkpoint_digest(str(tiny_chat), FP32)
    tensors = load_file(tiny_chat / "model.safetensors")
    (tiny_chat / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, tiny_chat / f"model-{number}.safetensors")
    configure(tiny_chat, transformers_version="0.0", dtype="float64", _name_or_path="elsewhere")
    assert checkpoint_digest(str(tiny_chat), FP32) == held


def test_another_weight_configuration_or_dtype_is_another(tiny_chat: Path) -> None:
    seen = {checkpoint_digest(str(tiny_chat), FP32), checkpoint_digest(str(tiny_chat), "torch.bfloat16")}
    configure(tiny_chat, rms_norm_eps=1e-6)
    seen.add(checkpoint_digest(str(tiny_chat), FP32))
    path = tiny_chat / "model.safetensors"
    tensors = load_file(path)
    first = min(tensors)
    tensors[first].view(-1)[0] += torch.ones((), dtype=tensors[first].dtype)
    save_file(tensors, path)
    seen.add(checkpoint_digest(str(tiny_chat), FP32))
    path.unlink()
    for old in (b"one", b"two"):
        (tiny_chat / "pytorch_model.bin").write_bytes(old)
        seen.add(checkpoint_digest(str(tiny_chat), FP32))
    assert len(seen) == 6


def test_the_dtype_that_it_was_made_in(tiny_chat: Path) -> None:
    assert stored_dtype(str(tiny_chat)) == "bfloat16"
    configure(tiny_chat, dtype=None, text_config={"torch_dtype": "float16"})
    assert stored_dtype(str(tiny_chat)) == "float16"
    configure(tiny_chat, text_config={})
    assert stored_dtype(str(tiny_chat)) == "float32"
