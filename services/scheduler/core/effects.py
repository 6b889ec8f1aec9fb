"""Effects that the core requests. Its driver carries them out, in order."""

import msgspec

from services.scheduler.core.sequence import Phase
from services.scheduler.policy.fleet_queue import TurnTaken
from services.scheduler.policy.relief import Relief
from shared.errors import ModelMismatch, PolicyFailed
from shared.messages.commands import NOBODY_AHEAD, PlacementItem, WaitingAhead
from shared.messages.moves import MovePrepared, PullBlocks, SequenceMoved
from shared.messages.plans import BatchPlan
from shared.messages.reports import WorkerLost
from shared.messages.sequence import FinishReason, SequenceRef, Tenant


class Effect(msgspec.Struct, frozen=True):
    """Base of all effects."""


class SendPlan(Effect, frozen=True):
    worker_id: str
    plan: BatchPlan


class AskPlacement(Effect, frozen=True):
    """Ask for places. Answer with `on_placed`, maybe None. Question 0 only tells where a sequence is."""

    question: int
    items: tuple[PlacementItem, ...]
    excluded_workers: tuple[str, ...]
    withdrawn: tuple[SequenceRef, ...] = ()
    """Sequences that left before their start since the last question."""
    ahead: WaitingAhead = NOBODY_AHEAD
    waiting_tokens: int = 0
    """Tokens of all sequences that wait for a worker."""


class GiveToShard(Effect, frozen=True):
    """Tell the gateway to submit the next attempt to another shard."""

    ref: SequenceRef
    gateway_id: str
    shard: int


class NotePlaced(Effect, frozen=True):
    """Where the sequence went without placement's word, and why; for the log."""

    ref: SequenceRef
    worker_id: str
    why: str


class AskPrediction(Effect, frozen=True):
    """Answer with `on_predicted`, or not at all."""

    ref: SequenceRef
    prompt: bytes
    max_tokens: int
    generated_tokens: int = 0
    model: str = ""


class AskSnapshot(Effect, frozen=True):
    """Answer with `on_snapshot` or `on_snapshot_failed`."""

    worker_id: str
    epoch: int
    reason: str


class CancelAtWorker(Effect, frozen=True):
    """Cancel this attempt of the gateway's sequence and all lower ones."""

    worker_id: str
    ref: SequenceRef
    gateway_id: str
    reason: FinishReason


class WantKvAtWorker(Effect, frozen=True):
    """Gather KV for a waiting sequence of `tokens` tokens; 0: none waits."""

    worker_id: str
    tokens: int
    may_borrow_ahead: bool = True
    """Whether the worker may borrow before a sequence needs it."""


class PublishWorkerLost(Effect, frozen=True):
    lost: WorkerLost


class RefuseWorker(Effect, frozen=True):
    """The worker serves a different model and gets no work; for the log."""

    worker_id: str
    error: ModelMismatch


class AskTokens(Effect, frozen=True):
    """Ask which tokens the answer has. Answer with `on_tokens`, maybe None."""

    worker_id: str
    ref: SequenceRef
    is_shadow: bool = False


class AskPull(Effect, frozen=True):
    """Order a fetch of a sequence's blocks. Answer with `on_pulled`, maybe None."""

    worker_id: str
    ref: SequenceRef
    order: PullBlocks


class PublishPrepared(Effect, frozen=True):
    prepared: MovePrepared


class PublishMoved(Effect, frozen=True):
    moved: SequenceMoved


class NoteRelief(Effect, frozen=True):
    """A decision about short memory and its costs; for the log."""

    worker_id: str
    relief: Relief


class NotePolicyFailed(Effect, frozen=True):
    """The batching policy raised; for the log."""

    worker_id: str
    error: PolicyFailed


class NoteTurn(Effect, frozen=True):
    """Which tenant's turn it was among several; for the log."""

    ref: SequenceRef
    turn: TurnTaken


class NoteStandstill(Effect, frozen=True):
    """Work waits without progress; for the log. `place`: a worker id or `ANYWHERE`."""

    place: str
    waiting: int
    still_s: float


class NoteForeign(Effect, frozen=True):
    """A gateway tried to cancel another's sequence; nothing was done. For the log."""

    gateway_id: str
    ref: SequenceRef


class StepDown(Effect, frozen=True):
    """End this term: workers obey a higher epoch and refuse this core's plans."""

    epoch: int
    """The higher epoch."""
    reason: str


class SequenceLeft(Effect, frozen=True):
    """A finished sequence, for its log line."""

    ref: SequenceRef
    phase: Phase
    finish_reason: FinishReason | None
    worker_id: str | None
    prompt_tokens: int
    generated_tokens: int | None
    tenant: Tenant
    cached_tokens: int
    """Prompt tokens from the prefix cache, as the worker reported."""
    expected_tokens: int | None
    """Cached tokens that placement expected."""
    held_s: float
    """Time since its first planned chunk."""
    queued_s: float
    """Time from acceptance to its first planned chunk, or to the end if it never started."""
    total_s: float
