"""The plans a worker has received and not finished: epoch fencing, order, expiry, supersession. Pure.

The queue knows nothing of sequences: which items of a plan can be applied is decided in
`services.worker.core.sequences`, and what is left of one iteration of the head is a `StepWork`.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

import msgspec

from services.worker.core.sequence import HeldSequence
from shared.messages.plans import BatchPlan, PassedOver, PrefixHit, ShortStart, SkippedItem, StepOutcome
from shared.messages.sequence import SequenceRef
from shared.messages.values import EPOCH_REACH

MAX_PLANS = 64
"""Plans that may wait; a scheduler keeps one or two ahead."""


_LONGEST_HOLD_S = 5.0
"""After so long without anybody who could run a plan expires like others."""


@dataclass(slots=True)
class QueuedPlan:
    """A plan and how far it has run."""

    plan: BatchPlan
    received_s: float
    steps_done: int = 0
    skips_reported: set[SequenceRef] = field(default_factory=set)
    """Each item that cannot be applied is reported once per plan."""
    ended: set[SequenceRef] = field(default_factory=set)
    """Ended while the plan ran: its later steps pass over them silently."""
    has_begun: bool = False
    """It has been applied: only its decodes are left to be looked at."""
    held_s: float | None = None
    """Since then it waits for somebody in it to have blocks."""
    passed: Counter[SequenceRef] = field(default_factory=Counter)
    """Decodes that were put off, in so many of its steps."""

    @property
    def over(self) -> bool:
        return self.steps_done >= self.plan.steps

    @property
    def is_queued(self) -> bool:
        """False for one that stands for no plan: see `PlanQueue.unplanned`."""
        return self.plan.seq > 0

    @property
    def passed_over(self) -> tuple[PassedOver, ...]:
        """As a report tells it."""
        return tuple(PassedOver(ref=ref, steps=steps) for ref, steps in self.passed.items())

    @property
    def report_is_due(self) -> bool:
        """After the step that has just run, whatever happened in it."""
        return self.over or self.plan.report_at in (0, self.steps_done)


@dataclass(frozen=True, slots=True)
class GivenUpPlan:
    """A plan of which no further step will run; `steps_done` ran before."""

    epoch: int
    seq: int
    steps_done: int
    outcome: StepOutcome
    passed: tuple[PassedOver, ...] = ()


class PlanQueue:
    """Plans in order of `seq` within the highest epoch seen; the head is the one that runs.

    Numbering starts at 1 in every epoch and after every snapshot. A number that was passed over (its message
    was lost with a connection) is reported as expired when a later one arrives, so that its sender notices.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.last_seq = 0
        """Of the plan taken up last in this epoch; 0 when none was since the last snapshot."""
        self._queue: deque[QueuedPlan] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, plan: BatchPlan, now_s: float) -> list[GivenUpPlan]:
        """Take a plan up. Returns the plans given up because of it (itself, when it is refused).

        One of an epoch that cannot be is ignored.
        """
        if not self.may_follow(plan.epoch):
            return []
        if plan.epoch < self.epoch:
            return [GivenUpPlan(plan.epoch, plan.seq, 0, StepOutcome.STALE_EPOCH)]
        given_up: list[GivenUpPlan] = []
        if plan.epoch > self.epoch:
            given_up += self._give_up_all(StepOutcome.STALE_EPOCH)
            self._renumber(plan.epoch)
        if plan.seq == 1 and self.last_seq > 1:
            given_up += self._give_up_all(StepOutcome.SUPERSEDED)
            self._renumber(plan.epoch)
        if plan.seq <= self.last_seq:
            return given_up
        if self.last_seq == 0 and plan.seq != 1:
            return [*given_up, GivenUpPlan(plan.epoch, plan.seq, 0, StepOutcome.EXPIRED)]
        if plan.seq > self.last_seq + 1:
            given_up.append(GivenUpPlan(plan.epoch, plan.seq - 1, 0, StepOutcome.EXPIRED))
        self.last_seq = plan.seq
        if plan.supersedes:
            given_up += self._give_up_all(StepOutcome.SUPERSEDED)
        if len(self._queue) >= MAX_PLANS:
            return [*given_up, GivenUpPlan(plan.epoch, plan.seq, 0, StepOutcome.EXPIRED)]
        self._queue.append(QueuedPlan(plan, received_s=now_s))
        return given_up

    def may_follow(self, epoch: int) -> bool:
        """False for an epoch so far ahead of the one obeyed now that no scheduler can have come to it."""
        return not self.epoch or epoch <= self.epoch + 2 * EPOCH_REACH

    def head(self, now_s: float) -> tuple[QueuedPlan | None, list[GivenUpPlan]]:
        """The plan to run a step of, and those that expired before it."""
        expired: list[GivenUpPlan] = []
        while self._queue:
            head = self._queue[0]
            if now_s - head.received_s <= head.plan.valid_for_s:
                return head, expired
            expired.append(self._given_up(self._queue.popleft(), StepOutcome.EXPIRED))
        return None, expired

    def unplanned(self, now_s: float) -> QueuedPlan:
        """A step that no plan asks for: of what earlier ones did."""
        return QueuedPlan(BatchPlan(epoch=self.epoch, seq=0), now_s, has_begun=True)

    def hold_head(self, now_s: float) -> None:
        """The head, if there is one, has begun, and nobody in it can run yet: its time counts from now on,
        but not for ever."""
        head = self._queue[0] if self._queue else None
        if head is None:
            return
        head.held_s = now_s if head.held_s is None else head.held_s
        if now_s - head.held_s < _LONGEST_HOLD_S:
            head.received_s = now_s

    def behind(self) -> Iterable[BatchPlan]:
        """The plans after the head."""
        return (queued.plan for queued in islice(self._queue, 1, None))

    def finish_head(self) -> None:
        """The head has run its last step."""
        self._queue.popleft()

    def reset(self, epoch: int) -> None:
        """Give up everything and start numbering anew (a snapshot). `epoch` is at least the present one."""
        self._queue.clear()
        self._renumber(epoch)

    def check_integrity(self) -> None:
        """AssertionError unless the queue is ordered, of one epoch, within its bound, and unfinished."""
        seqs = [queued.plan.seq for queued in self._queue]
        assert seqs == sorted(set(seqs)), f"plans out of order: {seqs}"
        assert all(queued.plan.epoch == self.epoch for queued in self._queue), "a plan of another epoch waits"
        assert not seqs or seqs[-1] <= self.last_seq, "a waiting plan is newer than the last taken up"
        assert len(seqs) <= MAX_PLANS and not any(queued.over for queued in self._queue)

    def _renumber(self, epoch: int) -> None:
        self.epoch = epoch
        self.last_seq = 0

    def _give_up_all(self, outcome: StepOutcome) -> list[GivenUpPlan]:
        given_up = [self._given_up(queued, outcome) for queued in self._queue]
        self._queue.clear()
        return given_up

    @staticmethod
    def _given_up(queued: QueuedPlan, outcome: StepOutcome) -> GivenUpPlan:
        passed = queued.passed_over
        return GivenUpPlan(queued.plan.epoch, queued.plan.seq, queued.steps_done, outcome, passed)


