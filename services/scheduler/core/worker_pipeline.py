"""One worker's pipeline: a policy that decides, the plans it made, and whether they are still in step with
the worker.

Plans are made ahead: while fewer than `outstanding_steps` steps are left (of short ones: fewer than last for
`ahead_s`), the policy is asked for the next batch; only the step with which that comes about is reported. An
arrival that can start cuts a long plan short. The one cure for any `Trouble` is a resync: no plan until the
worker's snapshot has been adopted. Pure; knows one worker and nothing of placement.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from math import ceil

from services.scheduler.core.effects import AskPrediction, Effect, NoteRelief, SendPlan
from services.scheduler.core.guarded_policy import GuardedPolicy
from services.scheduler.core.outstanding import OutstandingPlans, Progress, SentPlan, Trouble
from services.scheduler.core.rules import ReliefRules, Rules
from services.scheduler.core.sequence import Phase, Sequence
from services.scheduler.policy.contract import PlannedBatch, PlannedPreemption
from services.scheduler.policy.fleet_queue import Feed
from services.scheduler.policy.relief import (
    LADDER,
    MemoryPressure,
    Relief,
    ReliefSpeeds,
    Rung,
    Victim,
    next_relief,
)
from shared.errors import InternalError, ModelMismatch
from shared.messages.commands import LengthPrediction
from shared.messages.plans import BatchPlan, Decode, Preemption, PreemptMode, PrefillChunk, WorkerStepped
from shared.messages.reports import SequenceState, WorkerReported
from shared.messages.sequence import SequenceKey, SequenceRef, SequenceSpec

_OTHERS = frozenset(LADDER) - {Rung.SWAP, Rung.RECOMPUTE}


def speeds_of(report: WorkerReported) -> ReliefSpeeds:
    """As the worker measured them; what it did not is 0."""
    return ReliefSpeeds(
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        decode_step_s=report.decode_step_s,
        host_blocks_per_s=1.0 / report.host_block_s if report.host_block_s > 0 else 0.0,
        remote_attention_s=report.remote_block_s,
        stall_s=report.expand_stall_s or 0.0,
    )


@dataclass(slots=True)
class Preempting:
    """Of one worker. `counts`: how often, by what became of the KV."""

    counts: Counter[PreemptMode] = field(default_factory=Counter)
    _swapped_blocks: int = 0
    """Since the last heartbeat: what that says of the host is before them."""

    def decide(
        self, report: WorkerReported, item: PlannedPreemption, rules: ReliefRules
    ) -> tuple[PreemptMode, Relief | None]:
        """See `weigh`; `report` is the worker's latest."""
        mode, relief = weigh(report, item, report.swap_room_blocks - self._swapped_blocks, rules)
        self.counts[mode] += 1
        self._swapped_blocks += item.held_blocks if mode is PreemptMode.SWAP else 0
        return mode, relief

    def on_heartbeat(self) -> None:
        self._swapped_blocks = 0


def weigh(
    report: WorkerReported, item: PlannedPreemption, room_blocks: int, rules: ReliefRules
) -> tuple[PreemptMode, Relief | None]:
    """How `item` gives up its blocks, and why; None where nothing was weighed. `room_blocks`: the host keeps
    so many more."""
    if not rules.enabled or item.held_blocks < 1:
        return PreemptMode.RECOMPUTE, None
    whole_blocks = item.computed_tokens // report.block_tokens
    pressure = MemoryPressure(
        needed_blocks=item.held_blocks,
        block_tokens=report.block_tokens,
        running=1,
        horizon_steps=0,
        speeds=speeds_of(report),
        host_tier_blocks=room_blocks if whole_blocks else 0,
        victim=Victim(blocks=item.held_blocks, tokens=item.computed_tokens, remaining_tokens=0),
    )
    relief = next_relief(pressure, rules.switched_off | _OTHERS)
    is_swap = relief.chosen is not None and relief.chosen.rung is Rung.SWAP
    return PreemptMode.SWAP if is_swap else PreemptMode.RECOMPUTE, relief


MAX_OUTSTANDING_PLANS = 4
_LINGER_S = 0.06
"""So long an attempt runs on that was replaced by one that is to catch up with it."""
_SMOOTH_REPORTS = 16
"""So many reports without trouble clear the names of those that caused the last one."""


