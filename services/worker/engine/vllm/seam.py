"""Protocols between the vLLM engine and vLLM's model runners."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from services.worker.core.sampling import Sampled
from services.worker.engine.sampler import Logits
from services.worker.engine.vllm.requests import ContinuedRequest, NewRequest


class Draw(Protocol):
    """Samples a step. If it is pickled to another process, `drawn` must be sent back."""

    drawn: dict[str, Sampled | None]

    def __call__(self, logits: Logits, names: Sequence[str]) -> list[int]:
        """Return a token for each request; `logits` `[requests, vocabulary]` in the order of `names`."""


class ModelRunner(Protocol):
    """A model with its KV and kernels; called from one thread."""

    version: str
    vocabulary: int
    max_positions: int
    """Most positions of a sequence: one less than the model's, so that the last sampled token fits."""
    dtype: torch.dtype
    """Dtype of weights and KV."""
    layout: str
    """Name of a block's memory layout."""

    @property
    def kv(self) -> Sequence[torch.Tensor]:
        """Tensors `[NULL_BLOCKS + kv_blocks, …]` by rank and layer, contiguous, with K and V of a block."""

    def run(
        self,
        new: Sequence[NewRequest],
        continued: Sequence[ContinuedRequest],
        counts: Mapping[str, int],
        finished: set[str],
        draw: Draw,
    ) -> None:
        """Run one step. `draw` is called once, and returns each request's next token.

        After an exception the requests of this step must be in `finished` of the next step."""

    def close(self) -> None:
        """End the other processes."""
