"""Attention over keys at creditors, layer by layer, and merging of its results; see `partition`."""

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
    """The creditors' parts of a step, layer by layer. Each call may raise `CreditorLost`."""

    def begin(self, parts: Sequence[Part]) -> None:
        """Begin a step; each layer uses the parts of its own window."""
        ...

    def send(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: Shape
    ) -> None:
        """Send each creditor its rows of `[rows, heads, dim]` tensors, which have all rows of the step."""
        ...

    def collect(self, layer: int) -> Iterator[Partial]:
        """Yield the creditors' results. The caller computes its own part before this call."""
        ...

    def end(self) -> None:
        """End the step: return when all K and V are written."""
        ...

    def abandon(self) -> None:
        """End a failed step: on return nothing of it is in progress."""
        ...


WEIGHT = 0.1
"""Weight of the newest step in averages."""


class MeteredRemote:
    """Wrapper of a `RemoteAttention` that measures its time. Any thread may read the attributes."""

    def __init__(self, remote: RemoteAttention, clock: Clock = monotonic_s) -> None:
        self.block_s = 0.0
        """Extra seconds of a decode step per remote block in use, smoothed; 0 before the first."""
        self.total_s = 0.0
        """Total seconds of all completed steps."""
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
        """See `RemoteAttention`. The caller's time between two parts is not counted."""
        parts = self._remote.collect(layer)
        while True:
            began_s = self._clock()
            part = next(parts, None)
            self._spent_s += self._clock() - began_s
            if part is None:
                return
            yield part

    def end(self) -> None:
        """See `RemoteAttention`. A failed step is not counted."""
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
    """Return whether the part has one row of each sequence."""
    one_each = len(part.rows) == len(part.spans.first_row) - 1
    return one_each and bool((np.diff(part.spans.table_start) > 0).all())


_POINTER, _INT32 = ctypes.c_void_p, ctypes.c_int32
_PROTOTYPES = {
    "kv_merge": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _INT32, _INT32, _INT32)),
}


def merge_partials(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge one or more parts that have the same rows.

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
    """Merge a part that only some rows have, in place; in C++ with `library`.

    `output` `[rows, heads, value_dim]`, `lse` `[rows, heads]`; `part` `[n, heads, value_dim]`, `part_lse`
    `[n, heads]` of `rows`, int64 `[n]`, all different. Tensors are fp32.
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
