"""Effects that the core requests. Its driver carries them out, in order."""

from dataclasses import dataclass

from services.scheduler.core.sequence import Phase
from services.scheduler.policy.fleet_queue import TurnTaken
from services.scheduler.policy.relief import Relief
from shared.errors import ModelMismatch, PolicyFailed
from shared.messages.commands import NOBODY_AHEAD, PlacementItem, WaitingAhead
from shared.messages.moves import MovePrepared, PullBlocks, SequenceMoved
from shared.messages.plans import BatchPlan
from shared.messages.reports import WorkerLost
from shared.messages.sequence import FinishReason, SequenceRef, Tenant


@dataclass(frozen=True, slots=True)
class SendPlan:
    worker_id: str
    plan: BatchPlan


@dataclass(frozen=True, slots=True)
class AskPlacement:
    """Ask for places; one question is open at a time. Answer with `on_placed`, None if there was no reply.

    Question 0 only tells placement where a sequence is.
    """

    question: int
    items: tuple[PlacementItem, ...]
    excluded_workers: tuple[str, ...]
    withdrawn: tuple[SequenceRef, ...] = ()
    """Sequences that left before their start since the last question."""
    ahead: WaitingAhead = NOBODY_AHEAD
    waiting_tokens: int = 0
    """Tokens of all sequences that wait for a worker."""


@dataclass(frozen=True, slots=True)
class AskPrediction:
    """Answer with `on_predicted`, or not at all."""

    ref: SequenceRef
    prompt: bytes
    max_tokens: int
    generated_tokens: int = 0
    model: str = ""


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Answer with `on_snapshot` or `on_snapshot_failed`."""

    worker_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class CancelAtWorker:
    """Cancel this attempt of the gateway's sequence and all lower ones."""

    worker_id: str
    ref: SequenceRef
    gateway_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class WantKvAtWorker:
    """Gather KV for a waiting sequence of `tokens` tokens; 0: none waits."""

    worker_id: str
    tokens: int
    may_borrow_ahead: bool = True
    """Whether the worker may borrow before a sequence needs it."""


@dataclass(frozen=True, slots=True)
class PublishWorkerLost:
    lost: WorkerLost


@dataclass(frozen=True, slots=True)
class RefuseWorker:
    """The worker serves a different model and gets no work; for the log."""

    worker_id: str
    error: ModelMismatch


@dataclass(frozen=True, slots=True)
class AskTokens:
    """Ask which tokens the answer has. Answer with `on_tokens`, None if there was no reply."""

    worker_id: str
    ref: SequenceRef
    is_shadow: bool = False
    """For a shadow: answer with `on_shadow_tokens`."""


@dataclass(frozen=True, slots=True)
class AskPull:
    """Order the target to fetch a sequence's blocks. Answer with `on_pulled`, or `on_shadow_pulled` for a
    shadow; None if there was no reply."""

    worker_id: str
    ref: SequenceRef
    order: PullBlocks


@dataclass(frozen=True, slots=True)
class PublishPrepared:
    prepared: MovePrepared


@dataclass(frozen=True, slots=True)
class PublishMoved:
    moved: SequenceMoved


@dataclass(frozen=True, slots=True)
class NoteRelief:
    """A decision about short memory and its costs; for the log."""

    worker_id: str
    relief: Relief


@dataclass(frozen=True, slots=True)
class NotePolicyFailed:
    """The batching policy raised; for the log."""

    worker_id: str
    error: PolicyFailed


@dataclass(frozen=True, slots=True)
class NoteTurn:
    """Which tenant's turn it was among several; for the log."""

    ref: SequenceRef
    turn: TurnTaken


@dataclass(frozen=True, slots=True)
class NoteStandstill:
    """Work waits without progress; for the log."""

    place: str
    """A worker id or `ANYWHERE`."""
    waiting: int
    """Number of sequences."""
    still_s: float


@dataclass(frozen=True, slots=True)
class NoteForeign:
    """A gateway tried to cancel another's sequence; nothing was done. For the log."""

    gateway_id: str
    ref: SequenceRef


@dataclass(frozen=True, slots=True)
class StepDown:
    """End this term: workers obey a higher epoch and refuse this core's plans."""

    epoch: int
    """The higher epoch."""
    reason: str


@dataclass(frozen=True, slots=True)
class SequenceLeft:
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


Effect = (
    SendPlan
    | AskPlacement
    | AskPrediction
    | AskSnapshot
    | CancelAtWorker
    | WantKvAtWorker
    | PublishWorkerLost
    | RefuseWorker
    | AskTokens
    | AskPull
    | PublishPrepared
    | PublishMoved
    | NoteRelief
    | NotePolicyFailed
    | NoteTurn
    | NoteStandstill
    | NoteForeign
    | StepDown
    | SequenceLeft
)