class PutOff(Enum):
    """Instead of a `WorkItem`."""

    PUT_OFF = "put off"
    """What the item asks for is done once the stored blocks are there that its sequence waits for."""


class WorkItem(msgspec.Struct, frozen=True, gc=False):
    """Compute tokens [first_token, end_token) of a sequence; `samples` when that is the last it has."""

    sequence: HeldSequence
    first_token: int
    end_token: int
    samples: bool
    is_decode: bool


@dataclass(slots=True)
class StepWork:
    """The work of one engine step: what to compute, for which plan."""

    queued: QueuedPlan
    items: tuple[WorkItem, ...]
    skipped: tuple[SkippedItem, ...]
    ended: tuple[HeldSequence, ...]
    """Ended since the last report, before this iteration."""
    hits: tuple[PrefixHit, ...] = ()
    shorts: tuple[ShortStart, ...] = ()
    passed: tuple[SequenceRef, ...] = ()
    """Decodes that are put off."""
    waits: bool = False
    """A sequence of the plan is put off."""
    prefilled_tokens: int = 0
    preceding_tokens: int = 0
    """Number of tokens before each prompt token in its sequence, summed up."""
    decoded_tokens: int = 0
    context_tokens: int = 0
    """Number of tokens that the decodes attend to."""

    def __post_init__(self) -> None:
        for item in self.items:
            first, end = item.first_token, item.end_token
            if item.is_decode:
                self.decoded_tokens += 1
                self.context_tokens += end
            else:
                self.prefilled_tokens += end - first
                self.preceding_tokens += (end * end - first * first) // 2

    @property
    def has_news(self) -> bool:
        """Whether the scheduler needs a report at once."""
        return bool(self.ended or self.skipped or self.hits or self.shorts)
