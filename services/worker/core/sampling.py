"""What a sampler is asked for one token, and what it answers. Pure; knows no tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shared.messages.sequence import TOKEN_BYTES, Sampling
from shared.messages.tokens import TokenLogprobs


class SamplePoint(msgspec.Struct, frozen=True, gc=False):
    """One token to choose: the `index`-th of an answer, counted after those that are forced on it."""

    sampling: Sampling
    choice: int
    index: int
    tokens: Sequence[int] = ()
    """Prompt and answer so far (its last `index`); read only where penalties ask for it."""

    @property
    def forced(self) -> int | None:
        """The token that it has to be; None: it is the model's to choose."""
        if self.index >= 0:
            return None
        at = len(self.sampling.forced) + self.index * TOKEN_BYTES
        return int.from_bytes(self.sampling.forced[at : at + TOKEN_BYTES], "little")


class Sampled(NamedTuple):
    """A token and, where the request wants them, its log-probabilities."""

    token: int
    logprobs: TokenLogprobs | None = None
    state: bytes | None = None
    """Now and then, where the engine hands them out: the hidden state before it, fp16 `[width]`."""


FAILED = Sampled(-1)
"""In place of a token: the item could not be computed."""
KV_LOST = Sampled(-2)
"""In place of a token: the item needs KV that was on another worker and is gone."""
