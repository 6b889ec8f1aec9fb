"""What the engine asks of whoever attends to blocks that other workers hold. Knows no connection."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from services.worker.engine.paged import Shape
from services.worker.engine.partition import Part

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
