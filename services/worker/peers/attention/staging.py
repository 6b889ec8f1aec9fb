"""Staging: memory for fetched blocks of one layer, and a part of a step cut into pieces that fit it.

The memory has two halves: attention reads one while the other fills, and all layers share both. With 2 blocks
in each half, a part with a table of 5 blocks, the last of which this step makes:

    segments:  [0 1]     [2 3]     [4]
    fetched:    0 1       2 3       none: this step makes every key of block 4
    staged in:  half 0    half 1    half 0

Knows a part's arrays and shapes; no creditor, no link.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.attention import PagedAttention
from services.worker.engine.backends import PartialBackend, Pools
from services.worker.engine.partition import ELSEWHERE
from services.worker.engine.spans import PackedSpans


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive blocks of a part's tables in the staging, the fetched ones first."""

    fetched: npt.NDArray[np.int32]
    """Indices of the part's blocks to fetch, in staging order."""
    spans: PackedSpans
    """The part, with tables and slots in the staging."""


def cut(spans: PackedSpans, block_tokens: int, most_blocks: int, *, refetch: bool = False) -> list[Segment]:
    """Cut a part into segments of at most `most_blocks`. `refetch`: fetch this step's own blocks too."""
    total = len(spans.blocks)
    of_block = {int(block): index for index, block in enumerate(spans.blocks)}
    kept = spans.slots != ELSEWHERE
    home = np.full(len(spans.slots), ELSEWHERE, dtype=np.int64)
    home[kept] = [of_block[int(slot) // block_tokens] for slot in spans.slots[kept]]
    offset = spans.slots % block_tokens
    is_fresh = np.zeros(total, dtype=bool)
    if not refetch:
        is_fresh[home[kept & (offset == 0)]] = True
    start, blocks = spans.table_start, -(-spans.key_end // block_tokens)

    def segment(first: int, end: int) -> Segment:
        inside = np.arange(first, end, dtype=np.int32)
        fetched = inside[~is_fresh[first:end]]
        staged = np.empty(end - first, dtype=np.int32)
        staged[np.concatenate([fetched, inside[is_fresh[first:end]]]) - first] = inside - first
        low, high = np.maximum(start, first), np.minimum(start + blocks, end)
        is_seen, there = high > low, (home >= first) & (home < end)
        slots = np.full(len(home), ELSEWHERE, dtype=np.int64)
        slots[there] = staged[home[there] - first].astype(np.int64) * block_tokens + offset[there]
        key_end = np.where(is_seen, np.minimum(spans.key_end, (high - start) * block_tokens), 0)
        placed = replace(
            spans,
            table_start=np.where(is_seen, low - first, 0).astype(np.int32),
            table_position=np.where(is_seen, (low - start) * block_tokens, 0).astype(np.int32),
            key_end=key_end.astype(np.int32),
            blocks=staged,
            slots=slots,
        )
        return Segment(fetched, placed)

    return [segment(first, min(first + most_blocks, total)) for first in range(0, total, most_blocks)]


def pairs(spans: PackedSpans) -> int:
    """Return the number of pairs of a row and a key that it sees."""
    rows = np.diff(spans.first_row).astype(np.int64)
    first, end = spans.first_position.astype(np.int64) + 1, spans.key_end.astype(np.int64)
    if spans.window_tokens:  # Each row is a span.
        return int((np.minimum(first, end) - np.maximum(0, first - spans.window_tokens)).clip(0).sum())
    rising = np.minimum(rows, np.maximum(0, end - first))
    return int((rising * first + rising * (rising - 1) // 2 + (rows - rising) * end).clip(0).sum())


HALVES = 2


class Staging:
    """Memory for `blocks` in each half, large enough for the largest layer."""

    def __init__(self, attention: PagedAttention, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"staging of {blocks} blocks holds nothing")
        self.blocks = blocks
        shapes = [(k.shape[1:], v.shape[1:]) for k, v in attention.pools]
        dtype = attention.pools[0][0].dtype
        widest = max(math.prod(k) + math.prod(v) for k, v in shapes)
        self.nbytes = HALVES * blocks * widest * dtype.itemsize
        self.pools: list[list[Pools]] = []
        """By half and layer. All layers of a half share its memory."""
        self.backends: list[PartialBackend] = []
        for _ in range(HALVES):
            memory = torch.zeros(blocks * widest, dtype=dtype)
            pools = [_view(memory, blocks, k, v) for k, v in shapes]
            self.pools.append(pools)
            self.backends.append(attention.partial_backend(pools))


def _view(memory: torch.Tensor, blocks: int, k_shape: Sequence[int], v_shape: Sequence[int]) -> Pools:
    k_size, v_size = blocks * math.prod(k_shape), blocks * math.prod(v_shape)
    return memory[:k_size].view(blocks, *k_shape), memory[k_size : k_size + v_size].view(blocks, *v_shape)
