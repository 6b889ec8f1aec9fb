"""A sequence is one of a request's `n` choices: the unit of scheduling, computing, resuming and cancelling.
Each resubmission or migration raises its `attempt`. Of two attempts of one sequence, the higher one is
valid."""

from array import array
from collections.abc import Iterable, Mapping
from enum import StrEnum
from hashlib import blake2b
from itertools import chain

from shared.messages.base import Message
from shared.messages.values import (
    Choice,
    Count,
    Digest,
    GrammarText,
    Id,
    LogitBias,
    Number,
    OptionalId,
    Penalty,
    Priority,
    Probability,
    RepetitionPenalty,
    RequestId,
    Seconds,
    Seed,
    SignedSeconds,
    Temperature,
    Text,
    TokenId,
    TopLogprobs,
    TraceParent,
    Weight,
)

TOKEN_BYTES = 4
"""Bytes of a packed token id."""

SequenceKey = tuple[str, int]
"""Key of a sequence across its attempts: (request id, choice)."""


class FinishReason(StrEnum):
    """Why a sequence ended. Only `STOP` and `LENGTH` are complete answers."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    GATEWAY_LOST = "gateway_lost"
    ERROR = "error"
    KV_LOST = "kv_lost"
    """KV held by another worker was lost; the sequence is computed again."""


class SequenceRef(Message, frozen=True, kw_only=True, gc=False):
    """Identifies one attempt of one sequence."""

    request_id: RequestId
    choice: Choice
    attempt: Number

    @property
    def key(self) -> SequenceKey:
        return (self.request_id, self.choice)

    def __str__(self) -> str:
        return f"{self.request_id}/{self.choice}#{self.attempt}"


class Sampling(Message, frozen=True, kw_only=True):
    """Sampling parameters. Fixed when the request is accepted. The token at index `i` depends only on its
    logits, these fields, the choice and `i`. A sequence resumed elsewhere therefore continues identically."""

    seed: Seed
    max_tokens: Count
    """Maximum length of the whole answer in tokens, earlier attempts included."""
    temperature: Temperature = 1.0
    """0: greedy."""
    top_p: Probability = 1.0
    top_k: Count = 0
    """0: off."""
    end_token_ids: tuple[TokenId, ...] = ()
    """Tokens that end the answer: the model's own (unless `ignore_eos`) and the client's `stop_token_ids`."""
    min_p: Probability = 0.0
    """Minimum probability relative to the likeliest token, after temperature; 0: off."""
    min_tokens: Count = 0
    """Minimum answer length before a token of `end_token_ids` may be chosen."""
    presence_penalty: Penalty = 0.0
    """Subtracted from the logit of each token that the answer contains."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit once per occurrence in the answer."""
    repetition_penalty: RepetitionPenalty = 1.0
    """For tokens in prompt or answer: positive logits are divided by it, negative ones multiplied."""
    top_logprobs: TopLogprobs | None = None
    """Number of likeliest tokens to return log-probabilities for, besides the chosen one; None: none."""
    grammar: GrammarText = ""
    """Grammar of the answer's text, as written by `shared.grammars`; empty: none."""
    forced: bytes = b""
    """Packed tokens that the answer must begin with, to get their log-probabilities. They count towards
    `max_tokens`, but not towards `min_tokens` or penalties, and use no random numbers."""
    logit_bias: tuple[tuple[TokenId, LogitBias], ...] = ()
    """(token id, value added to its logit)."""
    allowed_token_ids: tuple[TokenId, ...] = ()
    """The only tokens that may be chosen; empty: all."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Token sequences that may not occur: the last token is masked when the answer ends with the others."""
    embeds: bool = False
    """True to return hidden states with the log-probabilities; needs `top_logprobs`."""

    def __post_init__(self) -> None:
        check_packed(self.forced)

    @property
    def forced_tokens(self) -> int:
        return len(self.forced) // TOKEN_BYTES

    @property
    def highest_token(self) -> int:
        """Return the highest token id that is forced, biased, allowed or forbidden; -1 if there is none."""
        words = chain.from_iterable(self.bad_words)
        biased = (token for token, _ in self.logit_bias)
        return max(chain(unpack_tokens(self.forced), biased, self.allowed_token_ids, words), default=-1)


