"""Writes GGUF files as their specification says, independent of the code that reads them."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}
_CONTROL, _NORMAL = 3, 1
Array = np.ndarray[Any, Any]


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str | int, Array]]
) -> Path:
    """Write a file. A tensor is its type and fp32 values, whose blocks are made here."""
    table, data = b"", b""
    for name, (kind, values) in tensors.items():
        number = KINDS[kind] if isinstance(kind, str) else kind
        shape = values.shape[::-1]
        data += bytes(-len(data) % 32)
        table += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, len(data))
        data += quantised(kind, values) if isinstance(kind, str) else values.tobytes()
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    head += b"".join(_text(name) + _typed(value) for name, value in metadata.items()) + table
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def of_folder(path: Path, folder: Path, kind: str = "F32", **more: Any) -> Path:
    """Write a Llama's folder as a file with all matrices of one type; `more` replaces metadata, dots as two
    underscores."""
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors: dict[str, tuple[str | int, Array]] = {}
    with safe_open(str(folder / "model.safetensors"), "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - no mapping
            values = opened.get_tensor(name).float().numpy()
            part = name.split(".")[-2]
            if part in heads:  # llama.cpp rotates adjacent pairs
                split = values.reshape(heads[part], 2, -1, values.shape[1])
                values = split.swapaxes(1, 2).reshape(values.shape)
            tensors[_own_name(name)] = (kind if values.ndim > 1 else "F32", values)
    said = llama_metadata(folder) | {name.replace("__", "."): value for name, value in more.items()}
    return write_gguf(path, {name: value for name, value in said.items() if value is not None}, tensors)


def llama_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of a Llama's folder with a byte-level tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = {number: token for token, number in tokenizer["model"]["vocab"].items()} | special
    merges = [each if isinstance(each, str) else " ".join(each) for each in tokenizer["model"]["merges"]]
    return {
        "general.architecture": "llama",
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [tokens[number] for number in range(len(tokens))],
        "tokenizer.ggml.token_type": [
            _CONTROL if number in special else _NORMAL for number in range(len(tokens))
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": json.loads((folder / "tokenizer_config.json").read_text())[
            "chat_template"
        ],
    }


def quantised(kind: str, values: Array) -> bytes:
    """Return the blocks of fp32 values; of a kind in super-blocks of 256, ones drawn by their bits."""
    if kind in ("F32", "F16"):
        return values.astype("<f4" if kind == "F32" else "<f2").tobytes()
    if kind in ("Q4_K", "Q6_K"):
        dice, count = np.random.default_rng(values.size), values.size // 256
        drawn = dice.integers(0, 256, (count, 144 if kind == "Q4_K" else 210), np.uint8)
        halves = (dice.random((count, 2)) * 2e-3).astype("<f2").view(np.uint8)
        if kind == "Q4_K":
            drawn[:, :4] = halves
        else:
            drawn[:, -2:] = halves[:, :2]
        return drawn.tobytes()
    blocks = values.reshape(-1, 32)
    low, high = blocks.min(1, keepdims=True), blocks.max(1, keepdims=True)
    widest = np.abs(blocks).max(1, keepdims=True)
    if kind == "Q8_0":
        scale = _half(widest / 127)
        return _joined(
            scale, np.rint(blocks * _inverse(scale)).clip(-127, 127).astype(np.int8).view(np.uint8)
        )
    bits = int(kind[1])
    most = (1 << bits) - 1
    if kind.endswith("_0"):
        scale = _half(widest / (1 << (bits - 1)))
        numbers = (np.rint(blocks * _inverse(scale)) + (1 << (bits - 1))).clip(0, most).astype(np.uint8)
        head = [scale]
    else:
        scale, least = _half((high - low) / most), _half(low)
        numbers = np.rint((blocks - least.astype("<f4")) * _inverse(scale)).clip(0, most).astype(np.uint8)
        head = [scale, least]
    nibbles = (numbers[:, :16] & 15) | ((numbers[:, 16:] & 15) << 4)
    fifth = [np.packbits(numbers >> 4, axis=1, bitorder="little")] if bits == 5 else []
    return _joined(*head, *fifth, nibbles)


def _own_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    leaves = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    stem = name.removesuffix(".weight")
    return (
        f"{top[stem]}.weight"
        if stem in top
        else f"blk.{stem.split('.')[2]}.{leaves[stem.split('.')[-1]]}.weight"
    )


def _half(values: Array) -> Array:
    return values.astype("<f2")


def _inverse(scale: Array) -> Array:
    wide = scale.astype("<f4")
    return np.where(wide == 0, 0, 1 / np.where(wide == 0, 1, wide)).astype("<f4")


def _joined(*parts: Array) -> bytes:
    return np.concatenate([part.view(np.uint8).reshape(len(part), -1) for part in parts], 1).tobytes()


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        kind, packed = (8, b"".join(map(_text, value))) if isinstance(value[0], str) else (
            5, struct.pack(f"<{len(value)}i", *value))  # fmt: skip
        return struct.pack("<IIQ", 9, kind, len(value)) + packed
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    return struct.pack("<IQ", 10, value) if isinstance(value, int) else struct.pack("<If", 6, value)
