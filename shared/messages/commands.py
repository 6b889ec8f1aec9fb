"""Control commands and their replies. An error is never a field of a reply: see `shared.errors.to_wire`."""

from shared.messages.base import Message
from shared.messages.lending import KvTier
from shared.messages.prefixes import PrefixChain
from shared.messages.sequence import FinishReason, SequenceRef, SequenceSpec, check_packed
from shared.messages.values import Count, Digest, Epoch, Id, Number, OptionalId, Priority, Seconds, Text


class SubmitSequence(Message, frozen=True, kw_only=True):
    """Gateway → scheduler. Idempotent: a known attempt is left where it is; a higher one replaces it."""

    spec: SequenceSpec


class SubmitReply(Message, frozen=True, kw_only=True):
    scheduler_id: Id
    incarnation: Number
    epoch: Epoch
    known: bool = False
    """The attempt was known already (running, queued, or adopted from a worker)."""
    worker_id: Id | None = None


class CancelSequence(Message, frozen=True, kw_only=True):
    """Gateway → scheduler and worker. Ends this attempt and every lower one.

    Leaves a tombstone, because it may overtake the start. Obeyed for the sequences of one gateway only.
    """

    ref: SequenceRef
    sender: Id
    """That gateway, or a scheduler."""
    gateway_id: OptionalId = ""
    """Where a scheduler sends it: whose sequence it is; empty: whosever is held under that name."""
    reason: FinishReason = FinishReason.CANCELLED
    heir_key: Digest = b""
    """As of `FetchTokens`."""


class TakeSnapshot(Message, frozen=True, kw_only=True):
    """Scheduler → worker: give up all plans at the next step boundary and answer with a `WorkerReported`."""

    epoch: Epoch


class PredictLength(Message, frozen=True, kw_only=True):
    """Scheduler → predictor."""

    ref: SequenceRef
    prompt: bytes
    max_tokens: Count
    generated_tokens: Count = 0
    """When above 0, the length is conditioned on the answer being longer than this."""
    model: Text = ""
    """Whose answer it is; empty: that of the one model that there is."""

    def __post_init__(self) -> None:
        check_packed(self.prompt)


class LengthPrediction(Message, frozen=True, kw_only=True):
    """Whole response length in tokens (`rl_tokens`, with quantiles), capped at `max_tokens`."""

    rl_tokens: Count
    p50_tokens: Count
    p80_tokens: Count
    p90_tokens: Count
    p95_tokens: Count
    model_version: Text
    is_calibrated: bool = False
    """Made by what learns from how answers ended while it serves: to be taken as it is."""


class PlacementItem(Message, frozen=True, kw_only=True):
    ref: SequenceRef
    size_tokens: Count
    """What is allocated to it, or will be when it starts: prompt + generated so far."""
    limit_tokens: Count
    """Prompt + maximum answer: what it may grow to."""
    prefixes: tuple[PrefixChain, ...] = ()
    """What its prompt's blocks are called, once for each kind of worker there is; none: not known."""
    waited_s: Seconds = 0.0
    """Since the gateway accepted the request."""
    priority: Priority = 0


class Crowd(Message, frozen=True, kw_only=True):
    """What waits at one worker, having been placed there and not started."""

    worker_id: Id
    places: Count
    """So many more may wait there."""
    tokens: Count
    """Prompts of those that do."""


class WaitingAhead(Message, frozen=True, kw_only=True):
    """How many sequences may be placed where there is no memory for them yet, so that no worker runs dry."""

    places: Count = 0
    """At each worker that is not named; 0: none, a place takes memory that is free now."""
    crowds: tuple[Crowd, ...] = ()
    """Workers where somebody waits."""
    only: tuple[Id, ...] = ()
    """No other worker takes anybody; none named: any may."""
    closed: tuple[Id, ...] = ()
    """These take nobody: as many wait there as may."""


NOBODY_AHEAD = WaitingAhead()


class PlaceSequences(Message, frozen=True, kw_only=True):
    """Scheduler → placement, in order of precedence."""

    items: tuple[PlacementItem, ...]
    excluded_workers: tuple[Id, ...] = ()
    """Workers the scheduler knows to be gone or not in step yet."""
    withdrawn: tuple[SequenceRef, ...] = ()
    """Asked for before, and left before a worker began with them: no place is to be kept for them."""
    ahead: WaitingAhead = NOBODY_AHEAD
    model: Text = ""
    """All items are for workers that serve it; empty: for the one model that there is."""
    are_placed: bool = False
    """They have their worker, all others are excluded: it is for the books."""
    waiting_tokens: Number = 0
    """Of prompts that have no worker, those of the items among them."""
    step_tokens: Count = 0
    """So many prompt tokens are computed in one step at most; 0: not said."""


class Placements(Message, frozen=True, kw_only=True):
    """One worker id per item, in order; None says wait."""

    worker_ids: tuple[Id | None, ...]
    expected_tokens: tuple[Count, ...] = ()
    """Of each item's prompt, that its worker is expected to have cached."""


class WantKv(Message, frozen=True, kw_only=True):
    """Scheduler → worker: have room for one sequence of so many tokens, if need be by borrowing; and whether
    to borrow for less than that. Repeated while it holds; forgotten by a worker that hears it no more."""

    tokens: Count
    """0: none is too long for the worker."""
    may_borrow_ahead: bool = True
    """Also where little is free and nobody is too long; False: the ladder found something cheaper."""


class FindCreditors(Message, frozen=True, kw_only=True):
    """Worker → ledger: who could lend this many tokens' worth of KV?"""

    debtor_id: Id
    tokens: Count
    refused_by: tuple[Id, ...] = ()
    refused_host_by: tuple[Id, ...] = ()
    """As to their host memory."""
    for_cache: bool = False
    """Of their host memory alone, and none that prefix caches have already."""


class CreditorCandidate(Message, frozen=True, kw_only=True):
    worker_id: Id
    free_tokens: Count
    """Of that tier."""
    distance: Count
    """0 same host, 1 elsewhere."""
    tier: KvTier = KvTier.DEVICE
    """What to ask for."""


class CreditorCandidates(Message, frozen=True, kw_only=True):
    candidates: tuple[CreditorCandidate, ...]
