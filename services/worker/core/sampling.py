"""Requests to the sampler for one token, and its answers. Pure; no tensors."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from shared.messages.sequence import TOKEN_BYTES, Sampling
from shared.messages.tokens import TokenLogprobs


class SamplePoint(msgspec.Struct, frozen=True, gc=False):
    """One token to sample: number `index` of an answer, counted after its forced tokens."""

    sampling: Sampling
    choice: int
    index: int
    tokens: Sequence[int] = ()
    """Prompt and answer so far (its last `index` tokens); only penalties read it."""

    @property
    def forced(self) -> int | None:
        """The forced token; None: the model chooses."""
        if self.index >= 0:
            return None
        at = len(self.sampling.forced) + self.index * TOKEN_BYTES
        return int.from_bytes(self.sampling.forced[at : at + TOKEN_BYTES], "little")


class Sampled(NamedTuple):
    """A token and, if requested, its log-probabilities."""

    token: int
    logprobs: TokenLogprobs | None = None
    state: bytes | None = None
    """The hidden state before it, fp16 `[width]`, from engines that sample such states."""


FAILED = Sampled(-1)
"""The item could not be computed."""
KV_LOST = Sampled(-2)
"""The item needs KV that was on another worker and is lost."""
