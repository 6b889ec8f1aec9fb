"""Weights of a GGUF file under transformers' names: values in fp32, or blocks as the file has them."""

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.integrations.gguf import dequant

from services.worker.engine.native.grouped import Grouped, of_blocks
from services.worker.engine.packed_weights import PackedWeights
from services.worker.engine.progress import LoadProgress
from shared.errors import ConfigError
from shared.gguf_files import BLOCKS, GgufTensor, read_header

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LEAVES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA_LEAVES = _LEAVES | {"post_attention_layernorm": "post_attention_norm"}
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_Q5 = (6, 7)


class GgufWeights:
    """The tensors of a file by transformers' names. The file stays mapped."""

    def __init__(self, file: Path, config: Any) -> None:
        self.file, self._config = file, config
        header = read_header(file)
        self._tensors: Mapping[str, GgufTensor] = header.tensors
        self._is_gemma = str(header.metadata["general.architecture"]).startswith("gemma")
        self._is_llama = header.metadata["general.architecture"] == "llama"
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE)  # torch takes no read-only memory
        self._data = torch.frombuffer(mapped, dtype=torch.uint8)

    @property
    def is_tied(self) -> bool:
        """Whether the table of embeddings is the head's, too."""
        return "output.weight" not in self._tensors

    def quantised(self) -> list[str]:
        """Return the types of quantised tensors, by name."""
        kinds = {tensor.kind for tensor in self._tensors.values()} - set(_PLAIN)
        return sorted(BLOCKS[kind][0] for kind in kinds)

    def matrix(self, name: str) -> Grouped | torch.Tensor:
        """Return a matrix in the file's bits, or in fp32 if no kernel has its type."""
        own, tensor = self._found(name)
        kind, weights, size = BLOCKS[tensor.kind]
        rows = self._bytes(tensor).view(tensor.shape[0], tensor.shape[-1] // weights * size)
        return of_blocks(kind, self._reordered(own, rows)) or self.values(name)

    def values(self, name: str) -> torch.Tensor:
        """Return a tensor in fp32."""
        own, tensor = self._found(name)
        data = self._bytes(tensor)
        if tensor.kind in _PLAIN:
            values = data.view(_PLAIN[tensor.kind]).float().view(tensor.shape)
        else:
            values = dequantised(tensor.kind, data).view(tensor.shape)
        if self._is_gemma and own.endswith("norm.weight"):
            values = values - 1
        return self._reordered(own, values)

    def _bytes(self, tensor: GgufTensor) -> torch.Tensor:
        return self._data[tensor.start : tensor.start + tensor.size]

    def _found(self, name: str) -> tuple[str, GgufTensor]:
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            own = _TOP[stem]
            own = "token_embd" if own == "output" and self.is_tied else own
        else:
            _, _, layer, part = stem.split(".", 3)
            own = f"blk.{layer}.{(_GEMMA_LEAVES if self._is_gemma else _LEAVES).get(part, part)}"
        own = f"{own}.{kind}"
        if own not in self._tensors:
            raise ConfigError(f"{self.file} lacks the tensor {own}: convert it again", param="model")
        return own, self._tensors[own]

    def _reordered(self, own: str, rows: torch.Tensor) -> torch.Tensor:
        """Undo llama.cpp's order of the rows of Q and K, whose rotated pairs are adjacent there."""
        kind = own.split(".")[-2]
        if not self._is_llama or kind not in ("attn_q", "attn_k"):
            return rows
        heads = self._config.num_attention_heads if kind == "attn_q" else self._config.num_key_value_heads
        split = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
        return split.transpose(1, 2).reshape(rows.shape)


def dequantised(kind: int, data: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of blocks, flat."""
    if kind in _Q5:  # transformers does not read these
        found = of_blocks(BLOCKS[kind][0], data.view(1, -1))
        assert found is not None
        return found.values().flatten()
    return dequant.dequantize(data, kind)


def empty_module(folder: Path, dtype: torch.dtype) -> Any:
    """Return the causal language model of a folder's configuration, its weights not set."""
    config: Any = AutoConfig.from_pretrained(str(folder))
    maker: Any = AutoModelForCausalLM
    config.quantization_config = None  # a folder's weights are read here
    with no_init_weights():
        module = maker.from_config(config, attn_implementation="eager", dtype=dtype)
    return module


def fill(
    module: Any, weights: GgufWeights | PackedWeights, progress: LoadProgress, *, vectors_only: bool
) -> None:
    """Set a module's weights, widened; with `vectors_only` no matrices, which take no memory then.

    Raise ConfigError."""
    named = dict(module.named_parameters())
    for done, (name, parameter) in enumerate(named.items()):
        progress.at(f"reads the weights: {100 * done // len(named)} %")
        if vectors_only and parameter.ndim > 1:
            parameter.data = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
            continue
        values = weights.values(name)
        if values.shape != parameter.shape:
            shapes = f"{tuple(values.shape)} and not {tuple(parameter.shape)}"
            raise ConfigError(f"{weights.file} has {name} as {shapes}: convert it again", param="model")
        parameter.data = values.to(parameter.dtype).clone()
