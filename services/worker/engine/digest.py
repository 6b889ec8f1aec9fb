"""A checkpoint's fingerprint: KV made with other weights must never pass for this one's."""

import zlib
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch

from services.worker.engine.attention import LayerShape


def weights_digest(module: Any) -> str:
    """Of every parameter and buffer, by name, shape and bytes (CRC-32: 4 GB/s). In hex."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(data)}\n".encode())
    return digest.hexdigest()


def layout_name(layers: Sequence[LayerShape]) -> str:
    """How a block's bytes lie, for the fingerprint."""
    shapes = ",".join(f"{layer.kv_heads}x{layer.head_dim}+{layer.value_dim}" for layer in layers)
    return f"K[head,dim,token]V[head,token,dim]:{shapes}"
