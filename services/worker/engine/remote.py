"""Attention to keys that others hold, layer by layer, and the joining of what comes back.

See `partition` for the parts of a step. Knows no connection and no sequence.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from services.worker.engine import paged
from services.worker.engine.native.library import declare
from services.worker.engine.paged import Shape
from services.worker.engine.partition import Part
from shared.average import averaged
from shared.clock import Clock, monotonic_s

Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows, int64 `[n]`; output `[n, q_heads, value_dim]` and log-sum-exp `[n, q_heads]`, fp32."""


class RemoteAttention(Protocol):
    """The creditors' share of a step, layer by layer. Each call may raise `CreditorLost`."""

    def begin(self, parts: Sequence[Part]) -> None:
        """A step of these parts follows: a layer asks for those of its own window."""
        ...

    def send(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape
    ) -> None:
        """`[rows, heads, dim]` of all packed rows of the step: each creditor gets what it needs."""
        ...

    def collect(self, layer: int) -> Iterator[Partial]:
        """What the creditors found. While they work on it, the caller has attended to its own part."""
        ...

    def end(self) -> None:
        """Every layer is through: return when all K and V are where they belong."""
        ...

    def abandon(self) -> None:
        """The step failed and is not gone on with: nothing of it may be under way when the next begins."""
        ...


WEIGHT = 0.1
"""Of the newest step."""


class MeteredRemote:
    """`RemoteAttention` over another one. `block_s`: see there; read from whatever thread."""

    def __init__(self, remote: RemoteAttention, clock: Clock = monotonic_s) -> None:
        self.block_s = 0.0
        """A decode step takes so much longer for each block in use that lies elsewhere. Smoothed; 0 before
        the first."""
        self.total_s = 0.0
        """Of all steps that ended."""
        self._remote = remote
        self._clock = clock
        self._blocks = 0
        self._spent_s = 0.0

    def begin(self, parts: Sequence[Part]) -> None:
        """See `RemoteAttention`."""
        began_s = self._clock()
        of_a_layer = [part for part in parts if part.spans.window_tokens == parts[0].spans.window_tokens]
        is_decoding = all(_is_decoding(part) for part in of_a_layer)
        self._blocks = sum(len(part.spans.blocks) for part in of_a_layer) if is_decoding else 0
        self._remote.begin(parts)
        self._spent_s = self._clock() - began_s

    def send(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape
    ) -> None:
        """See `RemoteAttention`."""
        began_s = self._clock()
        self._remote.send(layer, queries, keys, values, shape)
        self._spent_s += self._clock() - began_s

    def collect(self, layer: int) -> Iterator[Partial]:
        """See `RemoteAttention`. What the caller does with a part is its own time."""
        parts = self._remote.collect(layer)
        while True:
            began_s = self._clock()
            part = next(parts, None)
            self._spent_s += self._clock() - began_s
            if part is None:
                return
            yield part

    def end(self) -> None:
        """See `RemoteAttention`. A step that failed before is not counted."""
        began_s = self._clock()
        self._remote.end()
        self._spent_s += self._clock() - began_s
        self.total_s += self._spent_s
        if self._blocks:
            measured_s = self._spent_s / self._blocks
            self.block_s = averaged(self.block_s or None, measured_s, WEIGHT)

    def abandon(self) -> None:
        """See `RemoteAttention`."""
        self._remote.abandon()


def _is_decoding(part: Part) -> bool:
    """One row of each sequence."""
    one_each = len(part.rows) == len(part.spans.first_row) - 1
    return one_each and bool((np.diff(part.spans.table_start) > 0).all())


_POINTER, _INT32 = ctypes.c_void_p, ctypes.c_int32
_PROTOTYPES = {
    "kv_merge": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT32, _INT32, _INT32)),
}


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
        declare(library, _PROTOTYPES)
        count, heads, value_dim = part.shape
        library.kv_merge(
            output.data_ptr(),
            lse.data_ptr(),
            part.data_ptr(),
            part_lse.data_ptr(),
            rows.data_ptr(),
            count,
            heads,
            value_dim,
        )
        return
    joined, joined_lse = merge_partials((output[rows], part), (lse[rows], part_lse))
    output[rows], lse[rows] = joined, joined_lse
