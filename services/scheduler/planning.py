"""The plan pipeline of one worker: what is outstanding there, and whether its reports still match the projection.

Plans are made ahead: while fewer than `outstanding_steps` steps are left, the policy is asked for the next batch. What
the worker reports is compared with what was sent; anything unexpected is a `Trouble`, and the one cure for all troubles
is a resync: no plan until the worker's snapshot has been adopted. Pure; knows one worker and nothing of placement.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from services.scheduler.effects import AskPrediction, Effect, SendPlan
from services.scheduler.policy.contract import BatchPolicy, PlannedBatch
from services.scheduler.rules import Rules
from services.scheduler.state import HELD, Phase, Sequence
from shared.messages.plans import BatchPlan, Decode, Preemption, PrefillChunk, StepOutcome, WorkerStepped
from shared.messages.reports import Capacity, WorkerReported
from shared.messages.sequence import SequenceKey, SequenceRef, SequenceSpec

MAX_OUTSTANDING_PLANS = 4
_SMOOTH_REPORTS = 16
"""So many reports without trouble clear the names of those that caused the last one."""


class Sync(StrEnum):
    UNSYNCED = "unsynced"
    """Heard of; no snapshot asked yet."""
    ASKED = "asked"
    IN_STEP = "in_step"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Projection and worker have parted. `culprits` caused it, as far as that can be said."""

    reason: str
    culprits: tuple[SequenceRef, ...] = ()


@dataclass(slots=True)
class Outstanding:
    """A plan that was sent and is not known to be over."""

    batch: PlannedBatch
    plan: BatchPlan
    sent_s: float
    steps_done: int = 0

    @property
    def seq(self) -> int:
        return self.plan.seq

    @property
    def can_be_cut(self) -> bool:
        """Nothing but decodes in it: it may end between any two steps, or never run."""
        return self.batch.decodes_only and not self.plan.drops


