"""`python -m shared.gguf_unpack FILE FOLDER`: write the configuration and the tokenizer of a GGUF file in the
format of Hugging Face. transformers reads the tokenizer."""

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.gguf_files import WEIGHTS, GgufHeader, read_header

_SHAPE = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_FAMILIES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
"""Model type and class, by architecture."""
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
"""Kinds of byte-level splitting in which every digit is a token."""
_PLAIN = ("default", "gpt-2", "gpt2", "")
_TOKENS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def unpack(file: Path, folder: Path) -> None:
    """Write `folder`, all or nothing. Raise ConfigError."""
    header = read_header(file)
    config = model_config(file, header)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".unpacking-") as scratch:
        part = Path(scratch, "part")
        part.mkdir()
        _write_tokenizer(file, header, part)
        ends = [header.metadata.get(f"tokenizer.ggml.{name}") for name in _ENDS]
        generation = {"eos_token_id": sorted({end for end in ends if isinstance(end, int)})}
        for name, content in (("config.json", config), ("generation_config.json", generation)):
            (part / name).write_text(json.dumps(content, indent=1))
        (part / WEIGHTS).symlink_to(file)
        if folder.is_dir():
            shutil.rmtree(folder)
        part.rename(folder)


def model_config(file: Path, header: GgufHeader) -> dict[str, Any]:
    """Return the model's configuration as transformers writes it. Raise ConfigError."""
    said, architecture = header.metadata, str(header.metadata.get("general.architecture"))
    if architecture not in _FAMILIES or f"{architecture}.expert_count" in said:
        kind = f"{architecture} with experts" if architecture in _FAMILIES else architecture
        text = f"{file} has the architecture {kind}, and GGUF files are read of {', '.join(_FAMILIES)}: "
        raise ConfigError(f"{text}serve the model's folder of safetensors instead", param="model")
    kind, class_name = _FAMILIES[architecture]
    names = {f"{architecture}.{name}": own for name, own in _SHAPE.items()}
    config = {own: said[name] for name, own in names.items() if name in said}
    if "num_attention_heads" not in config or "hidden_size" not in config:
        raise ConfigError(f"{file} does not state the shape of its model: convert it again", param="model")
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = said.get(f"tokenizer.ggml.{name}_token_id")
    return config | {
        "model_type": kind,
        "architectures": [class_name],
        "vocab_size": len(said.get("tokenizer.ggml.tokens", ())),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": "float32",
        "rope_parameters": _rotation(file, header, architecture, config),
    }


def _rotation(file: Path, header: GgufHeader, architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    said = header.metadata
    base = float(said.get(f"{architecture}.rope.freq_base", 10000.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    if factor := said.get(f"{architecture}.rope.scaling.factor"):
        kind = said.get(f"{architecture}.rope.scaling.type", "linear")
        if kind != "linear":
            raise ConfigError(f"{file} scales its positions by {kind}, and linear is known", param="model")
        rope |= {"rope_type": "linear", "factor": float(factor)}
    if "rope_factors_long.weight" in header.tensors:
        text = f"{file} scales positions of long texts, which is not read from GGUF files: "
        raise ConfigError(f"{text}serve the model's folder of safetensors instead", param="model")
    if tensor := header.tensors.get("rope_freqs.weight"):
        import numpy

        factors = numpy.fromfile(file, "<f4", tensor.size // 4, offset=tensor.start)
        rope |= {"rope_type": "llama3", "factor": float(factors.max())}
        # As Llama 3.1's, whose other numbers are always these.
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if architecture == "gemma3":
        local = float(said.get("gemma3.rope.freq_base_swa", 10000.0))
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}
    dimensions = said.get(f"{architecture}.rope.dimension_count", config["head_dim"])
    if dimensions != config["head_dim"]:
        rope["partial_rotary_factor"] = dimensions / config["head_dim"]
    return rope


def _write_tokenizer(file: Path, header: GgufHeader, folder: Path) -> None:
    from tokenizers import pre_tokenizers, processors
    from transformers.integrations.gguf import gguf_tokenizer_mapping as reader

    said = header.metadata
    kind, split = said.get("tokenizer.ggml.model"), said.get("tokenizer.ggml.pre", "")
    known = {*reader.GGUF_PRE_TOKENIZER_SPLITS, *_SINGLE_DIGITS, *_PLAIN}
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and split not in known):
        named = f"{kind}, {split}" if split else str(kind)
        text = (
            f"{file} has a tokenizer that is not known ({named}): serve the model's folder of safetensors, "
        )
        raise ConfigError(f"{text}whose tokenizer.json states all of it", param="model")
    try:
        architecture, parts, config = reader.get_gguf_tokenizer(str(file))
        tokenizer, _ = reader.convert_gguf_tokenizer(architecture, parts)
    except Exception as error:  # converters may raise anything
        raise ConfigError(f"{file} has a tokenizer that cannot be read: {error}", param="model") from None
    if kind == "gpt2" and split in _SINGLE_DIGITS:
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokens = said["tokenizer.ggml.tokens"]
    special = {
        name: tokens[said[f"tokenizer.ggml.{own}"]]
        for name, own in _TOKENS.items()
        if f"tokenizer.ggml.{own}" in said
    }
    if config.get("add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        pair = [(bos, said["tokenizer.ggml.bos_token_id"])]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=pair)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = file.with_suffix(".jinja")
    chat = template.read_text("utf-8") if template.is_file() else said.get("tokenizer.chat_template")
    written = special | ({"chat_template": chat} if chat else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(written, indent=1))


def main(words: list[str]) -> int:
    """Return the exit code; the last line of an error says why."""
    try:
        unpack(Path(words[0]), Path(words[1]))
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
