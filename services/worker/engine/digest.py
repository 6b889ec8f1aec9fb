"""A model's digest and KV's layout: KV made by another model must never pass for this one's."""

import json
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch

from services.worker.engine.attention import LayerShape

_SAYS_NOTHING_OF_KV = frozenset(
    {
        "architectures",  # the class is digested itself
        "bos_token_id",
        "dtype",  # the weights', which may be another than the file's, is in their digest
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Of a configuration, beside what begins with `_` (where it came from). Whatever is not known to be harmless
counts: a difference that changes no KV costs a miss, one that does and is overlooked a wrong answer."""


def configuration(module: Any) -> str:
    """What a transformers model computes by, defaults filled in, as JSON in one form: base and scaling of
    rotary positions, epsilons, windows, scales of scores and the rest."""
    return json.dumps(_canonical(module.config.to_dict()), sort_keys=True, default=str)


def model_digest(module: Any) -> str:
    """Of class, `configuration`, and every parameter and buffer by name, shape and bytes (CRC-32: 4 GB/s). In
    hex."""
    digest = blake2b(f"{type(module).__name__}\n{configuration(module)}\n".encode(), digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(data)}\n".encode())
    return digest.hexdigest()


def layout_name(layers: Sequence[LayerShape]) -> str:
    """How a block's bytes lie, for the fingerprint."""
    shapes = ",".join(f"{layer.kv_heads}x{layer.head_dim}+{layer.value_dim}" for layer in layers)
    return f"K[head,dim,token]V[head,token,dim]:{shapes}"


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        kept = ((str(name), each) for name, each in value.items())
        return {
            name: _canonical(each)
            for name, each in kept
            if not name.startswith("_") and name not in _SAYS_NOTHING_OF_KV
        }
    return [_canonical(each) for each in value] if isinstance(value, list | tuple) else value
