"""Batch plans from the scheduler, and the worker's report after each step. The worker applies an item only if
the attempt is alive, the chunk starts at the next uncomputed token, and blocks are free. It skips all other
items and reports them."""

from enum import StrEnum

from shared.messages.base import Message
from shared.messages.sequence import FinishReason, SequenceRef, SequenceSpec
from shared.messages.values import Count, Epoch, Id, Number, PositiveCount, Seconds


class PreemptMode(StrEnum):
    """Treatment of the KV of a preempted sequence."""

    RECOMPUTE = "recompute"
    """The blocks are freed; the sequence is prefilled again from its tokens."""
    SWAP = "swap"
    """The blocks are freed, and whole blocks are kept on the host. The later prefill finds them there. A
    worker without room for them recomputes."""


class PrefillChunk(Message, frozen=True, kw_only=True, gc=False):
    """Compute tokens [first_token, end_token) of prompt + generated. The last chunk samples one token."""

    ref: SequenceRef
    first_token: Count
    end_token: Count
    allocated_blocks: Count
    """Total allocation of the sequence after this item."""


class Decode(Message, frozen=True, kw_only=True, gc=False):
    """Compute one token in each step of the plan, as long as the allocation lasts."""

    ref: SequenceRef
    allocated_blocks: Count
    """Total allocation of the sequence after this item."""


class Preemption(Message, frozen=True, kw_only=True):
    """Take the blocks of a running sequence; applied before all other items of the plan."""

    ref: SequenceRef
    mode: PreemptMode = PreemptMode.RECOMPUTE


class BatchPlan(Message, frozen=True, kw_only=True):
    """Up to `steps` steps of one worker without further commands. Applied in the order of the fields."""

    epoch: Epoch
    """Epoch of the scheduler; a worker refuses plans of an older epoch than the highest it has seen."""
    seq: Number
    """Number of the plan within this worker and epoch, from 1."""
    steps: PositiveCount = 1
    report_at: Count = 0
    """Number of the step to report; 0: report every step. The last step is always reported. So is any step
    that ends a sequence, skips an item or hits the prefix cache."""
    valid_for_s: Seconds = 5.0
    """Lifetime from receipt, on the worker's monotonic clock; an expired plan is reported and not run."""
    supersedes: bool = False
    """True to drop the rest of earlier plans at the next step boundary."""
    drops: tuple[SequenceRef, ...] = ()
    """Attempts to forget, because a later one runs elsewhere."""
    preemptions: tuple[Preemption, ...] = ()
    starts: tuple[SequenceSpec, ...] = ()
    """Sequences new to the worker; if it already holds the same attempt, nothing changes."""
    prefills: tuple[PrefillChunk, ...] = ()
    """Run in the plan's first step only."""
    decodes: tuple[Decode, ...] = ()


class SkipReason(StrEnum):
    """Reason why a worker did not apply an item."""

    UNKNOWN = "unknown"
    """The worker does not hold the attempt: it ended, was cancelled, or never arrived."""
    MISALIGNED = "misaligned"
    """The chunk does not start at the next uncomputed token, or the sequence is not decoding."""
    NO_BLOCKS = "no_blocks"
    EXHAUSTED = "exhausted"
    """The allocation has no slot for the next token."""


class SkippedItem(Message, frozen=True, kw_only=True):
    ref: SequenceRef
    reason: SkipReason


class PrefixHit(Message, frozen=True, kw_only=True):
    """The worker's prefix cache holds the beginning of a sequence; the next chunk may start after it. A chunk
    planned earlier may start before that point; only its missing part is computed."""

    ref: SequenceRef
    cached_tokens: Count
    """Cached tokens from the sequence's beginning; never all of them."""
    blocks: tuple[Count, Count, Count] = (0, 0, 0)
    """Blocks just found on the device, on the host, and on disk. Any others in `cached_tokens` come with the
    next chunk."""
    peer_blocks: Count = 0
    """Blocks just found in host memory lent by other workers."""


class ShortStart(Message, frozen=True, kw_only=True):
    """A sequence continued with fewer answer tokens than its plan reserved (`SequenceSpec.open_tokens`)."""

    ref: SequenceRef
    missing_tokens: Count


class Gained(Message, frozen=True, kw_only=True):
    """A sequence whose steps made more than one token each, since guesses of them were right."""

    ref: SequenceRef
    tokens: PositiveCount
    """Number of tokens beyond one for each step, since the last report."""


class PassedOver(Message, frozen=True, kw_only=True):
    """A postponed decode: its sequence waited for stored blocks, or computed part of an earlier plan with
    them."""

    ref: SequenceRef
    steps: PositiveCount
    """Number of the plan's steps that were postponed."""


class EndedSequence(Message, frozen=True, kw_only=True):
    ref: SequenceRef
    finish_reason: FinishReason
    generated_tokens: Count


class StepOutcome(StrEnum):
    """Outcome of the reported plan."""

    RAN = "ran"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    STALE_EPOCH = "stale_epoch"


class WorkerStepped(Message, frozen=True, kw_only=True):
    """Sent after each step to report, and when a plan is dropped. Items that are not listed went as
    planned."""

    worker_id: Id
    incarnation: Number
    seq: Number
    """Number of this report within the worker's incarnation, from 1; after a gap, take a snapshot."""
    epoch: Epoch
    plan_seq: Number
    outcome: StepOutcome = StepOutcome.RAN
    steps_done: Count
    """Number of the plan's steps run so far."""
    plan_over: bool
    """True if no further step of this plan will run."""
    prefilled_tokens: Count = 0
    """Tokens prefilled since the last report; likewise `decoded_tokens`."""
    decoded_tokens: Count = 0
    step_s: Seconds = 0.0
    """Duration of this step; 0 if none ran."""
    context_tokens: Count = 0
    """Context length summed over this step's decodes, their own tokens included."""
    free_blocks: Count = 0
    """Blocks that can be allocated now, including those of unused prefixes."""
    ended: tuple[EndedSequence, ...] = ()
    skipped: tuple[SkippedItem, ...] = ()
    shorts: tuple[ShortStart, ...] = ()
    passed: tuple[PassedOver, ...] = ()
    """Set in the last report about a plan; covers all its steps."""
    hits: tuple[PrefixHit, ...] = ()
    """Prefix cache hits since the last report."""
    gains: tuple[Gained, ...] = ()
