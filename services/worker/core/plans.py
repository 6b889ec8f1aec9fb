"""The queue of received plans: epoch fencing, order, expiry, supersession. Pure.

The queue ignores sequences: `services.worker.core.sequences` decides which items of a plan apply, and the
work of one step of the head is a `StepWork`."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from operator import attrgetter

import msgspec

from services.worker.core.decodes import DecodeBatch
from services.worker.core.sequence import HeldSequence
from shared.messages.plans import BatchPlan, PassedOver, PrefixHit, ShortStart, SkippedItem, StepOutcome
from shared.messages.sequence import SequenceRef
from shared.messages.values import EPOCH_REACH

_IS_ALIVE = attrgetter("alive")
MAX_PLANS = 64
"""Maximum number of queued plans; a scheduler sends one or two ahead."""

_LONGEST_HOLD_S = 5.0
"""Maximum time that a plan is held while all its sequences wait; then it expires as usual."""


@dataclass(slots=True, eq=False)
class QueuedPlan:
    """A plan and its progress."""

    plan: BatchPlan
    """Number 0: work without a plan (`PlanQueue.unplanned`)."""
    received_s: float
    steps_done: int = 0
    steps_begun: int = 0
    skips_reported: set[SequenceRef] = field(default_factory=set)
    """Sequences whose skipped items were reported."""
    ended: set[SequenceRef] = field(default_factory=set)
    """Sequences that ended while the plan ran; later steps ignore their items."""
    has_begun: bool = False
    """Its first step was prepared; only decodes are left."""
    held_s: float | None = None
    """Since when all its sequences wait for blocks."""
    decoding: list[HeldSequence | None] | None = None
    """The sequence of each of its decodes, once its first step was prepared."""
    passed: Counter[SequenceRef] = field(default_factory=Counter)
    """Number of steps in which each decode was put off."""

    @property
    def over(self) -> bool:
        return self.steps_done >= self.plan.steps

    @property
    def has_steps_left(self) -> bool:
        """Whether not all of its steps have begun."""
        return self.steps_begun < self.plan.steps

    def is_valid(self, now_s: float) -> bool:
        return now_s - self.received_s <= self.plan.valid_for_s

    @property
    def passed_over(self) -> tuple[PassedOver, ...]:
        """Put-off decodes for a report."""
        return tuple(PassedOver(ref=ref, steps=steps) for ref, steps in self.passed.items())


@dataclass(frozen=True, slots=True)
class GivenUpPlan:
    """A plan that stops after `steps_done` steps."""

    epoch: int
    seq: int
    steps_done: int
    outcome: StepOutcome
    passed: tuple[PassedOver, ...] = ()


class PlanQueue:
    """Plans in order of `seq` within the highest epoch seen; the head runs. Numbers start at 1 in every epoch
    and after every snapshot. A missing number is reported as expired once a later plan arrives, so that the
    scheduler notices the loss."""

    def __init__(self) -> None:
        self.epoch = 0
        self.last_seq = 0
        """Number of the last plan accepted in this epoch; 0: none since the last snapshot."""
        self._queue: deque[QueuedPlan] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, plan: BatchPlan, now_s: float) -> list[GivenUpPlan]:
        """Queue a plan. Returns the plans given up because of it; itself when it is refused. A plan with an
        impossible epoch is ignored."""
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
        """False for an epoch so far ahead that no scheduler can have reached it."""
        return not self.epoch or epoch <= self.epoch + 2 * EPOCH_REACH

    def head(self, now_s: float) -> tuple[QueuedPlan | None, list[GivenUpPlan]]:
        """Return the plan whose step begins next, and the plans that expired before it."""
        expired: list[GivenUpPlan] = []
        for queued in list(self._queue):
            if queued.has_steps_left:
                if queued.is_valid(now_s):
                    return queued, expired
                self._queue.remove(queued)
                expired.append(self._given_up(queued, StepOutcome.EXPIRED))
        return None, expired

    def first(self) -> QueuedPlan | None:
        """Return the plan whose step begins next, even if it expired."""
        return next((queued for queued in self._queue if queued.has_steps_left), None)

    def is_next(self, plan: BatchPlan) -> bool:
        """Whether `offer` adds the plan to the others and gives up none."""
        is_in_order = plan.seq == self.last_seq + 1 and self.last_seq > 0
        return plan.epoch == self.epoch and is_in_order and not plan.supersedes

    def unplanned(self, now_s: float) -> QueuedPlan:
        """Return a step without a plan, for work that earlier plans put off."""
        return QueuedPlan(BatchPlan(epoch=self.epoch, seq=0), now_s, has_begun=True)

    def hold_head(self, now_s: float) -> None:
        """Postpone the head's expiry while none of its sequences can run, up to a limit."""
        head = self._queue[0] if self._queue else None
        if head is None:
            return
        head.held_s = now_s if head.held_s is None else head.held_s
        if now_s - head.held_s < _LONGEST_HOLD_S:
            head.received_s = now_s

    def behind(self) -> Iterable[BatchPlan]:
        """Return the plans after the head."""
        return (queued.plan for queued in islice(self._queue, 1, None))

    def finish_head(self) -> None:
        """Remove the head after its last step."""
        self._queue.popleft()

    def reset(self, epoch: int) -> None:
        """Drop all plans and restart numbering, for a snapshot. `epoch` is at least the present one."""
        self._queue.clear()
        self._renumber(epoch)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the queue is ordered, of one epoch, bounded and unfinished."""
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
    """The result of `prepare` in place of a `WorkItem`."""

    PUT_OFF = "put off"
    """The item runs once the stored blocks that its sequence waits for arrive."""


class WorkItem(msgspec.Struct, frozen=True, gc=False):
    """Tokens [first_token, end_token) of a sequence to compute; `samples` if its last token is among them."""

    sequence: HeldSequence
    first_token: int
    end_token: int
    samples: bool
    is_decode: bool
    guessed: tuple[int, ...] = ()
    """Guesses of the tokens from the first unknown one to this one (`core.drafts`). Empty: it is known."""

    @property
    def is_right(self) -> bool:
        """Whether the guess of this item's token is what the item before it sampled."""
        tokens = self.sequence.tokens
        return len(tokens) == self.end_token and tokens[-1] == self.guessed[-1]


