"""The plans outstanding at a worker, and whether its reports match them: if not, that is `Trouble`. Pure.

plans 4 (one step) and 5 (8 decode steps) are out; plan 6 supersedes 5 to start a new sequence
report 11: plan 4 ran, over      report 12: plan 5 ran 3 steps, superseded → 5 tokens are taken back
report 14: 13 is missing → Trouble: it is unknown what ran, so a snapshot is requested
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import PlannedBatch
from shared.messages.plans import BatchPlan, SkipReason, StepOutcome, WorkerStepped
from shared.messages.reports import WorkerReported
from shared.messages.sequence import SequenceRef


@dataclass(frozen=True, slots=True)
class Trouble:
    """A mismatch of plans and reports. `culprits`: sequences that caused it, if known."""

    reason: str
    culprits: tuple[SequenceRef, ...] = ()
    is_shortage: bool = False
    """Whether only blocks were missing, for example after the worker lent some."""


@dataclass(slots=True, eq=False)
class SentPlan:
    """A sent plan that is not known to be over, and its batch."""

    batch: PlannedBatch
    plan: BatchPlan
    sent_s: float
    can_be_cut: bool
    """Whether it only decodes, so that it may end after any step or never run."""
    steps_done: int = 0
    passed: dict[SequenceRef, int] = field(default_factory=dict)
    """Number of steps in which each decode was put off; known once the plan is over."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Result of one report: the plan that ran a step and the plans that are over."""

    ran: SentPlan | None = None
    over: tuple[SentPlan, ...] = ()


class OutstandingPlans:
    """The plans outstanding since the worker's last snapshot, whose last step report was `stepped_seq`."""

    def __init__(self, rules: Rules, epoch: int, stepped_seq: int, now_s: float) -> None:
        self._rules = rules
        self._epoch = epoch
        self._stepped_seq = stepped_seq
        self._plans: deque[SentPlan] = deque()
        self._progress_s = now_s
        self._behind: tuple[int, float] | None = None
        self.steps = 0
        """Number of steps not reported as run."""
        self.is_pliable = True
        """Whether all outstanding steps may end after any step."""
        self.is_cut = False
        """Whether a superseding plan is out and the end of the plans before it is unknown."""

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, batch: PlannedBatch, plan: BatchPlan, now_s: float) -> None:
        if not self._plans:
            self._progress_s = now_s
        self._plans.append(SentPlan(batch, plan, now_s, batch.decodes_only and not plan.drops))
        self._count()

    def _count(self) -> None:
        self.steps, self.is_pliable, self.is_cut = 0, True, False
        for number, sent in enumerate(self._plans):
            self.steps += sent.batch.steps - sent.steps_done
            self.is_pliable = self.is_pliable and sent.can_be_cut
            self.is_cut = self.is_cut or (number > 0 and sent.plan.supersedes)

    def on_stepped(
        self, event: WorkerStepped, is_over: Callable[[SequenceRef], bool], now_s: float
    ) -> Progress | Trouble:
        """Apply a step report. `is_over` returns whether a sequence is known to no longer run there."""
        if event.seq <= self._stepped_seq:
            return Progress()
        if event.seq != self._stepped_seq + 1:
            return Trouble(f"step reports {self._stepped_seq + 1} to {event.seq - 1} are missing")
        self._stepped_seq = event.seq
        if event.epoch != self._epoch:
            return Progress()
        sent = next((sent for sent in self._plans if sent.plan.seq == event.plan_seq), None)
        superseded = event.outcome is StepOutcome.SUPERSEDED and sent is not None and sent.can_be_cut
        if sent is not None and event.outcome is not StepOutcome.RAN and not superseded:
            return Trouble(f"plan {event.plan_seq} was given up: {event.outcome}")
        # A chunk that waits for blocks from elsewhere runs or is skipped at the end of its plan.
        if event.skipped and (skipped := [item for item in event.skipped if not is_over(item.ref)]):
            reasons = ", ".join(sorted({str(item.reason) for item in skipped}))
            is_shortage = all(item.reason is SkipReason.NO_BLOCKS for item in skipped)
            return Trouble(f"skipped as {reasons}", tuple(item.ref for item in skipped), is_shortage)
        return Progress() if sent is None else self._advance(sent, event, now_s)

    def _advance(self, sent: SentPlan, event: WorkerStepped, now_s: float) -> Progress | Trouble:
        over: list[SentPlan] = []
        while self._plans[0] is not sent:
            if not self._plans[0].can_be_cut:
                self._count()
                return Trouble(f"plan {self._plans[0].plan.seq} was passed over")
            over.append(self._plans.popleft())
        sent.steps_done = event.steps_done
        sent.passed = {one.ref: one.steps for one in event.passed} if event.passed else {}
        self._progress_s = now_s
        if event.plan_over:
            over.append(self._plans.popleft())
        self._count()
        return Progress(sent if event.outcome is StepOutcome.RAN else None, tuple(over))

    def on_heartbeat(self, report: WorkerReported, now_s: float) -> Trouble | None:
        """Compare the heartbeat's counters with received reports and sent plans."""
        if report.stepped_seq <= self._stepped_seq:
            self._behind = None
        elif self._behind is None or self._stepped_seq >= self._behind[0]:
            self._behind = (report.stepped_seq, now_s)
        elif now_s - self._behind[1] > self._rules.report_grace_s:
            return Trouble(f"step reports up to {self._behind[0]} were lost")
        newest = self._plans[-1] if self._plans else None
        unseen = newest is not None and report.epoch == self._epoch and report.plan_seq < newest.plan.seq
        if unseen and newest is not None and now_s - newest.sent_s > self._rules.plan_grace_s:
            return Trouble(f"plan {newest.plan.seq} never reached the worker")
        return None

    def on_tick(self, now_s: float, longest_step_s: float) -> Trouble | None:
        """Return Trouble if plans make no progress; a hung engine still sends heartbeats."""
        patience_s = self._rules.snapshot_patience_s + self._rules.valid_for_s + longest_step_s
        if self._plans and now_s - self._progress_s > patience_s:
            return Trouble(f"no step of plan {self._plans[0].plan.seq} in {patience_s:g} s")
        return None

    def check_integrity(self) -> None:
        seqs = [sent.plan.seq for sent in self._plans]
        assert not seqs or seqs == list(range(seqs[0], seqs[0] + len(seqs))), f"plans out of order: {seqs}"
        assert all(sent.steps_done <= sent.batch.steps for sent in self._plans)