class ServiceClass(StrEnum):
    """Service level of a tenant. Better classes are served first."""

    GUARANTEED = "guaranteed"
    STANDARD = "standard"
    SHEDDABLE = "sheddable"
    """Best effort: preempted when other sequences need memory."""


class Tenant(Message, frozen=True, kw_only=True, gc=False):
    """Owner of a sequence: the holder of an API key. Tenants of one class share capacity by weight."""

    name: OptionalId = ""
    """Empty: tenants are not distinguished."""
    service_class: ServiceClass = ServiceClass.STANDARD
    weight: Weight = 1.0


NOBODY = Tenant()


def is_beyond_share(counts: Mapping[str, int], name: str, limit: int) -> bool:
    """Return True if tenant `name` may not add one more to `counts`. Above `limit`, a tenant below its equal
    share may still add, up to twice `limit` in total."""
    total = sum(counts.values())
    if total < limit:
        return False
    share = limit / len({*counts, name})
    return counts.get(name, 0) >= share or total >= 2 * limit


class SequenceSpec(Message, frozen=True, kw_only=True):
    """Everything needed to compute a sequence from scratch or to continue it."""

    ref: SequenceRef
    gateway_id: Id
    gateway_incarnation: Number
    prompt: bytes
    """Token ids of the prompt (`pack_tokens`)."""
    sampling: Sampling
    generated: bytes = b""
    """Token ids of the answer so far, packed. Kept out of `prompt`, so limits and indices stay valid."""
    waited_s: Seconds = 0.0
    """Seconds since the gateway accepted the request, at the time of sending; clocks are not compared."""
    deadline_in_s: SignedSeconds | None = None
    cache_salt: Digest = b""
    """Sequences share cached prefixes only with the same salt; each tenant has its own."""
    open_tokens: Count = 0
    """Number of answer tokens that may still arrive (`ExtendSequence`) before computation starts."""
    rehearsal: bool = False
    """True to only compute and store the blocks, without output: prepares a migration."""
    model: Text = ""
    """Name of the model to run; empty: the stack serves only one."""
    adapter: Text = ""
    """LoRA adapter of the model; empty: none. `cache_salt` covers it."""
    priority: Priority = 0
    """Within a tenant, lower values run first under every batching policy."""
    tenant: Tenant = NOBODY
    capability: Digest = b""
    """Secret that entitles a worker to send this attempt's tokens (`proof_of`); empty: no check."""
    heir_digest: Digest = b""
    """`heir_digest_of` the key that lets another gateway take over the answer; empty: no takeover."""
    is_resumed: bool = False
    """True if a scheduler accepted it before; it is then not refused for overload."""
    runs_alone: bool = False
    """True if workers died that ran it: nothing else may run beside it."""
    is_bound: bool = False
    """True if another shard handed it over: it stays in this one."""
    traceparent: TraceParent = ""
    """Trace span of the request. A plan covers many sequences, so message headers cannot carry it."""

    def __post_init__(self) -> None:
        check_packed(self.prompt)
        check_packed(self.generated)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def generated_tokens(self) -> int:
        return len(self.generated) // TOKEN_BYTES


def proof_of(capability: bytes, worker_id: str, incarnation: int) -> bytes:
    """Return proof that this incarnation of a worker holds the capability; other workers cannot reuse it."""
    if not capability:
        return b""
    return blake2b(f"{worker_id}/{incarnation}".encode(), key=capability, digest_size=16).digest()


def heir_digest_of(heir_key: bytes) -> bytes:
    """Return the digest by which a worker recognises `heir_key`; empty for an empty key."""
    return blake2b(heir_key, digest_size=16).digest() if heir_key else b""


def check_packed(data: bytes, item_bytes: int = TOKEN_BYTES) -> None:
    """Raise ValueError unless `data` is a whole number of items."""
    if len(data) % item_bytes:
        raise ValueError(f"{len(data)} bytes are no whole number of items of {item_bytes}")


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Return token ids as little-endian unsigned 32-bit integers."""
    return array("I", tokens).tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Inverse of `pack_tokens`. Raise ValueError if the length is not a multiple of four."""
    tokens = array("I")
    tokens.frombytes(data)
    return tokens.tolist()
