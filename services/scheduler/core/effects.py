"""What the core wants done. It sends nothing itself; whoever drives it carries these out, in order."""

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
    """One question is open at a time; answer with `on_placed(question, …)`, None when there was no answer.

    Number 0 asks nothing: the sequence is placed already, and placement's books should know of it.
    """

    question: int
    items: tuple[PlacementItem, ...]
    excluded_workers: tuple[str, ...]
    withdrawn: tuple[SequenceRef, ...] = ()
    """Left before their start since the last question."""
    ahead: WaitingAhead = NOBODY_AHEAD
    waiting_tokens: int = 0
    """Of all that wait for a worker."""


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
    """This attempt of that gateway's sequence, and every lower one."""

    worker_id: str
    ref: SequenceRef
    gateway_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class WantKvAtWorker:
    """A sequence of so many tokens waits there that the worker's KV, as it is, cannot hold; 0: none does."""

    worker_id: str
    tokens: int
    may_borrow_ahead: bool = True
    """False: not for what only runs short."""


@dataclass(frozen=True, slots=True)
class PublishWorkerLost:
    lost: WorkerLost


@dataclass(frozen=True, slots=True)
class RefuseWorker:
    """It gets no work as long as it is what it is and the others are what they are. For people to know."""

    worker_id: str
    error: ModelMismatch


@dataclass(frozen=True, slots=True)
class AskTokens:
    """Which tokens the answer has by now; answer with `on_tokens`, None when there was no answer."""

    worker_id: str
    ref: SequenceRef
    is_shadow: bool = False
    """Not for a move: answer with `on_shadow_tokens`."""


@dataclass(frozen=True, slots=True)
class AskPull:
    """A target is to fetch blocks of a sequence that moves; answer with `on_pulled`, None when there was no
    answer. Where the order is for a shadow, with `on_shadow_pulled`."""

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
    """What was decided where memory ran out, and the costs behind it; for the log."""

    worker_id: str
    relief: Relief


@dataclass(frozen=True, slots=True)
class NotePolicyFailed:
    """The batching policy raised at this worker, or for the queue where there is none; for the log."""

    worker_id: str
    error: PolicyFailed


@dataclass(frozen=True, slots=True)
class NoteTurn:
    """Whose turn it was where several tenants wait; for the log."""

    ref: SequenceRef
    turn: TurnTaken


@dataclass(frozen=True, slots=True)
class NoteStandstill:
    """Work waits and nothing moves; for the log."""

    place: str
    """A worker, or anywhere."""
    waiting: int
    """Sequences."""
    still_s: float


@dataclass(frozen=True, slots=True)
class NoteForeign:
    """A gateway would have ended another's sequence; nothing was done. For the log."""

    gateway_id: str
    ref: SequenceRef


@dataclass(frozen=True, slots=True)
class StepDown:
    """A scheduler with a higher epoch is, or was, at work: this core's plans are refused. Drop it and start
    anew."""

    epoch: int
    """The epoch heard."""
    reason: str


@dataclass(frozen=True, slots=True)
class SequenceLeft:
    """A sequence is over for the scheduler; for the one line it logs about it."""

    ref: SequenceRef
    phase: Phase
    finish_reason: FinishReason | None
    worker_id: str | None
    prompt_tokens: int
    generated_tokens: int | None
    tenant: Tenant
    cached_tokens: int
    """Of its prompt, as its worker said."""
    expected_tokens: int | None
    """The same, as placement foresaw it."""
    held_s: float
    """Since its first planned chunk."""
    queued_s: float
    """From acceptance to its first planned chunk, or to the end if it never started."""
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
