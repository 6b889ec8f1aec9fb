"""Memory for fetched blocks of one layer at a time: a fixed share, reused by every layer.

Two halves: one is attended to while the other fills. Knows shapes; no creditor, no block ids but its own.
"""

import math
from collections.abc import Sequence

import torch

from services.worker.engine.attention import PagedAttention
from services.worker.engine.backends import PartialBackend, Pools

HALVES = 2


class Staging:
    """`blocks` in each half, with room for the largest layer."""

    def __init__(self, attention: PagedAttention, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"staging of {blocks} blocks holds nothing")
        self.blocks = blocks
        shapes = [(k.shape[1:], v.shape[1:]) for k, v in attention.pools]
        dtype = attention.pools[0][0].dtype
        widest = max(math.prod(k) + math.prod(v) for k, v in shapes)
        self.nbytes = HALVES * blocks * widest * dtype.itemsize
        self.pools: list[list[Pools]] = []
        """Of each half, of each layer; all layers of a half are the same memory."""
        self.backends: list[PartialBackend] = []
        for _ in range(HALVES):
            memory = torch.zeros(blocks * widest, dtype=dtype)
            pools = [_view(memory, blocks, k, v) for k, v in shapes]
            self.pools.append(pools)
            self.backends.append(attention.partial_backend(pools))


def _view(memory: torch.Tensor, blocks: int, k_shape: Sequence[int], v_shape: Sequence[int]) -> Pools:
    k_size, v_size = blocks * math.prod(k_shape), blocks * math.prod(v_shape)
    return memory[:k_size].view(blocks, *k_shape), memory[k_size : k_size + v_size].view(blocks, *v_shape)
