"""Attention over keys at creditors, layer by layer, and merging of its results; see `partition`."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from services.worker.engine import paged
from services.worker.engine.partition import Part

Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows, int64 `[n]`; output `[n, q_heads, value_dim]` and log-sum-exp `[n, q_heads]`, fp32."""


class RemoteAttention(Protocol):
    """The creditors' parts of a step, layer by layer. Each call may raise `CreditorLost`."""

    def begin(self, parts: Sequence[Part]) -> None:
        """Begin a step; each layer uses the parts of its own window."""

    def send(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: paged.Shape
    ) -> None:
        """Send each creditor its rows of `[rows, heads, dim]` tensors, which have all rows of the step."""

    def collect(self, layer: int) -> Iterator[Partial]:
        """Yield the creditors' results. The caller computes its own part before this call."""

    def end(self) -> None:
        """End the step: return when all K and V are written."""

    def abandon(self) -> None:
        """End a failed step: on return nothing of it is in progress."""


def decode_blocks(parts: Sequence[Part]) -> int:
    """Return the blocks in the parts of one layer; 0 if a part has several rows of one sequence."""
    parts = [part for part in parts if part.spans.window_tokens == parts[0].spans.window_tokens]
    for part in parts:
        tables = part.spans.table_start
        if len(part.rows) != len(tables) or not bool((np.diff(tables) > 0).all()):
            return 0
    return sum(len(part.spans.blocks) for part in parts)


def merge_into(
    output: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    rows: torch.Tensor,
    library: ctypes.CDLL | None = None,
) -> None:
    """Merge a part that only some rows have, in place; in C++ with `library`. Tensors are fp32.

    `output` `[rows, heads, value_dim]`, `lse` `[rows, heads]`; `part` `[n, heads, value_dim]`, `part_lse`
    `[n, heads]` of `rows`, int64 `[n]`, all different."""
    if library is not None and output.is_contiguous() and part.is_contiguous() and part_lse.is_contiguous():
        tensors = (output, lse, part, part_lse, rows)
        library.kv_merge(*(each.data_ptr() for each in tensors), *part.shape)
        return
    merged = paged.merge(torch.stack((output[rows], part)), torch.stack((lse[rows], part_lse)))
    output[rows], lse[rows] = merged
