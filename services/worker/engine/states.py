"""Captures hidden states of a middle layer for the predictor of answer lengths.

A state is the mean over the last prompt chunk, or that of an answer's latest token. Source: TRAIL
(2410.01035)."""

from collections.abc import Sequence

import torch

from services.worker.core.sampling import Sampled
from services.worker.engine.contract import Row


class StateTap:
    """Buffer for the hidden states of a step, filled by the forward pass."""

    def __init__(self, layer: int, width: int, every_tokens: int) -> None:
        """Capture the output `[rows, width]` of `layer` (from 0) once in `every_tokens` answer tokens."""
        self.layer, self._width, self._every, self.count = layer, width, every_tokens, 0
        self.spans, self.states = torch.empty(0, 2, dtype=torch.int64), torch.empty(0, width)
        """`[count, 2]`: first packed row and number of rows; fp32 `[count, width]`."""
        self.is_filled = False
        self._rows: list[int] = []

    def begin(self, rows: Sequence[Row]) -> None:
        """Choose the rows to capture; `rows` are in packed order."""
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
        """Store the means of the layer's output `[packed rows, width]`, of any dtype."""
        for index in range(self.count):
            first, count = self.spans[index].tolist()
            self.states[index] = hidden[first : first + count].float().mean(0)
        self.is_filled = True

    def attach(self, sampled: list[Sampled | None]) -> list[Sampled | None]:
        """Attach the states, as fp16 bytes, to the sampled tokens of the captured rows."""
        if not (self.count and self.is_filled):
            return sampled
        packed = self.states.to(torch.float16).numpy()
        for index, row in enumerate(self._rows):
            token = sampled[row]
            if token is not None and token.token >= 0:
                sampled[row] = token._replace(state=packed[index].tobytes())
        return sampled


def tap_of(config: object, every_tokens: int) -> StateTap | None:
    """Return a tap of the middle layer for a text configuration; None if `every_tokens` is 0."""
    layers, width = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    return StateTap((layers - 1) // 2, width, every_tokens) if every_tokens and layers and width else None
