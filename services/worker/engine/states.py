"""Hidden states handed out while answers are written: means of one middle layer's output over packed rows.

Whoever predicts how long answers become learns from them (TRAIL, arXiv 2410.01035: middle layers tell most).
Of a prompt the mean over its last chunk, of an answer the latest token's. Knows rows; no sequence, no length.
"""

from collections.abc import Sequence

import torch

from services.worker.core.sampling import Sampled
from services.worker.engine.contract import Row


class StateTap:
    """Filled by the forward pass of a step in which `begin` wanted some."""

    def __init__(self, layer: int, width: int, every_tokens: int) -> None:
        """After `layer` (from 0) of a model `width` wide; with an answer's first token and every
        `every_tokens` after."""
        self.layer, self._width, self._every = layer, width, every_tokens
        self.count = 0
        self.spans = torch.empty(0, 2, dtype=torch.int64)
        """`[count, 2]`: first packed row, and how many."""
        self.states = torch.empty(0, width)
        """fp32 `[count, width]`."""
        self.is_filled = False
        self._rows: list[int] = []

    def begin(self, rows: Sequence[Row]) -> None:
        """The step's rows, in the order in which they are packed."""
        self._rows.clear()
        spans, at = [], 0
        for index, row in enumerate(rows):
            count, point = len(row.tokens), row.point
            if point is not None and point.index >= 0 and point.index % self._every == 0:
                self._rows.append(index)
                spans.append((at, count))
            at += count
        self.count, self.is_filled = len(spans), False
        if spans:
            self.spans = torch.tensor(spans, dtype=torch.int64)
            self.states = torch.empty(len(spans), self._width)

    def take(self, hidden: torch.Tensor) -> None:
        """The layer's output `[packed rows, width]`, of any dtype."""
        for index in range(self.count):
            first, count = self.spans[index].tolist()
            self.states[index] = hidden[first : first + count].float().mean(0)
        self.is_filled = True

    def attach(self, sampled: list[Sampled | None]) -> None:
        """To the tokens of the rows that `begin` was told of: fp16 bytes."""
        if not (self.count and self.is_filled):
            return
        packed = self.states.to(torch.float16).numpy()
        for index, row in enumerate(self._rows):
            token = sampled[row]
            if token is not None and token.token >= 0:
                sampled[row] = token._replace(state=packed[index].tobytes())


def tap_of(config: object, every_tokens: int) -> StateTap | None:
    """Of the middle layer of a model with this (text) configuration; None where nobody wants any."""
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    return StateTap((layers - 1) // 2, width, every_tokens) if every_tokens and layers and width else None
