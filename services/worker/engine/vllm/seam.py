"""The seam: what the engine needs of a model runner of vLLM's. One module per runner and version keeps it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from services.worker.core.sampling import Sampled
from services.worker.engine.logits import Logits
from services.worker.engine.vllm.requests import ContinuedRequest, NewRequest
from shared.errors import ConfigError


class Draw(Protocol):
    """Samples a step. May be sent to another process (pickle); then `drawn` has to come back."""

    drawn: dict[str, Sampled | None]

    def __call__(self, logits: Logits, names: Sequence[str]) -> list[int]:
        """Logits `[requests, vocabulary]` and what they are of, in the order of the names → a token each."""
        ...


class ModelRunner(Protocol):
    """A model, its KV and its kernels. Called from one thread."""

    @property
    def version(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """The last one is not for a prompt: the token sampled behind it has to fit."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        ...

    @property
    def kv(self) -> Sequence[torch.Tensor]:
        """By rank and layer `[NULL_BLOCKS + kv_blocks, …]`, contiguous, K and V of a block in one piece."""
        ...

    @property
    def layout(self) -> str:
        """How a block's bytes lie, by whatever decides that."""
        ...

    def run(
        self,
        new: Sequence[NewRequest],
        continued: Sequence[ContinuedRequest],
        counts: Mapping[str, int],
        finished: set[str],
        draw: Draw,
    ) -> None:
        """One iteration. `draw` is called once, and what it answers is noted as each request's next token.

        After an exception the requests of this step are unknown; they have to be `finished` in the next one.
        """
        ...

    def close(self) -> None:
        """Ends what runs beside this process."""
        ...


def require(condition: bool, what: str, found: Any = None) -> None:
    """For the checks at start. Raises ConfigError."""
    if not condition:
        seen = "" if found is None else f" (found: {found})"
        raise ConfigError(
            f"this vLLM is not as Kvasir knows it: {what}{seen}; run `make setup-vllm`, or set engine native",
            param="engine",
        )
