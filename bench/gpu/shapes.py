"""The models whose shapes are measured. Knows no device."""

from dataclasses import dataclass

import torch

BLOCK_TOKENS = 16
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """Of a Llama model."""

    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128

    def kv_bytes(self, batch: int, context_tokens: int) -> int:
        """Of one layer: what one step's attention has to read."""
        return 2 * batch * context_tokens * self.kv_heads * self.head_dim * DTYPE.itemsize


MODELS = {
    "llama2_7b": Shape(32, 4096, 11008, 32, 32, 32000),
    "llama2_13b": Shape(40, 5120, 13824, 40, 40, 32000),
    "llama3_8b": Shape(32, 4096, 14336, 32, 8, 128256),
}