@dataclass(slots=True)
class StepWork:
    """The work of one engine step: what to compute, for which plan."""

    queued: QueuedPlan
    others: tuple[WorkItem, ...]
    """Its rows, after those of `decodes`."""
    skipped: tuple[SkippedItem, ...]
    ended: tuple[HeldSequence, ...]
    """Sequences that ended since the last report, before this step."""
    hits: tuple[PrefixHit, ...] = ()
    shorts: tuple[ShortStart, ...] = ()
    passed: tuple[SequenceRef, ...] = ()
    """Decodes that were put off in this step."""
    waits: bool = False
    """A sequence of the plan is put off."""
    decodes: DecodeBatch | None = None
    prefilled_tokens: int = 0
    preceding_tokens: int = 0
    """Number of tokens before each prompt token in its sequence, summed up."""
    decoded_tokens: int = 0
    context_tokens: int = 0
    """Number of tokens that the decodes attend to."""

    def __post_init__(self) -> None:
        if self.decodes is not None:
            self.decoded_tokens = len(self.decodes)
            self.context_tokens = int(self.decodes.first.sum()) + self.decoded_tokens
        for item in self.others:
            first, end = item.first_token, item.end_token
            if item.is_decode:
                self.decoded_tokens += 1
                self.context_tokens += end
            else:
                self.prefilled_tokens += end - first
                self.preceding_tokens += (end * end - first * first) // 2

    def __len__(self) -> int:
        return len(self.others) + (0 if self.decodes is None else len(self.decodes))

    @property
    def items(self) -> tuple[WorkItem, ...]:
        """All rows one by one, in order; it takes a while."""
        if self.decodes is None:
            return self.others
        rows = zip(self.decodes.group.sequences, self.decodes.first.tolist(), strict=True)
        return (*(WorkItem(sequence, at, at + 1, True, True) for sequence, at in rows), *self.others)

    @property
    def places(self) -> dict[int, int]:
        """The row of each sequence that samples a token, by its `id`."""
        sequences = [] if self.decodes is None else self.decodes.group.sequences
        found = {id(sequence): row for row, sequence in enumerate(sequences)}
        others = enumerate(self.others, len(sequences))
        return found | {id(item.sequence): row for row, item in others if item.samples}

    @property
    def is_alive(self) -> bool:
        """Whether one of its sequences is."""
        sequences = () if self.decodes is None else self.decodes.group.sequences
        return any(map(_IS_ALIVE, sequences)) or any(item.sequence.alive for item in self.others)

    @property
    def has_news(self) -> bool:
        """Whether the scheduler needs a report at once."""
        return bool(self.ended or self.skipped or self.hits or self.shorts)
