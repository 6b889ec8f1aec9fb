"""Token frames: what a worker sends each gateway after each step. Alone encoded as arrays, append-only."""

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


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of the model's own probabilities: before penalties, temperature and filters."""

    chosen: LogProbability
    top: tuple[tuple[TokenId, LogProbability], ...] = ()
    """(token id, log-probability), likeliest first."""
    hidden: HiddenState = b""
    """Where the request embeds: what the model's head was given here, little-endian fp32."""


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one sequence. A reader holding fewer than `first_index` tokens has missed some."""

    request_id: RequestId
    choice: Choice
    attempt: Number
    first_index: Count
    """Index in the answer of the first token of this delta."""
    tokens: tuple[TokenId, ...]
    finish_reason: FinishReason | None = None
    cached_tokens: Count = 0
    """Prompt tokens that were served from the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `tokens`, or none at all."""
    proof: Digest = b""
    """`proof_of` the attempt's capability: with its first tokens, and whenever it is fetched."""


class TokenFrame(msgspec.Struct, frozen=True, array_like=True):
    """One step's tokens for one gateway."""

    worker_id: Id
    incarnation: Number
    deltas: tuple[TokenDelta, ...]


class FetchTokens(Message, frozen=True, kw_only=True):
    """Gateway → worker: the tokens from `first_index` on, because a frame was missed. A scheduler asks, too.

    Another gateway's are refused with `ForeignSequence`, unless it shows the key of an heir.
    """

    ref: SequenceRef
    sender: Id
    first_index: Count
    heir_key: Digest = b""
    """From a gateway that takes the answer over, as its `SequenceSpec.heir_digest` says who may."""


class ExtendSequence(Message, frozen=True, kw_only=True):
    """Gateway → the worker that takes a sequence over: what its former worker has computed since."""

    ref: SequenceRef
    """The attempt that takes over."""
    sender: Id
    first_index: Count
    tokens: tuple[TokenId, ...]


class FetchedTokens(Message, frozen=True, kw_only=True):
    """Worker → gateway. `delta` is None when the worker does not hold that attempt."""

    delta: TokenDelta | None = None


class AcknowledgeEnds(Message, frozen=True, kw_only=True):
    """Gateway → worker: these ends arrived (or nobody wants them); the worker may forget the sequences."""

    refs: tuple[SequenceRef, ...]
    sender: Id
