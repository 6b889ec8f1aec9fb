"""What gateways tell each other, so that an answer outlives the one that accepted its request."""

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
    """A request as the gateway that accepted it took it: with this another one gives the same answer."""

    request_id: RequestId
    """What its sequences are called; those of further prompts end in their number."""
    names: tuple[Digest, ...]
    """What clients may ask for it by."""
    fingerprint: Digest
    """Of path and body: another request under the same name is refused."""
    path: Text
    body: Annotated[bytes, Meta(max_length=_MOST_BODY_BYTES)]
    answer_id: Text
    created: Number
    """Seconds since 1970, as the answer says."""
    key: Text
    """Digest of its API key."""
    tenant: Tenant = NOBODY
    prompts: tuple[bytes, ...]
    """Packed tokens; and how tokens are chosen, for each."""
    samplings: tuple[Sampling, ...]
    choices: Choice
    """Of each prompt."""
    heir_key: Digest
    """Workers hand what they keep of it to whoever shows this."""
    is_asked_for: bool = False
    """By a name that its client gave it: it goes on for a while when nobody reads it."""
    is_background: bool = False
    """It goes on until its end, however long nobody reads it."""
    waited_s: SignedSeconds = 0.0
    """Since it was accepted."""
    deadline_in_s: SignedSeconds | None = None
    takeovers: Count = 0
    """So many gateways have had it before."""

    def __post_init__(self) -> None:
        for prompt in self.prompts:
            check_packed(prompt)

    @property
    def keys(self) -> list[SequenceKey]:
        """Its sequences, prompt by prompt."""
        names = [self.request_id if at == 0 else f"{self.request_id}-{at}" for at in range(len(self.prompts))]
        return [(name, choice) for name in names for choice in range(self.choices)]


class TellShadows(Message, frozen=True, kw_only=True):
    """Gateway → the one that would take its answers over."""

    sender: Id
    incarnation: Number
    taken: tuple[Shadow, ...] = ()
    ended: tuple[RequestId, ...] = ()
    """Complete; computed again only if somebody asks."""
    dropped: tuple[RequestId, ...] = ()
    """Nobody can ask any more."""


class ClaimAnswer(Message, frozen=True, kw_only=True):
    """Gateway → gateway: a client asks me for what is called so; if it is yours, it is mine from now on."""

    sender: Id
    name: Digest
    only_asks: bool = False
    """It stays yours: I only want to know whether it is being made."""


class AnswerSoFar(Message, frozen=True, kw_only=True):
    """Of one sequence."""

    tokens: bytes = b""
    """Packed."""
    finish_reason: FinishReason | None = None
    cached_tokens: Count = 0

    def __post_init__(self) -> None:
        check_packed(self.tokens)


class ClaimedAnswer(Message, frozen=True, kw_only=True):
    """Without `shadow` it is not known here, or known as that `owner`'s, which lives as far as is known."""

    shadow: Shadow | None = None
    so_far: tuple[AnswerSoFar, ...] = ()
    """By sequence; none: workers may have some of it."""
    owner: OptionalId = ""
