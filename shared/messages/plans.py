"""What the scheduler tells a worker to run, and what the worker reports after each step.

A plan states intent. The worker applies each item only where it is valid (attempt alive, chunk starts where
the computation stands, blocks free), skips the rest and reports what it skipped.
"""

from enum import StrEnum

from shared.messages.base import Message
from shared.messages.sequence import FinishReason, SequenceRef, SequenceSpec
from shared.messages.values import Count, Epoch, Id, Number, PositiveCount, Seconds


class PreemptMode(StrEnum):
    """What becomes of a preempted sequence's KV."""

    RECOMPUTE = "recompute"
    """Freed; the sequence is prefilled again from its tokens."""
    SWAP = "swap"
    """Freed, and its whole blocks are kept on the worker's host until it comes back; it is prefilled as
    ever, and finds them. A worker that cannot keep them recomputes."""


class PrefillChunk(Message, frozen=True, kw_only=True, gc=False):
    """Compute tokens [first_token, end_token) of prompt + generated. The last chunk samples one token."""

    ref: SequenceRef
    first_token: Count
    end_token: Count
    allocated_blocks: Count
    """The sequence's total allocation once the item is applied."""


class Decode(Message, frozen=True, kw_only=True, gc=False):
    """One token in each of the plan's steps, as long as the allocation lasts."""

    ref: SequenceRef
    allocated_blocks: Count
    """The sequence's total allocation once the item is applied."""


class Preemption(Message, frozen=True, kw_only=True):
    """Take the blocks of a running sequence; applied before anything else in the plan."""

    ref: SequenceRef
    mode: PreemptMode = PreemptMode.RECOMPUTE


class BatchPlan(Message, frozen=True, kw_only=True):
    """Up to `steps` iterations of one worker without asking again. Applied in the order of the fields."""

    epoch: Epoch
    """Of the scheduler; a worker refuses a plan older than the highest it has seen."""
    seq: Number
    """Counts the plans sent to this worker within one epoch, from 1."""
    steps: PositiveCount = 1
    report_at: Count = 0
    """0: every step is reported. Else only the step of this number, the last one, and those in which a
    sequence ended, an item was skipped or a stored prefix was found."""
    valid_for_s: Seconds = 5.0
    """On the worker's monotonic clock, from receipt; an expired plan is not run and reported as such."""
    supersedes: bool = False
    """Drop what remains of earlier plans at the next step boundary."""
    drops: tuple[SequenceRef, ...] = ()
    """Forget these attempts (a later one lives elsewhere)."""
    preemptions: tuple[Preemption, ...] = ()
    starts: tuple[SequenceSpec, ...] = ()
    """Sequences the worker does not hold yet; an already held equal attempt is left as it is."""
    prefills: tuple[PrefillChunk, ...] = ()
    """Run in the plan's first step only."""
    decodes: tuple[Decode, ...] = ()


class SkipReason(StrEnum):
    """Why a worker did not apply an item."""

    UNKNOWN = "unknown"
    """The attempt is not held (ended, cancelled, or never arrived)."""
    MISALIGNED = "misaligned"
    """The chunk does not start where the computation stands, or the sequence is not at a decode."""
    NO_BLOCKS = "no_blocks"
    EXHAUSTED = "exhausted"
    """The allocation has no slot for the next token."""


class SkippedItem(Message, frozen=True, kw_only=True):
    ref: SequenceRef
    reason: SkipReason


class PrefixHit(Message, frozen=True, kw_only=True):
    """The beginning of a sequence was found in the worker's prefix cache; the next chunk may start after it.

    A chunk that was planned before starts earlier; only what is missing of it is computed.
    """

    ref: SequenceRef
    cached_tokens: Count
    """From the sequence's beginning; never all of it."""
    blocks: tuple[Count, Count, Count] = (0, 0, 0)
    """Found just now on the device, the host, and disk; what else `cached_tokens` covers comes with the next
    chunk."""
    peer_blocks: Count = 0
    """Found just now in host memory that other workers lend."""


class ShortStart(Message, frozen=True, kw_only=True):
    """A sequence went on with fewer tokens of its answer than its plan left room for."""

    ref: SequenceRef
    missing_tokens: Count


class PassedOver(Message, frozen=True, kw_only=True):
    """A decode of the plan that was put off: its sequence waited for stored blocks, or computed with them
    what an earlier plan had asked for."""

    ref: SequenceRef
    steps: PositiveCount
    """So many of the plan's."""


class EndedSequence(Message, frozen=True, kw_only=True):
    ref: SequenceRef
    finish_reason: FinishReason
    generated_tokens: Count


class StepOutcome(StrEnum):
    """What became of the plan a report is about."""

    RAN = "ran"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    STALE_EPOCH = "stale_epoch"


class WorkerStepped(Message, frozen=True, kw_only=True):
    """After each step that its plan wants reported, or when a plan is given up. What is not listed went as
    planned."""

    worker_id: Id
    incarnation: Number
    seq: Number
    """Counts this worker's `stepped` reports within its incarnation, from 1; a gap calls for a snapshot."""
    epoch: Epoch
    plan_seq: Number
    outcome: StepOutcome = StepOutcome.RAN
    steps_done: Count
    """Steps of the plan run so far."""
    plan_over: bool
    """No further step of this plan will run."""
    prefilled_tokens: Count = 0
    """Since the last report, as `decoded_tokens`."""
    decoded_tokens: Count = 0
    step_s: Seconds = 0.0
    """Of this step; 0 when none ran."""
    context_tokens: Count = 0
    """Of this step's decodes: tokens that they attended to, their own included."""
    free_blocks: Count = 0
    """Those of unused prefixes included: what can be allocated now."""
    ended: tuple[EndedSequence, ...] = ()
    skipped: tuple[SkippedItem, ...] = ()
    shorts: tuple[ShortStart, ...] = ()
    passed: tuple[PassedOver, ...] = ()
    """In the last report about a plan: of all its steps."""
    hits: tuple[PrefixHit, ...] = ()
    """Since the last report."""