@dataclass(slots=True)
class Lane:
    """One incarnation of one worker. `sequences` is the roster's table, read only."""

    worker_id: str
    incarnation: int
    epoch: int
    rules: Rules
    sequences: Mapping[SequenceKey, Sequence]
    report: WorkerReported
    """The latest."""
    heard_s: float
    sync: Sync = Sync.UNSYNCED
    asked_s: float = 0.0
    """When the resync began."""
    ask_again_s: float | None = None
    """When to repeat the question for a snapshot; None while it is open."""
    policy: BatchPolicy | None = None
    strangers: dict[SequenceRef, int] = field(default_factory=dict)
    """Alive there by so many heartbeats, yet not known to be there."""
    barren_resyncs: int = 0
    """Since a step ran."""
    _unplanned_blocks: int = 0
    """Of the pool, those that neither free blocks nor sequences account for."""
    _plan_seq: int = 0
    _stepped_seq: int = 0
    _outstanding: deque[Outstanding] = field(default_factory=deque)
    _drops: dict[SequenceRef, None] = field(default_factory=dict)
    _cut: bool = False
    """A superseding plan is on its way: how far the earlier ones got is open, so nothing more is planned."""
    _urgent: bool = False
    _behind: tuple[int, float] | None = None
    _smooth: int = 0
    _progress_s: float = 0.0
    _last_keys: tuple[SequenceKey, ...] = ()

    @property
    def outstanding_steps(self) -> int:
        return sum(plan.batch.steps - plan.steps_done for plan in self._outstanding)

    @property
    def idle(self) -> bool:
        return not self._outstanding

    def begin(
        self, policy: BatchPolicy, snapshot: WorkerReported, capacity_blocks: int, now_s: float
    ) -> None:
        """In step again: plans are numbered from 1, reports go on after the snapshot's."""
        self._reset()
        self.sync, self.policy, self.report = Sync.IN_STEP, policy, snapshot
        self._stepped_seq, self._progress_s = snapshot.stepped_seq, now_s
        self._unplanned_blocks = _lasting_blocks(snapshot.capacity) - capacity_blocks

    def resize(self, capacity: Capacity, now_s: float) -> None:
        """Follow the worker's pool; what moves with every allocation (free, evictable) is the policy's own account."""
        if self.policy is not None and _lasting_blocks(capacity) != _lasting_blocks(self.report.capacity):
            self.policy.on_resized(max(0, _lasting_blocks(capacity) - self._unplanned_blocks), now_s)

    def lose_step(self, now_s: float) -> None:
        """A snapshot is asked for; the policy's projection is void."""
        self._reset()
        if self.sync is not Sync.ASKED:
            self.asked_s = now_s
        self.sync, self.ask_again_s = Sync.ASKED, None

    def _reset(self) -> None:
        self.policy, self._behind, self._cut, self._urgent = None, None, False, False
        self._plan_seq = self._smooth = 0
        self._outstanding.clear()
        self._drops.clear()
        self.strangers.clear()

    def arrive(self, sequence: Sequence, now_s: float) -> None:
        """A sequence that the worker does not hold; a long plan may be cut short for it."""
        if self.policy is not None:
            self.policy.on_arrival(sequence.task(), now_s)
            self._urgent = True

    def end(self, key: SequenceKey, now_s: float) -> None:
        if self.policy is not None:
            self.policy.on_ended(key, now_s)

    def drop(self, ref: SequenceRef) -> None:
        """The next plan, if need be one with nothing else in it, makes the worker forget this attempt."""
        self._drops[ref] = None

    def newest_planned(self) -> Sequence | None:
        """The latest arrival among those in the last plan: the one to give up when no other cause can be named."""
        known = [self.sequences[key] for key in self._last_keys if key in self.sequences]
        here = [
            sequence for sequence in known if sequence.worker_id == self.worker_id and sequence.phase in HELD
        ]
        return max(here, key=lambda sequence: sequence.order, default=None)

    def next_plans(self, now_s: float) -> list[Effect]:
        """Plans until enough steps are outstanding; also what the policy wants predicted."""
        effects: list[Effect] = []
        policy = self.policy
        while policy is not None and not self._cut and len(self._outstanding) < MAX_OUTSTANDING_PLANS:
            can_cut = self._urgent and self._can_cut()
            if self.outstanding_steps >= self.rules.outstanding_steps and not can_cut:
                break
            self._urgent = False
            batch = policy.plan(now_s)
            if batch is None:
                break
            self._cut = can_cut and bool(batch.prefills) and not batch.preemptions
            effects.append(self._send(batch, now_s))
            effects += self._questions(batch)
        if policy is not None and self._drops and not self._outstanding:
            effects.append(self._send(PlannedBatch(), now_s))
        return effects

    def _can_cut(self) -> bool:
        """Whether what is outstanding is long, and may end between any two steps."""
        return self.outstanding_steps > 2 and all(plan.can_be_cut for plan in self._outstanding)

    def _send(self, batch: PlannedBatch, now_s: float) -> SendPlan:
        starts = self._starts(batch)
        self._project(batch, now_s)
        self._plan_seq += 1
        plan = BatchPlan(
            epoch=self.epoch,
            seq=self._plan_seq,
            steps=batch.steps,
            valid_for_s=self.rules.valid_for_s,
            supersedes=self._cut,
            drops=tuple(self._drops),
            preemptions=tuple(
                Preemption(ref=self._ref(item.key), mode=item.mode) for item in batch.preemptions
            ),
            starts=starts,
            prefills=tuple(
                PrefillChunk(
                    ref=self._ref(item.key),
                    first_token=item.first_token,
                    end_token=item.end_token,
                    allocated_blocks=item.allocated_blocks,
                )
                for item in batch.prefills
            ),
            decodes=tuple(
                Decode(ref=self._ref(item.key), allocated_blocks=item.allocated_blocks)
                for item in batch.decodes
            ),
        )
        self._drops.clear()
        if not self._outstanding:
            self._progress_s = now_s
        self._outstanding.append(Outstanding(batch, plan, now_s))
        self._last_keys = (*(item.key for item in batch.prefills), *(item.key for item in batch.decodes))
        return SendPlan(self.worker_id, plan)

    def _ref(self, key: SequenceKey) -> SequenceRef:
        return self.sequences[key].ref

    def _starts(self, batch: PlannedBatch) -> tuple[SequenceSpec, ...]:
        placed = [self.sequences[item.key] for item in batch.prefills]
        return tuple(
            sequence.spec
            for sequence in placed
            if sequence.phase is Phase.PLACED and sequence.spec is not None
        )

    def _questions(self, batch: PlannedBatch) -> list[Effect]:
        asked = [(self.sequences[question.key], question.generated_tokens) for question in batch.questions]
        return [
            AskPrediction(sequence.ref, sequence.spec.prompt, sequence.max_tokens, generated_tokens)
            for sequence, generated_tokens in asked
            if sequence.spec is not None
        ]

    def _project(self, batch: PlannedBatch, now_s: float) -> None:
        for preemption in batch.preemptions:
            self.sequences[preemption.key].move_to(Phase.WAITING)
        for prefill in batch.prefills:
            sequence = self.sequences[prefill.key]
            sequence.move_to(Phase.PREFILLING)
            sequence.started_s = now_s if sequence.started_s is None else sequence.started_s
        for decode in batch.decodes:
            self.sequences[decode.key].move_to(Phase.DECODING)

    def on_stepped(self, event: WorkerStepped, now_s: float) -> Trouble | None:
        """A report of this incarnation; its ends have been taken note of before."""
        if self.sync is not Sync.IN_STEP or event.seq <= self._stepped_seq:
            return None
        if event.seq != self._stepped_seq + 1:
            return Trouble(f"step reports {self._stepped_seq + 1} to {event.seq - 1} are missing")
        self._stepped_seq = event.seq
        plan = next((plan for plan in self._outstanding if plan.seq == event.plan_seq), None)
        if event.epoch != self.epoch or plan is None:
            return None
        if event.outcome is not StepOutcome.RAN and not (
            event.outcome is StepOutcome.SUPERSEDED and plan.can_be_cut
        ):
            return Trouble(f"plan {event.plan_seq} was given up: {event.outcome}")
        culprits = tuple(item.ref for item in event.skipped if not self._is_over(item.ref))
        if culprits:
            reasons = ", ".join(sorted({str(item.reason) for item in event.skipped if item.ref in culprits}))
            return Trouble(f"skipped as {reasons}", culprits)
        return self._advance(plan, event, now_s)

    def _is_over(self, ref: SequenceRef) -> bool:
        sequence = self.sequences.get(ref.key)
        return sequence is None or sequence.ref.attempt > ref.attempt or sequence.worker_id != self.worker_id

    def _advance(self, plan: Outstanding, event: WorkerStepped, now_s: float) -> Trouble | None:
        while self._outstanding[0] is not plan:
            passed = self._outstanding[0]
            if not passed.can_be_cut:
                return Trouble(f"plan {passed.seq} was passed over")
            self._finish(self._outstanding.popleft(), now_s)
        plan.steps_done = event.steps_done
        self._progress_s = now_s
        if event.outcome is StepOutcome.RAN:
            self._confirm(plan)
            self.barren_resyncs = 0
            self._smooth += 1
        if event.plan_over:
            self._finish(self._outstanding.popleft(), now_s)
        self._cut = self._cut and len(self._outstanding) > 1
        return None

    def _confirm(self, plan: Outstanding) -> None:
        for spec in plan.plan.starts:
            sequence = self.sequences.get(spec.ref.key)
            if sequence is not None and sequence.ref == spec.ref:
                sequence.confirmed = True
        if self._smooth >= _SMOOTH_REPORTS:
            self._smooth = 0
            for sequence in (self.sequences.get(key) for key in self._last_keys):
                if sequence is not None:
                    sequence.faults = 0

    def _finish(self, plan: Outstanding, now_s: float) -> None:
        """The plan is over; tokens that were planned and not computed are taken back from the projection."""
        if self.policy is not None:
            for item in plan.batch.decodes:
                missing = item.tokens - min(item.tokens, plan.steps_done)
                if missing:
                    self.policy.on_short(item.key, missing, now_s)

    def on_heartbeat(self, report: WorkerReported, now_s: float) -> Trouble | None:
        """Compare what the heartbeat counts with what arrived."""
        if self.sync is not Sync.IN_STEP:
            return None
        if report.stepped_seq <= self._stepped_seq:
            self._behind = None
        elif self._behind is None:
            self._behind = (report.stepped_seq, now_s)
        elif self._stepped_seq >= self._behind[0]:
            self._behind = (report.stepped_seq, now_s)
        elif now_s - self._behind[1] > self.rules.report_grace_s:
            return Trouble(f"step reports up to {report.stepped_seq} were lost")
        newest = self._outstanding[-1] if self._outstanding else None
        if newest and report.plan_seq < newest.seq and now_s - newest.sent_s > self.rules.plan_grace_s:
            return Trouble(f"plan {newest.seq} never reached the worker")
        return None

    def on_tick(self, now_s: float) -> Trouble | None:
        """Outstanding plans must move: a worker whose engine hangs still sends heartbeats."""
        patience_s = self.rules.snapshot_patience_s + self.rules.valid_for_s
        if self._outstanding and now_s - self._progress_s > patience_s:
            return Trouble(f"no step of plan {self._outstanding[0].seq} in {patience_s:g} s")
        return None

    def check_integrity(self) -> None:
        seqs = [plan.seq for plan in self._outstanding]
        assert seqs == sorted(set(seqs)) and (not seqs or seqs[-1] == self._plan_seq)
        assert all(plan.steps_done <= plan.batch.steps for plan in self._outstanding)
        assert (self.policy is not None) == (self.sync is Sync.IN_STEP)
        assert len(self._outstanding) <= MAX_OUTSTANDING_PLANS + 1
        if self.policy is not None:
            self.policy.check_integrity()


def _lasting_blocks(capacity: Capacity) -> int:
    return capacity.total_blocks - capacity.doomed_blocks
