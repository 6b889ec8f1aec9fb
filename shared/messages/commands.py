"""Control commands and their replies. Errors are never reply fields (`shared.errors.to_wire`)."""

from shared.messages.base import Message
from shared.messages.lending import KvTier
from shared.messages.prefixes import PrefixChain
from shared.messages.sequence import FinishReason, SequenceRef, SequenceSpec, check_packed
from shared.messages.values import (
    Count,
    Digest,
    Epoch,
    Id,
    Number,
    OptionalId,
    PositiveCount,
    Priority,
    Seconds,
    Text,
)


class SubmitSequence(Message, frozen=True, kw_only=True):
    """Gateway → scheduler. Idempotent: a known attempt is left as it is; a higher attempt replaces it."""

    spec: SequenceSpec


class SubmitReply(Message, frozen=True, kw_only=True):
    scheduler_id: Id
    incarnation: Number
    epoch: Epoch
    known: bool = False
    """True if the scheduler already had the attempt: queued, running, or adopted from a worker."""
    worker_id: Id | None = None
    shard: Count | None = None
    """Set if the attempt was handed over: submit the next one to this shard."""


class CancelSequence(Message, frozen=True, kw_only=True):
    """Gateway → scheduler or worker: end this attempt and all lower ones. The receiver keeps a tombstone,
    because the message may arrive before the sequence. A gateway can only cancel its own sequences."""

    ref: SequenceRef
    sender: Id
    """Id of the gateway or scheduler that sends the message."""
    gateway_id: OptionalId = ""
    """Set by a scheduler: gateway that owns the sequence; empty: any gateway."""
    reason: FinishReason = FinishReason.CANCELLED
    heir_key: Digest = b""
    """As in `FetchTokens`."""


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """Scheduler → worker: drop all plans at the next step boundary and reply with `WorkerReported`."""

    epoch: Epoch


class PredictLength(Message, frozen=True, kw_only=True):
    """Scheduler → predictor. The reply is a `LengthPrediction`."""

    ref: SequenceRef
    prompt: bytes
    max_tokens: Count
    generated_tokens: Count = 0
    """If above 0, the prediction assumes that the answer is longer than this."""
    model: Text = ""
    """Model that writes the answer; empty: the stack serves only one."""

    def __post_init__(self) -> None:
        check_packed(self.prompt)


class LengthPrediction(Message, frozen=True, kw_only=True):
    """Predicted length of the whole answer in tokens, with quantiles, capped at `max_tokens`."""

    rl_tokens: Count
    p50_tokens: Count
    p80_tokens: Count
    p90_tokens: Count
    p95_tokens: Count
    model_version: Text
    is_calibrated: bool = False
    """True for a predictor that learns online; the scheduler then does not correct its predictions."""


class PlacementItem(Message, frozen=True, kw_only=True):
    ref: SequenceRef
    size_tokens: Count
    """Current or initial allocation: prompt + generated tokens so far."""
    limit_tokens: Count
    """Upper limit of the allocation: prompt + maximum answer."""
    prefixes: tuple[PrefixChain, ...] = ()
    """Block hashes of the prompt, one chain per kind of worker; empty: unknown."""
    waited_s: Seconds = 0.0
    """Seconds since the gateway accepted the request."""
    priority: Priority = 0
    is_bound: bool = False
    """True if only workers of the scheduler's own shard may be chosen."""


class Crowd(Message, frozen=True, kw_only=True):
    """Sequences that are placed at one worker but have not started."""

    worker_id: Id
    places: Count
    """Number of additional sequences that may wait there."""
    tokens: Count
    """Total prompt tokens of the waiting sequences."""


class WaitingAhead(Message, frozen=True, kw_only=True):
    """Limits on placing sequences ahead of free memory, so that no worker runs out of work."""

    places: Count = 0
    """Limit for each worker that `crowds` does not list; 0: place only where memory is free now."""
    crowds: tuple[Crowd, ...] = ()
    """Workers with waiting sequences."""
    only: tuple[Id, ...] = ()
    """If set, only these workers accept sequences."""
    closed: tuple[Id, ...] = ()
    """Workers whose queue is full."""


NOBODY_AHEAD = WaitingAhead()


class PlaceSequences(Message, frozen=True, kw_only=True):
    """Scheduler → placement. Items are in order of precedence."""

    items: tuple[PlacementItem, ...]
    excluded_workers: tuple[Id, ...] = ()
    """Workers that the scheduler considers lost or not yet in sync."""
    withdrawn: tuple[SequenceRef, ...] = ()
    """Sequences from earlier calls that left before a worker started them; their reservations can go."""
    ahead: WaitingAhead = NOBODY_AHEAD
    model: Text = ""
    """Model that the items need; empty: the stack serves only one."""
    are_placed: bool = False
    """True to only record items that already have a worker; all other workers are excluded."""
    waiting_tokens: Number = 0
    """Prompt tokens of all sequences without a worker, these items included."""
    step_tokens: Count = 0
    """Maximum number of prompt tokens computed in one step; 0: unknown."""
    shard: Count = 0
    """Shard of the scheduler. A worker of another one has a longer cached prefix, or is not chosen."""
    shards: PositiveCount = 1


class Placements(Message, frozen=True, kw_only=True):
    """One worker id per item, in order; None means the item has to wait."""

    worker_ids: tuple[Id | None, ...]
    expected_tokens: tuple[Count, ...] = ()
    """Prompt tokens of each item that its worker is expected to have cached."""


class WantKv(Message, frozen=True, kw_only=True):
    """Scheduler → worker: make room for one sequence of `tokens` tokens, borrowing KV if needed. Repeated
    while the need lasts; it expires when repetitions stop."""

    tokens: Count
    """Size of that sequence in tokens; 0: every waiting sequence fits the worker."""
    may_borrow_ahead: bool = True
    """Worker → ledger: find workers that could lend KV."""


class FindCreditors(Message, frozen=True, kw_only=True):
    """Worker → ledger: find workers that could lend KV for `tokens` tokens."""

    debtor_id: Id
    tokens: Count
    refused_by: tuple[Id, ...] = ()
    refused_host_by: tuple[Id, ...] = ()
    """Workers that refused to lend host memory."""
    for_cache: bool = False
    """True to borrow only host memory that no prefix cache uses."""


class CreditorCandidate(Message, frozen=True, kw_only=True):
    worker_id: Id
    free_tokens: Count
    """Free tokens in `tier`."""
    distance: Count
    """0: same host; 1: another host."""
    tier: KvTier = KvTier.DEVICE
    """Tier to borrow from."""


class CreditorCandidates(Message, frozen=True, kw_only=True):
    candidates: tuple[CreditorCandidate, ...]