class Sync(StrEnum):
    UNSYNCED = "unsynced"
    """Heard of; no snapshot asked yet."""
    ASKED = "asked"
    IN_STEP = "in_step"
    REFUSED = "refused"
    """It serves something else than the others."""


@dataclass(slots=True, eq=False)
class WorkerPipeline:
    """One incarnation of one worker. `sequences` is the roster's table; only phases are changed in it."""

    worker_id: str
    incarnation: int
    epoch: int
    rules: Rules
    sequences: Mapping[SequenceKey, Sequence]
    report: WorkerReported
    """The latest."""
    since_s: float
    number: int = 0
    """The larger, the later it came."""
    changed: dict[str, "WorkerPipeline"] = field(default_factory=dict)
    """The roster's: pipelines to which something happened since they planned last."""
    feed: Feed = field(default_factory=Feed)
    """The roster's: who waits at workers."""
    unready: dict[str, None] = field(default_factory=dict)
    """The roster's: workers that are not in step."""
    sync: Sync = Sync.UNSYNCED
    asked_s: float = 0.0
    """When the resync began."""
    ask_again_s: float | None = None
    """When to repeat the question for a snapshot; None while it is open."""
    policy: GuardedPolicy | None = None
    """None unless in step."""
    policy_failures: int = 0
    """How often its policy has raised since its worker last ran smoothly."""
    refusal: ModelMismatch | None = None
    """Why it is refused."""
    planned_s: float = 0.0
    """When something was last planned there."""
    strangers: dict[SequenceRef, int] = field(default_factory=dict)
    """Alive there by so many heartbeats, yet not known to be there."""
    preempting: Preempting = field(default_factory=Preempting)
    _outstanding: OutstandingPlans = field(init=False)
    _plan_seq: int = field(default=0, init=False)
    _drops: dict[SequenceRef, None] = field(default_factory=dict, init=False)
    _lingering: dict[SequenceKey, tuple[SequenceRef, float]] = field(default_factory=dict, init=False)
    """Attempts that were replaced and run on until then: their readers change over meanwhile."""
    _decoding: dict[SequenceKey, SequenceRef] = field(default_factory=dict, init=False)
    """Those that decode here, by the last plan they were in: of these a plan has nothing to look up."""
    _urgent: bool = field(default=False, init=False)
    _midway: bool = field(default=False, init=False)
    _smooth_reports: int = field(default=0, init=False)
    _last_batch: PlannedBatch = field(default_factory=PlannedBatch, init=False)

    def __post_init__(self) -> None:
        self._outstanding = OutstandingPlans(self.rules, self.epoch, 0, self.since_s)

    def touch(self) -> None:
        """Something happened that may let it plan."""
        self.changed[self.worker_id] = self

    @property
    def outstanding_steps(self) -> int:
        return self._outstanding.steps

    def begin(self, policy: GuardedPolicy, snapshot: WorkerReported, now_s: float) -> None:
        """In step again: plans are numbered from 1, reports go on after the snapshot's."""
        self._clear(now_s, snapshot.stepped_seq)
        self.sync, self.policy, self.report = Sync.IN_STEP, policy, snapshot
        self.feed.join(self.worker_id)
        self.unready.pop(self.worker_id, None)

    def lose_step(self, now_s: float) -> None:
        """A snapshot is asked for; the policy's projection is void."""
        self._clear(now_s, 0)
        if self.sync is not Sync.ASKED:
            self.asked_s = now_s
        self.sync, self.ask_again_s, self.refusal = Sync.ASKED, None, None

    def refuse(self, error: ModelMismatch) -> None:
        """No work for it; a snapshot may be asked for when the others are gone."""
        self.sync, self.refusal = Sync.REFUSED, error

    def _clear(self, now_s: float, stepped_seq: int) -> None:
        self._outstanding = OutstandingPlans(self.rules, self.epoch, stepped_seq, now_s)
        self.policy, self._urgent, self._midway = None, False, False
        self._plan_seq = self._smooth_reports = 0
        self._drops.clear()
        self._lingering.clear()
        self._decoding.clear()
        self.strangers.clear()
        self.feed.leave(self.worker_id)
        self.unready[self.worker_id] = None
        self.touch()

    def resize(self, report: WorkerReported, now_s: float) -> None:
        """Follow the pool; what moves with every allocation (free, evictable) is the policy's own account."""
        capacity_blocks = planned_capacity_blocks(report)
        if self.policy is not None and capacity_blocks != planned_capacity_blocks(self.report):
            self.policy.on_resized(capacity_blocks, now_s)

    def arrive(self, sequence: Sequence, now_s: float, *, midway: bool = False) -> None:
        """A sequence that the worker does not hold; a long plan may be cut short for it, and any that may
        be where a reader waits midway in its answer."""
        if self.policy is not None:
            self._settle(sequence.key, now_s)
            self.policy.on_arrival(sequence.task(is_open=True), now_s)
            self.note_waiting(sequence)
            self._urgent = True
            self._midway = self._midway or midway
            self.touch()

    def note_waiting(self, sequence: Sequence) -> None:
        """The policy has it; it has not started, or gave up what it had. What is larger than the worker waits
        for others' memory, and takes nobody's turn. What the worker lists itself counts there: its tokens
        are not told a second time."""
        is_listed = sequence.phase is Phase.WAITING
        tokens = 0 if is_listed else sequence.prompt_tokens + sequence.generated_tokens
        capacity_tokens = planned_capacity_blocks(self.report) * self.report.block_tokens
        if sequence.limit_tokens - 1 <= capacity_tokens:
            self.feed.add(self.worker_id, sequence.key, sequence.rank, tokens)

    def end(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        """`answer_tokens`: of an answer that ended by itself."""
        if self.policy is not None:
            self.policy.on_ended(key, now_s, answer_tokens)
            self._decoding.pop(key, None)
            self.feed.discard(self.worker_id, key)
            self.touch()

    def predict(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        if self.policy is not None:
            self.policy.on_predicted(key, prediction, now_s)
            self.touch()

    def linger(self, ref: SequenceRef, now_s: float) -> None:
        """It was replaced, and runs on for a moment; then it ends here and is dropped."""
        if self.policy is not None:
            self._lingering[ref.key] = (ref, now_s + _LINGER_S)
            self.touch()

    def _settle(self, key: SequenceKey, now_s: float) -> None:
        ref, _ = self._lingering.pop(key, (None, 0.0))
        if ref is not None:
            self.end(key, now_s)
            self.drop(ref)

    def drop(self, ref: SequenceRef) -> None:
        """The next plan, if need be one with nothing else in it, makes the worker forget this attempt."""
        self._drops[ref] = None
        self.touch()

    def next_plans(self, now_s: float) -> list[Effect]:
        """Plans until enough steps are outstanding; also what the policy wants predicted."""
        policy, outstanding = self.policy, self._outstanding
        for key in [key for key, (_, until_s) in self._lingering.items() if now_s >= until_s]:
            self._settle(key, now_s)
        effects: list[Effect] = []
        while policy is not None and not outstanding.is_cut and len(outstanding) < MAX_OUTSTANDING_PLANS:
            cut = self._urgent and (outstanding.can_cut or (self._midway and outstanding.is_pliable))
            if outstanding.steps >= self._steps_ahead() and not cut:
                break
            self._urgent = self._midway = False
            batch = policy.plan(now_s)
            if batch is None:
                break
            supersedes = cut and bool(batch.prefills) and not batch.preemptions
            try:
                effects += self._send(batch, now_s, supersedes=supersedes)
            except (KeyError, InternalError) as error:  # it names what is not here, or cannot do that now
                policy.fail("plan", error)
                break
            effects += self._questions(batch)
        is_able = policy is not None and policy.failure is None
        if is_able and self._drops and not len(outstanding):
            effects += self._send(PlannedBatch(), now_s)
        if not self._lingering:
            self.changed.pop(self.worker_id, None)
        return effects

    def _steps_ahead(self) -> int:
        """Steps that should be outstanding. Short ones are over before the next plan could arrive."""
        return self._most_steps_ahead() if self._outstanding.is_pliable else self.rules.outstanding_steps

    def _most_steps_ahead(self) -> int:
        steps, step_s = self.rules.outstanding_steps, self.report.decode_step_s
        if step_s <= 0:
            return steps
        return max(steps, min(self.rules.settings.max_steps, ceil(self.rules.ahead_s / step_s)))

    def _send(self, batch: PlannedBatch, now_s: float, *, supersedes: bool = False) -> list[Effect]:
        starts = self._starts(batch)
        preemptions, notes = self._preemptions(batch)
        self._project(batch, now_s)
        if batch.prefills or batch.decodes:
            self.planned_s = now_s
        self._plan_seq += 1
        ref = self._ref
        plan = BatchPlan(
            epoch=self.epoch,
            seq=self._plan_seq,
            steps=batch.steps,
            report_at=max(1, batch.steps + 1 - self._most_steps_ahead()),
            valid_for_s=self.rules.valid_for_s,
            supersedes=supersedes,
            drops=tuple(self._drops),
            preemptions=preemptions,
            starts=starts,
            prefills=tuple(
                PrefillChunk(
                    ref=ref(item.key),
                    first_token=item.first_token,
                    end_token=item.end_token,
                    allocated_blocks=item.allocated_blocks,
                )
                for item in batch.prefills
            ),
            decodes=tuple(self._decodes(batch)),
        )
        self._drops.clear()
        self._outstanding.add(batch, plan, now_s)
        return [*notes, SendPlan(self.worker_id, plan)]

    def _preemptions(self, batch: PlannedBatch) -> tuple[tuple[Preemption, ...], list[Effect]]:
        """What becomes of each one's KV; what that was weighed against, for the log."""
        rules = self.rules.relief
        decided = [(item, *self.preempting.decide(self.report, item, rules)) for item in batch.preemptions]
        notes: list[Effect] = [NoteRelief(self.worker_id, relief) for _, _, relief in decided if relief]
        return tuple(Preemption(ref=self._ref(item.key), mode=mode) for item, mode, _ in decided), notes

    def _ref(self, key: SequenceKey) -> SequenceRef:
        if self._lingering and key in self._lingering:
            return self._lingering[key][0]
        return self.sequences[key].ref

    def _own(self, keys: Iterable[SequenceKey]) -> Iterator[Sequence]:
        """Those of them whose attempt here is the one that counts."""
        if not self._lingering:
            return map(self.sequences.__getitem__, keys)
        return (self.sequences[key] for key in keys if key not in self._lingering)

    def _starts(self, batch: PlannedBatch) -> tuple[SequenceSpec, ...]:
        placed = list(self._own(item.key for item in batch.prefills))
        return tuple(item.spec for item in placed if item.phase is Phase.PLACED and item.spec is not None)

    def _questions(self, batch: PlannedBatch) -> list[Effect]:
        asked = [
            (sequence, question.generated_tokens)
            for question in batch.questions
            for sequence in self._own((question.key,))
        ]
        return [
            AskPrediction(sequence.ref, sequence.spec.prompt, sequence.max_tokens, generated_tokens)
            for sequence, generated_tokens in asked
            if sequence.spec is not None
        ]

    def _project(self, batch: PlannedBatch, now_s: float) -> None:
        """The phases that the plan brings about; of decodes: `_decodes`."""
        self._last_batch = batch
        for key in chain((item.key for item in batch.preemptions), (item.key for item in batch.prefills)):
            self._decoding.pop(key, None)
        for sequence in self._own(item.key for item in batch.preemptions):
            sequence.move_to(Phase.WAITING)
            self.note_waiting(sequence)
        for sequence in self._own(item.key for item in batch.prefills):
            sequence.move_to(Phase.PREFILLING)
            self.feed.discard(self.worker_id, sequence.key)
            sequence.started_s = now_s if sequence.started_s is None else sequence.started_s

    def _decodes(self, batch: PlannedBatch) -> list[Decode]:
        """As the worker is told them; from now on they decode. Most did before."""
        known = self._decoding
        return [
            Decode(ref=known.get(item.key) or self._decode(item.key), allocated_blocks=item.allocated_blocks)
            for item in batch.decodes
        ]

    def _decode(self, key: SequenceKey) -> SequenceRef:
        """It decodes from now on."""
        if not self._lingering or key not in self._lingering:
            sequence = self.sequences[key]
            if sequence.phase is not Phase.DECODING:
                sequence.move_to(Phase.DECODING)
                self.feed.discard(self.worker_id, key)
        ref = self._decoding[key] = self._ref(key)
        return ref

    def on_stepped(self, event: WorkerStepped, now_s: float) -> Trouble | None:
        """A report of this incarnation; its ends have been taken note of before."""
        if self.policy is None:
            return None
        self.touch()
        progress = self._outstanding.on_stepped(event, self._is_over, now_s)
        if isinstance(progress, Trouble):
            return progress
        self._note(progress)
        for hit in event.hits:
            sequence = self.sequences.get(hit.ref.key)
            if sequence is not None and sequence.ref == hit.ref and sequence.worker_id == self.worker_id:
                sequence.cached_tokens = max(sequence.cached_tokens, hit.cached_tokens)
                self.policy.on_prefix_hit(hit.ref.key, hit.cached_tokens, now_s)
        for short in event.shorts:
            sequence = self.sequences.get(short.ref.key)
            if sequence is not None and sequence.ref == short.ref and sequence.worker_id == self.worker_id:
                self.policy.on_short(short.ref.key, short.missing_tokens, now_s)
        for sent in progress.over:
            self._take_back(sent, self.policy, now_s)
        return None

    def _take_back(self, sent: SentPlan, policy: GuardedPolicy, now_s: float) -> None:
        """The projected tokens of a plan that was cut short, or put some of its decodes off, but for attempts
        replaced meanwhile."""
        if sent.steps_done >= sent.batch.steps and not sent.passed:
            return
        known = {} if self._lingering else self._decoding
        for item, planned in zip(sent.batch.decodes, sent.plan.decodes, strict=True):
            key, ref = item.key, planned.ref
            missing = item.tokens - sent.decoded_tokens(ref)
            if missing > 0 and (known.get(key) is ref or self._is_current(ref)):
                policy.on_short(key, missing, now_s)

    def _is_current(self, ref: SequenceRef) -> bool:
        """Whether that is the attempt which counts."""
        sequence = self.sequences.get(ref.key)
        return sequence is not None and sequence.ref == ref

    def _is_over(self, ref: SequenceRef) -> bool:
        sequence = self.sequences.get(ref.key)
        return sequence is None or sequence.ref.attempt > ref.attempt or sequence.worker_id != self.worker_id

    def _note(self, progress: Progress) -> None:
        """A step ran: what its plan started has arrived; after many, earlier faults are forgotten."""
        sent: SentPlan | None = progress.ran
        if sent is None:
            return
        self._smooth_reports += 1
        for spec in sent.plan.starts:
            sequence = self.sequences.get(spec.ref.key)
            if sequence is not None and sequence.ref == spec.ref:
                sequence.confirmed = True
        if self._smooth_reports % _SMOOTH_REPORTS == 0:
            self.policy_failures = 0
            batch = self._last_batch
            for key in chain((item.key for item in batch.prefills), (item.key for item in batch.decodes)):
                if key in self.sequences:
                    self.sequences[key].faults = 0

    def on_heartbeat(self, report: WorkerReported, now_s: float) -> Trouble | None:
        self.touch()
        self.preempting.on_heartbeat()
        return None if self.policy is None else self._outstanding.on_heartbeat(report, now_s)

    def on_tick(self, now_s: float) -> Trouble | None:
        self.touch()
        return None if self.policy is None else self._outstanding.on_tick(now_s)

    def check_integrity(self) -> None:
        """Raises AssertionError when the pipeline contradicts itself, or its policy does."""
        self._outstanding.check_integrity()
        assert len(self._outstanding) <= MAX_OUTSTANDING_PLANS + 1
        assert (self.policy is not None) == (self.sync is Sync.IN_STEP)
        assert (self.refusal is not None) == (self.sync is Sync.REFUSED)
        for key, ref in self._decoding.items():
            assert self._ref(key) == ref, "another attempt decodes"
            assert key in self._lingering or self.sequences[key].phase is Phase.DECODING
        if self.policy is not None:
            self.policy.check_integrity()


def planned_capacity_blocks(report: WorkerReported) -> int:
    """What plans may hand out altogether, by one report: all that sequences hold and all that they could get.

    Less than the pool where the cache keeps blocks for what hangs on them although no sequence has them. They
    come and go with their users, so each report counts anew. Shared blocks are held more than once."""
    capacity = report.capacity
    held_blocks = sum(
        listed.allocated_blocks for listed in report.sequences if listed.state is not SequenceState.ENDED
    )
    lasting_blocks = capacity.total_blocks - capacity.doomed_blocks
    return max(0, min(held_blocks + capacity.plannable_blocks, lasting_blocks))
