"""Writes the trained network as a Hugging Face folder: config.json, generation_config.json,
model.safetensors.

`python -m models.train_tiny_chat.export --checkpoint runs/tiny_chat/tiny_chat.pt` exports a checkpoint of
a running training.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from models.train_tiny_chat.chat import BOS, END, PAD
from models.train_tiny_chat.model import Shape, TinyLlama


def export_model(model: TinyLlama, tokenizer: Tokenizer, out: Path) -> None:
    """Weights in bfloat16; the head is tied to the embedding and therefore not stored."""
    ids = {
        f"{name}_token_id": tokenizer.token_to_id(t) for name, t in (("pad", PAD), ("bos", BOS), ("eos", END))
    }
    shape = asdict(model.shape)
    theta = shape.pop("rope_theta")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "dtype": "bfloat16",
        **ids,
    }
    generation = {**ids, "do_sample": True, "temperature": 0.7, "top_p": 0.95, "max_new_tokens": 400}
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    weights = {
        name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    save_file(weights, out / "model.safetensors.part", metadata={"format": "pt"})
    (out / "model.safetensors.part").chmod(0o644)
    (out / "model.safetensors.part").rename(out / "model.safetensors")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("models/tiny_chat"))
    args = parser.parse_args()
    model = TinyLlama(Shape(), seed=0)
    model.load_state_dict(torch.load(args.checkpoint, map_location="cpu")["model"])
    export_model(model, Tokenizer.from_file(str(args.out / "tokenizer.json")), args.out)


if __name__ == "__main__":
    main()
