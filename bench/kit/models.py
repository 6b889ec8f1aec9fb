"""Checkpoints of the engine bench: a folder, or a Llama with random weights that is generated once.

`random-100m` is a small Llama (16 layers of 768, 12 heads on 4 of KV, 104 M parameters) with the bundled
tokenizer. `random-50m` is narrower (16 layers of 512, 8 heads on 1). `random-1b` has the layers of
Llama-3.2-1B (973 M parameters, bfloat16), for a GPU. `random-qwen-0.5b` has Qwen2.5-0.5B's shape. Answers are
noise; matrix products cost the same as trained ones.
"""

import shutil
from pathlib import Path
from random import Random
from typing import Any

from bench.kit.provenance import ROOT
from shared.errors import ConfigError
from shared.gguf_files import is_gguf
from shared.model_files import read_json
from shared.tokenizer_files import model_folder

TINY_CHAT = ROOT / "models" / "tiny_chat"
CACHE = ROOT / ".cache" / "bench"
"""Folder of generated checkpoints and converted weights."""
RANDOM_SHAPES: dict[str, dict[str, Any]] = {
    "random-100m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    "random-50m": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
    "random-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "random-qwen-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
_LARGE = 1024
"""Smallest hidden size of a bfloat16 checkpoint."""
_FIRST_TOKEN = 100
"""Lower ids are special tokens or single bytes."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def checkpoint(name: str, cache: Path = CACHE) -> Path:
    """Return the folder of a checkpoint; a random one is generated if missing. Raises ConfigError."""
    if name in RANDOM_SHAPES:
        folder = cache / name
        if not (folder / "model.safetensors").exists():
            _make(folder, RANDOM_SHAPES[name])
        return folder
    folder = Path(name)
    if is_gguf(name) and folder.is_file():
        return folder.resolve()
    if not (folder / "config.json").exists():
        known = ", ".join(RANDOM_SHAPES)
        raise ConfigError(f"{name} is no folder with a config.json, and none of {known}", param="model")
    return folder.resolve()


def plain_folder(model: Path, cache: Path = CACHE) -> Path:
    """Return a GGUF file's model as a folder in fp32, which other servers read; a folder as it is."""
    folder = cache / model.stem
    if not is_gguf(str(model)):
        return model
    if not (folder / "model.safetensors").exists():
        import torch

        from services.worker.engine.gguf_weights import GgufWeights, empty_module, fill
        from services.worker.engine.progress import LoadProgress

        source = model_folder(str(model))
        module = empty_module(source, torch.float32)
        fill(module, GgufWeights(model, module.config), LoadProgress(), vectors_only=False)
        shutil.copytree(source, folder, dirs_exist_ok=True)
        module.save_pretrained(folder)
    return folder


def vocabulary(folder: Path) -> int:
    """Return the size of the vocabulary of a folder or GGUF file."""
    config = read_json(model_folder(str(folder)) / "config.json")
    return int(config["vocab_size"])


def drawn_tokens(dice: Random, vocabulary_: int, count: int) -> list[int]:
    """Return `count` random token ids without special tokens."""
    return [dice.randrange(_FIRST_TOKEN, vocabulary_ - 1) for _ in range(count)]


def _make(folder: Path, shape: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {"model_type": "llama", "vocab_size": vocabulary(TINY_CHAT)}
    common |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True}
    config = AutoConfig.for_model(**common | {"max_position_embeddings": 4096} | shape)
    folder.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # float32
    if config.hidden_size >= _LARGE:
        model = model.bfloat16()
    model.save_pretrained(folder, max_shard_size="10GB")
    for file in _TOKENIZER_FILES:
        shutil.copyfile(TINY_CHAT / file, folder / file)
