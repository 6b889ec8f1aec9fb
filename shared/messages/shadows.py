"""Gateway-to-gateway messages that let an answer survive the gateway that accepted its request."""

from typing import Annotated

from msgspec import Meta

from shared.messages.base import Message
from shared.messages.sequence import NOBODY, FinishReason, Sampling, SequenceKey, Tenant, check_packed
from shared.messages.values import (
    Choice,
    Count,
    Digest,
    Id,
    Number,
    OptionalId,
    RequestId,
    SignedSeconds,
    Text,
)

_MOST_BODY_BYTES = 16 * 1024 * 1024


class Shadow(Message, frozen=True, kw_only=True):
    """A request as accepted, with all that another gateway needs to produce the same answer."""

    request_id: RequestId
    """Request id of its sequences; those of further prompts append the prompt's index."""
    names: tuple[Digest, ...]
    """Digests of the names under which clients may ask for it."""
    fingerprint: Digest
    """Digest of path and body; a different request under the same name is refused."""
    path: Text
    body: Annotated[bytes, Meta(max_length=_MOST_BODY_BYTES)]
    answer_id: Text
    created: Number
    """Unix time reported in the answer."""
    key: Text
    """Digest of the API key."""
    tenant: Tenant = NOBODY
    prompts: tuple[bytes, ...]
    """Packed tokens of each prompt; `samplings` has one entry per prompt."""
    samplings: tuple[Sampling, ...]
    choices: Choice
    """Number of choices per prompt."""
    heir_key: Digest
    """Key that makes workers release the answer to another gateway."""
    is_asked_for: bool = False
    """True if the client named the request; it then continues for a while without a reader."""
    is_background: bool = False
    """True if it runs to completion without a reader."""
    waited_s: SignedSeconds = 0.0
    """Seconds since it was accepted."""
    deadline_in_s: SignedSeconds | None = None
    takeovers: Count = 0
    """Number of earlier takeovers."""

    def __post_init__(self) -> None:
        for prompt in self.prompts:
            check_packed(prompt)

    @property
    def keys(self) -> list[SequenceKey]:
        """Keys of its sequences, in order of prompts."""
        names = [self.request_id if at == 0 else f"{self.request_id}-{at}" for at in range(len(self.prompts))]
        return [(name, choice) for name in names for choice in range(self.choices)]


class TellShadows(Message, frozen=True, kw_only=True):
    """Gateway → the gateway that would take over its answers."""

    sender: Id
    incarnation: Number
    taken: tuple[Shadow, ...] = ()
    ended: tuple[RequestId, ...] = ()
    """Complete answers; recomputed only if a client asks."""
    dropped: tuple[RequestId, ...] = ()
    """Answers that no client can ask for any more."""


class ClaimAnswer(Message, frozen=True, kw_only=True):
    """Gateway → gateway: take over the answer of this name, because its client asked the sender."""

    sender: Id
    name: Digest
    only_asks: bool = False
    """True to only query whether the answer exists, without taking over."""


class AnswerSoFar(Message, frozen=True, kw_only=True):
    """Tokens of one sequence so far."""

    tokens: bytes = b""
    """Packed token ids."""
    finish_reason: FinishReason | None = None
    cached_tokens: Count = 0

    def __post_init__(self) -> None:
        check_packed(self.tokens)


class ClaimedAnswer(Message, frozen=True, kw_only=True):
    """Reply to `ClaimAnswer`. Without `shadow`, the answer is unknown here or belongs to `owner`."""

    shadow: Shadow | None = None
    so_far: tuple[AnswerSoFar, ...] = ()
    """One entry per sequence; empty: workers may hold some tokens."""
    owner: OptionalId = ""
