"""Attention over a whole, from attention over its parts: exact within rounding, for any partition and order.

A part's result is its normalised output and its log-sum-exp, which is m + ln l of the paper's running maximum
and sum. Source: Infinite-LLM §4.2 (papers/001), with the values and the scale 1/√d that its equations leave
out. Knows tensors only.
"""

import ctypes
from collections.abc import Sequence

import torch

from services.worker.engine import paged
from services.worker.engine.native import merge as native


def merge_partials(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join parts that all have the same rows, at least one part.

    `outputs` each `[…, value_dim]`, `lses` each `[…]` fp32 (−inf: the part saw no key) → both fp32.
    """
    return paged.merge(torch.stack(list(outputs)), torch.stack(list(lses)))


def merge_into(
    output: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    rows: torch.Tensor,
    library: ctypes.CDLL | None = None,
) -> None:
    """Join a part that only some rows have, in place; in C++ where there is a library.

    `output` `[rows, heads, value_dim]`, `lse` `[rows, heads]`; `part` `[n, heads, value_dim]`, `part_lse`
    `[n, heads]` of the rows named by `rows`, int64 `[n]`, each once. All fp32.
    """
    if library is not None and output.is_contiguous() and part.is_contiguous() and part_lse.is_contiguous():
        native.merge_into(library, output, lse, part, part_lse, rows)
        return
    joined, joined_lse = merge_partials((output[rows], part), (lse[rows], part_lse))
    output[rows], lse[rows] = joined, joined_lse
