"""Random-weight models of several architectures, small enough for a test, made from transformers' classes."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

torch.set_num_threads(1)

VOCABULARY = 97
MAX_POSITIONS = 256
_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
_COMMON |= {"num_attention_heads": 4, "max_position_embeddings": MAX_POSITIONS, "initializer_range": 0.5}
_COMMON |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_GROUPED: dict[str, Any] = _COMMON | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16}
_OPT: dict[str, Any] = _COMMON | {"ffn_dim": 48}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _GROUPED | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {k: v for k, v in _GROUPED.items() if k != "head_dim"}),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "mistral_window": ("MistralForCausalLM", _GROUPED | {"sliding_window": 12}),
    "gemma2": ("Gemma2ForCausalLM", _GROUPED | {"sliding_window": 12, "query_pre_attn_scalar": 16}),
    "opt": ("OPTForCausalLM", _OPT | {"word_embed_proj_dim": 32}),
    "opt_350m": ("OPTForCausalLM", _OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
}

ModelFactory = Callable[[str], Any]


def new_model(architecture: str, **changed: Any) -> Any:
    """A seeded model of `ARCHITECTURES`, in evaluation mode, which no engine has changed."""
    class_name, settings = ARCHITECTURES[architecture]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(7)
    return model_class(model_class.config_class(**settings | changed)).eval()


@cache
def build_model(architecture: str) -> Any:
    """One for all: engines have replaced its attention."""
    return new_model(architecture)


@pytest.fixture
def make_model() -> ModelFactory:
    """Models are made once per session; an engine only replaces their attention function."""
    return build_model


@pytest.fixture
def llama() -> Any:
    return build_model("llama")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A Hugging Face folder (config and safetensors) of the Llama above."""
    folder = tmp_path / "random_llama"
    build_model("llama").save_pretrained(folder)
    return folder
