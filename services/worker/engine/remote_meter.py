"""What attention over blocks of other workers costs a step: timed around whoever does it. Decides nothing.

Counted is the time in which the engine does nothing else: describing the step, sending queries, waiting for
answers. Steps with prompts in them say nothing about those that only decode, and are left out.
"""

from collections.abc import Iterator, Sequence

import torch

from services.worker.engine.paged import Shape
from services.worker.engine.partition import Part
from services.worker.engine.remote import Partial, RemoteAttention
from shared.clock import Clock, monotonic_s

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
            self.block_s = measured_s if not self.block_s else self._blend(measured_s)

    def abandon(self) -> None:
        """See `RemoteAttention`."""
        self._remote.abandon()

    def _blend(self, measured_s: float) -> float:
        return self.block_s + WEIGHT * (measured_s - self.block_s)
