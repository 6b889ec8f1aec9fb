"""What the engine asks of whoever attends to blocks that other workers hold. Knows no connection."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from services.worker.engine.paged import Shape
from services.worker.engine.partition import Part
from shared.average import averaged
from shared.clock import Clock, monotonic_s

Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Rows, int64 `[n]`; output `[n, q_heads, value_dim]` and log-sum-exp `[n, q_heads]`, fp32."""


class RemoteAttention(Protocol):
    """The creditors' share of a step, layer by layer. Each call may raise `CreditorLost`."""

    def begin(self, parts: Sequence[Part]) -> None:
        """A step of these parts follows."""
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
        self._remote = remote
        self._clock = clock
        self._blocks = 0
        self._spent_s = 0.0

    def begin(self, parts: Sequence[Part]) -> None:
        """See `RemoteAttention`."""
        began_s = self._clock()
        is_decoding = all(len(part.rows) == len(part.spans.first_row) - 1 for part in parts)
        self._blocks = sum(len(part.spans.blocks) for part in parts) if is_decoding else 0
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
        if self._blocks:
            measured_s = self._spent_s / self._blocks
            self.block_s = averaged(self.block_s or None, measured_s, WEIGHT)

    def abandon(self) -> None:
        """See `RemoteAttention`."""
        self._remote.abandon()
