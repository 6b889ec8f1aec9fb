"""Small checkpoints with random weights, of architectures that vLLM has and the native engine may not."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from tests.stack.running import TINY_CHAT

_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
_COMMON: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 1024}
_COMMON["initializer_range"] = 0.2
_WINDOWS: dict[str, Any] = {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _qwen2(common: dict[str, Any]) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**common))


def _qwen3(common: dict[str, Any]) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(head_dim=64, **common))


def _gemma3(common: dict[str, Any]) -> Any:
    """Layers with a window beside layers without."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(head_dim=64, query_pre_attn_scalar=64, **_WINDOWS, **common))


def _mixtral(common: dict[str, Any]) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(sliding_window=None, **_EXPERTS, **common))


def _gpt_oss(common: dict[str, Any]) -> Any:
    """Attention with sinks, and experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(head_dim=64, **_WINDOWS, **_EXPERTS, **common))


_MAKERS = (_qwen2, _qwen3, _gemma3, _mixtral, _gpt_oss)
MAKERS: dict[str, Callable[[dict[str, Any]], Any]] = {make.__name__[1:]: make for make in _MAKERS}


def make(name: str, folder: Path) -> None:
    """The checkpoint `name` of `MAKERS`, with tiny_chat's tokenizer."""
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_CHAT / file, folder)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    torch.manual_seed(0)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    MAKERS[name]({**_COMMON, **ends, "pad_token_id": 0, "vocab_size": len(tokenizer)}).save_pretrained(folder)


MODULES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def make_adapter(model: Path, folder: Path, rank: int, modules: Sequence[str] = MODULES) -> None:
    """A LoRA adapter of a Llama with random weights, as PEFT writes it; the rank is its seed, too."""
    folder.mkdir(parents=True)
    told = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    names = [name.rpartition(".")[2] for name in modules]
    (folder / "adapter_config.json").write_text(json.dumps({**told, "target_modules": names}))
    dice, tensors = torch.Generator().manual_seed(rank), {}
    for name, matrix in load_file(model / "model.safetensors").items():
        if name.endswith(tuple(f"{module}.weight" for module in modules)):
            stem, (outs, ins) = f"base_model.model.{name.removesuffix('.weight')}", matrix.shape
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, ins, generator=dice) / ins**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outs, rank, generator=dice) / 8 / rank**0.5
    save_file(tensors, folder / "adapter_model.safetensors")
