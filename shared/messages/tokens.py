"""Token frames: tokens that a worker sends to gateways after a step. Encoded as append-only arrays."""

import msgspec

from shared.messages.base import Message
from shared.messages.sequence import FinishReason, SequenceRef
from shared.messages.values import (
    Choice,
    Count,
    Digest,
    HiddenState,
    Id,
    LogProbability,
    Number,
    RequestId,
    TokenId,
)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural log-probabilities of the raw model: before penalties, temperature and filters."""

    chosen: LogProbability
    top: tuple[tuple[TokenId, LogProbability], ...] = ()
    """(token id, log-probability), likeliest first."""
    hidden: HiddenState = b""
    """Set if the request embeds: input of the model's head at this token, little-endian fp32."""


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one sequence. A reader that holds fewer than `first_index` tokens has missed some."""

    request_id: RequestId
    choice: Choice
    attempt: Number
    first_index: Count
    """Answer index of the first token."""
    tokens: tuple[TokenId, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: Count = 0
    """Prompt tokens served from the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token, or empty."""
    proof: Digest = b""
    """`proof_of` the attempt's capability; sent with the first tokens and with each fetch."""


class TokenFrame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of one step for one gateway."""

    worker_id: Id
    incarnation: Number
    deltas: tuple[TokenDelta, ...]


class FetchTokens(Message, frozen=True, kw_only=True):
    """Gateway or scheduler → worker: resend tokens from `first_index` on, after a missed frame. Fails with
    `ForeignSequence` for another gateway's sequence, unless `heir_key` is valid."""

    ref: SequenceRef
    sender: Id
    first_index: Count
    heir_key: Digest = b""
    """Key of a gateway that takes over the answer; checked against `SequenceSpec.heir_digest`."""


class ExtendSequence(Message, frozen=True, kw_only=True):
    """Gateway → migration target: tokens that the source has computed since."""

    ref: SequenceRef
    """Attempt at the target."""
    sender: Id
    first_index: Count
    tokens: tuple[TokenId, ...]


class FetchedTokens(Message, frozen=True, kw_only=True):
    """Worker → gateway. `delta` is None if the worker does not hold the attempt."""

    delta: TokenDelta | None = None


class AcknowledgeEnds(Message, frozen=True, kw_only=True):
    """Gateway → worker: the ends of these sequences arrived or are not needed; the worker may forget them."""

    refs: tuple[SequenceRef, ...]
    sender: Id
