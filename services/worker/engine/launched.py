"""A step that a device computes while the engine's thread goes on.

Its tokens stay on the device for the next step. If a grammar or a penalty needs earlier tokens on the host,
the step is sampled when they are there: before the next step, or when the result is read."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from services.worker.core.decodes import Int64s, StepTokens
from services.worker.core.sampling import Sampled
from services.worker.engine.paged import to_device
from services.worker.engine.sampler import Chosen


class Launched:
    """Implements `Ticket` for a step of some `rows`, of which `kept` sample a token."""

    def __init__(
        self,
        rows: int,
        kept: Sequence[int],
        choose: Callable[[], Chosen],
        finish: Callable[[list[Sampled | None]], list[Sampled | None]] | None = None,
        *,
        plain_rows: int = 0,
    ) -> None:
        """`choose` launches the sampling. `finish` completes what was sampled; without it, the first
        `plain_rows` are returned as an array."""
        self._rows, self._kept, self._choose, self._finish = rows, kept, choose, finish
        self._plain_rows = 0 if finish is not None else plain_rows
        self._chosen: Chosen | None = None
        self._told: Int64s = np.empty((2, 0), np.int64)
        self._copied: Any = None
        """The CUDA event after the copy to the host."""

    def choose(self) -> Chosen:
        """Launch the sampling, unless that was done."""
        if self._chosen is None:
            with nullcontext() if torch.is_inference_mode_enabled() else torch.inference_mode():
                self._chosen = chosen = self._choose()
                if chosen.tokens.device.type == "cuda":
                    self._copy(chosen.told())
                else:
                    self._told = chosen.told_here()
        return self._chosen

    def _copy(self, told: torch.Tensor) -> None:
        """Begin the copy to the host; one made later would wait for the step after this one."""
        copied = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
        copied.copy_(told, non_blocking=True)
        event: Any = torch.cuda.Event
        self._copied = event()
        self._copied.record()
        self._told = copied.numpy()

    def tokens(self, after: Int64s) -> torch.Tensor:
        """Return the tokens of these rows, int64 on the device."""
        chosen = self.choose().tokens
        at = np.zeros(self._rows, np.int64)
        at[list(self._kept)] = np.arange(len(self._kept))
        return chosen[to_device(torch.from_numpy(at[after]), chosen.device)]

    def result(self) -> Sequence[Sampled | None]:
        """See `Ticket`."""
        chosen, plain = self.choose(), self._plain_rows
        if self._copied is not None:
            self._copied.synchronize()
        found = chosen.answers(self._told, plain) if plain < self._rows else []
        found = found if self._finish is None else self._finish(found)
        others = found
        if len(found) != self._rows - plain:
            others = [None] * (self._rows - plain)
            for row, sampled in zip(self._kept[plain:], found, strict=False):
                others[row - plain] = sampled
        if not plain:
            return others
        tokens, are_finite = self._told[:, :plain]
        return StepTokens(np.where(are_finite, tokens, -1), others)
