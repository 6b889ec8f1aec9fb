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


def _words(*shape: int) -> torch.Tensor:
    """Random int32: eight values of 4 bits each."""
    return torch.randint(-(1 << 31), 1 << 31, shape).to(torch.int32)


def _scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape) * 0.02 + 0.03


_GROUP = 32
"""Inputs that share a scale."""


def _gptq(out: int, width: int) -> dict[str, torch.Tensor]:
    zeros = torch.full((width // _GROUP, out // 8), 0x77777777, dtype=torch.int32)
    groups = torch.arange(width, dtype=torch.int32) // _GROUP
    scales = _scales(width // _GROUP, out).half()
    return {"qweight": _words(width // 8, out), "qzeros": zeros, "scales": scales, "g_idx": groups}


def _awq(out: int, width: int) -> dict[str, torch.Tensor]:
    zeros = torch.full((width // _GROUP, out // 8), 0x77777777, dtype=torch.int32)
    return {
        "qweight": _words(width, out // 8),
        "qzeros": zeros,
        "scales": _scales(width // _GROUP, out).half(),
    }


def _w4a16(out: int, width: int) -> dict[str, torch.Tensor]:
    scales, shape = _scales(out, width // _GROUP), torch.tensor([out, width])
    return {"weight_packed": _words(out, width // 8), "weight_scale": scales, "weight_shape": shape}


def _w8a8(out: int, width: int) -> dict[str, torch.Tensor]:
    values = torch.randint(-127, 128, (out, width)).to(torch.int8)
    return {"weight": values, "weight_scale": _scales(out, 1) / 16}


def _fp8(out: int, width: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.randn(out, width).to(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.2)}


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    how = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return {**how, "config_groups": {"group_0": {**group, "input_activations": inputs}}}


_BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_4_BITS = {"bits": 4, "group_size": _GROUP}
PACKINGS: dict[str, tuple[Callable[[int, int], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "gptq": (_gptq, {"quant_method": "gptq", **_4_BITS, "desc_act": False, "sym": True}),
    "awq": (_awq, {"quant_method": "awq", **_4_BITS, "zero_point": True, "version": "gemm"}),
    "w4a16": (
        _w4a16,
        _compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": _GROUP}, None),
    ),
    "w8a8": (_w8a8, _compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}, _BY_TOKEN)),
    "fp8": (_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
}
"""By kind: a function that makes a matrix `[out, width]`, and the entry in the model's configuration."""


def pack(folder: Path, kind: str) -> None:
    """Replace a checkpoint's matrices by random ones in a quantised form of `PACKINGS`."""
    tensors, (make_of, told) = load_file(folder / "model.safetensors"), PACKINGS[kind]
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        base, _, last = name.rpartition(".")
        if base.endswith("_proj") and last == "weight":
            packed |= {f"{base}.{part}": value for part, value in make_of(*tensor.shape).items()}
        else:
            packed[name] = tensor
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": told}))
