"""Convert a Llama or Qwen2 checkpoint to GGUF in F32: `python gguf_convert.py FOLDER FILE`, in llama.cpp's
environment.

It imports only gguf and numpy, which that environment has.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter, TokenType

Array = np.ndarray[Any, np.dtype[np.float32]]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(folder: Path, target: Path) -> None:
    """Write `target`. Raises KeyError for an unknown tensor."""
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(str(target), config["model_type"])
    _write_shape(writer, config)
    _write_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    if config["model_type"] != "llama":
        heads = {}
    for name, tensor in _tensors(folder / "model.safetensors"):
        own = _name(name)
        kind = own.split(".")[-2]
        writer.add_tensor(own, _interleaved(tensor, heads[kind]) if kind in heads else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0)


def _write_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    special = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    by_id = {number: token for token, number in tokenizer["model"]["vocab"].items()} | special
    size = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([by_id.get(number, f"<unused {number}>") for number in range(size)])
    writer.add_token_types(
        [
            TokenType.CONTROL
            if number in special
            else TokenType.NORMAL
            if number in by_id
            else TokenType.UNUSED
            for number in range(size)
        ]
    )
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _tensors(file: Path) -> Iterator[tuple[str, Array]]:
    """Yield every tensor in float32."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        data = opened.read()
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            wide = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
            tensor = wide.view(np.float32)
        else:
            tensor = np.frombuffer(raw, np.dtype({"F32": np.float32, "F16": np.float16}[entry["dtype"]]))
        yield name, tensor.astype(np.float32).reshape(entry["shape"])


def _name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _interleaved(weight: Array, heads: int) -> Array:
    """Interleave the rotary halves, because llama.cpp rotates adjacent pairs of a Llama."""
    rows, columns = weight.shape
    split = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows, columns))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
