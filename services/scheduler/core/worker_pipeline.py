"""The plan pipeline of one worker: its policy and its outstanding plans, in step with the worker. Pure.

Plans are made `outstanding_steps` ahead, further where steps are short; an arrival may cut long plans. Any
`Trouble` leads to a resync: no plan until the worker's snapshot is adopted.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil

from services.scheduler.core.backlog import Feed
from services.scheduler.core.effects import AskPrediction, Effect, NoteRelief, SendPlan
from services.scheduler.core.outstanding import OutstandingPlans, SentPlan, Trouble
from services.scheduler.core.rules import ReliefRules, Rules
from services.scheduler.core.sequence import Phase, Sequence
from services.scheduler.policy.contract import GuardedPolicy, PlannedBatch, PlannedPreemption
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
from shared.messages.reports import SequenceReport, SequenceState, WorkerReported
from shared.messages.sequence import SequenceKey, SequenceRef, SequenceSpec

_OTHERS = frozenset(LADDER) - {Rung.SWAP, Rung.RECOMPUTE}


def speeds_of(report: WorkerReported, target: WorkerReported | None = None) -> ReliefSpeeds:
    """Return the worker's measured speeds, also of the link to `target`; 0 for any not measured."""
    bytes_per_s = 0.0 if target is None else target.link_bytes_per_s.get(report.worker_id, 0.0)
    return ReliefSpeeds(
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        decode_step_s=report.decode_step_s,
        host_blocks_per_s=1.0 / report.host_block_s if report.host_block_s > 0 else 0.0,
        link_blocks_per_s=bytes_per_s / report.kv_block_bytes if report.kv_block_bytes else 0.0,
        remote_attention_s=report.remote_block_s,
        stall_s=report.expand_stall_s or 0.0,
    )


@dataclass(slots=True)
class Preempting:
    """Chooses the mode of one worker's preemptions. `counts`: preemptions by mode."""

    counts: Counter[PreemptMode] = field(default_factory=Counter)
    swapped_blocks: int = 0
    """Blocks swapped since the last heartbeat, which its report of the host does not include."""

    def decide(
        self, report: WorkerReported, item: PlannedPreemption, rules: ReliefRules
    ) -> tuple[PreemptMode, Relief | None]:
        """Return how `item` gives up its blocks, by the worker's latest report, and why if weighed."""
        mode, relief = PreemptMode.RECOMPUTE, None
        if rules.enabled and item.held_blocks > 0:
            room_blocks = report.swap_room_blocks - self.swapped_blocks
            pressure = MemoryPressure(
                needed_blocks=item.held_blocks,
                block_tokens=report.block_tokens,
                running=1,
                horizon_steps=0,
                speeds=speeds_of(report),
                host_tier_blocks=room_blocks if item.computed_tokens >= report.block_tokens else 0,
                victim=Victim(blocks=item.held_blocks, tokens=item.computed_tokens, remaining_tokens=0),
            )
            relief = next_relief(pressure, rules.switched_off | _OTHERS)
            if relief.chosen is not None and relief.chosen.rung == Rung.SWAP:
                mode = PreemptMode.SWAP
                self.swapped_blocks += item.held_blocks
        self.counts[mode] += 1
        return mode, relief


MAX_OUTSTANDING_PLANS = 4
_SLOWEST_STEP_S = 60.0
_LINGER_S = 0.06
"""Seconds that a replaced attempt continues while its successor catches up."""
_SMOOTH_REPORTS = 16
"""Number of reports without trouble that clear fault counts."""


class Sync(StrEnum):
    UNSYNCED = "unsynced"
    """Known; no snapshot requested yet."""
    ASKED = "asked"
    IN_STEP = "in_step"
    REFUSED = "refused"
    """Serves a different model than the others."""


@dataclass(slots=True, eq=False)
class WorkerPipeline:
    """One incarnation of one worker. It changes only the phases in `sequences`, the roster's table."""

    worker_id: str
    incarnation: int
    epoch: int
    rules: Rules
    sequences: Mapping[SequenceKey, Sequence]
    report: WorkerReported
    """The latest report."""
    since_s: float
    number: int = 0
    """Order of arrival; later is larger."""
    changed: dict[str, "WorkerPipeline"] = field(default_factory=dict)
    """The roster's pipelines with events since their last plan."""
    feed: Feed = field(default_factory=Feed)
    """The roster's record of requests that wait at workers."""
    unready: dict[str, None] = field(default_factory=dict)
    """The roster's workers that are not in step."""
    here: Mapping[SequenceKey, Sequence] = field(default_factory=dict)
    """The roster's sequences at this worker."""
    sync: Sync = Sync.UNSYNCED
    asked_s: float = 0.0
    """Start of the resync."""
    ask_again_s: float | None = None
    """When to ask for the snapshot again; None while a request is open."""
    policy: GuardedPolicy | None = None
    """None unless in step."""
    policy_failures: int = 0
    """Number of failures of the policy since the worker last ran smoothly."""
    refusal: ModelMismatch | None = None
    """Why the worker is refused."""
    planned_s: float = 0.0
    """Time of the last plan with work."""
    strangers: dict[SequenceRef, int] = field(default_factory=dict)
    """Number of heartbeats that listed each unexpected sequence."""
    preempting: Preempting = field(default_factory=Preempting)
    _outstanding: OutstandingPlans = field(init=False)
    _plan_seq: int = field(default=0, init=False)
    _drops: dict[SequenceRef, None] = field(default_factory=dict, init=False)
    _lingering: dict[SequenceKey, tuple[SequenceRef, float]] = field(default_factory=dict, init=False)
    """Replaced attempts and their end times; their readers switch over meanwhile."""
    _decoding: dict[SequenceKey, SequenceRef] = field(default_factory=dict, init=False)
    """Decoding sequences by their last plan, a cache that saves lookups."""
    _urgent: bool = field(default=False, init=False)
    _midway: bool = field(default=False, init=False)
    _smooth_reports: int = field(default=0, init=False)
    _last_batch: PlannedBatch = field(default_factory=PlannedBatch, init=False)
    lasting_blocks: int = field(default=0, init=False)
    """Blocks that stay after pending shrinks, borrowed ones included."""
    own_blocks: int = field(default=0, init=False)
    """Lasting blocks that are not borrowed."""
    capacity_blocks: int = field(default=0, init=False)
    """Blocks that plans may allocate: held plus obtainable ones (`planned_capacity_blocks`)."""
    most_steps_ahead: int = field(default=0, init=False)
    """Steps that should be outstanding if they can be cut; more where steps are short, to hide the delay."""
    longest_step_s: float = field(default=0.0, init=False)
    """Expected seconds of a step of the whole token budget, at most `_SLOWEST_STEP_S`; 0: not measured."""
    growing: list[SequenceReport] = field(default_factory=list, init=False)
    """The sequences that decode, but no rehearsals, by the latest report."""
    short_blocks: int = field(default=0, init=False)
    """Blocks that they need until relief arrives, beyond those free or evicted unasked."""

    def __post_init__(self) -> None:
        self._outstanding = OutstandingPlans(self.rules, self.epoch, 0, self.since_s)
        self.take_report(self.report)

    def take_report(self, report: WorkerReported) -> None:
        """Store the worker's latest report, and what it says of the worker's capacity."""
        capacity, step_s = report.capacity, report.decode_step_s
        self.report = report
        self.lasting_blocks = capacity.total_blocks - capacity.doomed_blocks
        self.own_blocks = self.lasting_blocks - capacity.borrowed_blocks
        self.capacity_blocks = planned_capacity_blocks(report)
        short = ceil(self.rules.ahead_s / step_s) if step_s > 0 else 0
        self.most_steps_ahead = max(self.rules.outstanding_steps, min(self.rules.settings.max_steps, short))
        prompt_s = self.rules.settings.token_budget / (report.prefill_tokens_per_s or float("inf"))
        self.longest_step_s = min(step_s + prompt_s, _SLOWEST_STEP_S)
        steps = self.rules.relief.ahead_s / step_s if step_s > 0 else 1.0
        decoding = [one for one in report.sequences if one.state is SequenceState.DECODING]
        self.growing = [one for one in decoding if one.gateway_id]
        growth_blocks = len(self.growing) * max(1, round(steps / report.block_tokens))
        self.short_blocks = growth_blocks - capacity.plannable_blocks

    def holds(self, limit_tokens: int) -> bool:
        """Return whether the worker's lasting memory can hold a sequence of `limit_tokens` tokens."""
        needed_blocks = -(-(limit_tokens - 1) // self.report.block_tokens)
        return needed_blocks <= self.lasting_blocks and limit_tokens <= self.report.max_context_tokens

    def touch(self) -> None:
        """Mark the pipeline as ready to plan."""
        self.changed[self.worker_id] = self

    @property
    def outstanding_steps(self) -> int:
        return self._outstanding.steps

    def begin(self, policy: GuardedPolicy, snapshot: WorkerReported, now_s: float) -> None:
        """Enter step with a snapshot: plans start at 1, reports continue after the snapshot's."""
        self._clear(now_s, snapshot.stepped_seq)
        self.sync, self.policy = Sync.IN_STEP, policy
        self.take_report(snapshot)
        self.feed.join(self.worker_id)
        self.unready.pop(self.worker_id, None)

    def lose_step(self, now_s: float) -> None:
        """Await a snapshot and discard the policy."""
        self._clear(now_s, 0)
        if self.sync is not Sync.ASKED:
            self.asked_s = now_s
        self.sync, self.ask_again_s, self.refusal = Sync.ASKED, None, None

    def refuse(self, error: ModelMismatch) -> None:
        """Give the worker no work; a snapshot may follow when the others are gone."""
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

    def arrive(self, sequence: Sequence, now_s: float, *, midway: bool = False) -> None:
        """Give the policy a new sequence, which may cut a long plan short; `midway`: any plan."""
        if self.policy is not None:
            if self._lingering:
                self._settle(sequence.key, now_s)
            self.policy.on_arrival(sequence.task(is_open=True), now_s)
            self.note_waiting(sequence)
            self._urgent = True
            self._midway = self._midway or midway
            self.touch()

    def note_waiting(self, sequence: Sequence) -> None:
        """Record a sequence that waits at the worker, unless it is too large for the worker alone."""
        is_listed = sequence.phase is Phase.WAITING
        tokens = 0 if is_listed else sequence.prompt_tokens + sequence.generated_tokens
        if sequence.limit_tokens - 1 <= self.capacity_blocks * self.report.block_tokens:
            self.feed.add(self.worker_id, sequence.ref.key, sequence.rank, tokens)

    def end(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        """Remove a sequence, whose room may cut a long plan short where others wait. `answer_tokens`: length
        of an answer that was not stopped from outside."""
        if self.policy is not None:
            self.policy.on_ended(key, now_s, answer_tokens)
            self._decoding.pop(key, None)
            self.feed.discard(self.worker_id, key)
            self._urgent = self._urgent or self.feed.has_waiting(self.worker_id)
            self.touch()

    def predict(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
        if self.policy is not None:
            self.policy.on_predicted(key, prediction, now_s)
            self.touch()

    def linger(self, ref: SequenceRef, now_s: float) -> None:
        """Let a replaced attempt run for `_LINGER_S`, then end and drop it."""
        if self.policy is not None:
            self._lingering[ref.key] = (ref, now_s + _LINGER_S)
            self.touch()

    def _settle(self, key: SequenceKey, now_s: float) -> None:
        ref, _ = self._lingering.pop(key, (None, 0.0))
        if ref is not None:
            self.end(key, now_s)
            self.drop(ref)

    def drop(self, ref: SequenceRef) -> None:
        """Make the worker forget this attempt with the next plan, which may contain nothing else."""
        self._drops[ref] = None
        self.touch()

    def next_plans(self, now_s: float) -> list[Effect]:
        """Return plans until enough steps are outstanding, and the policy's prediction requests."""
        policy, outstanding = self.policy, self._outstanding
        if self._lingering:
            for key in [key for key, (_, until_s) in self._lingering.items() if now_s >= until_s]:
                self._settle(key, now_s)
        effects: list[Effect] = []
        while policy is not None and not outstanding.is_cut and len(outstanding) < MAX_OUTSTANDING_PLANS:
            steps, few, is_pliable = outstanding.steps, self.rules.outstanding_steps, outstanding.is_pliable
            cut = self._urgent and is_pliable and (self._midway or steps > few)
            if steps >= (self.most_steps_ahead if is_pliable else few) and not cut:
                break
            self._urgent = self._midway = False
            batch = policy.plan(now_s)
            if batch is None:
                break
            supersedes = cut and bool(batch.prefills) and not batch.preemptions
            try:
                effects += self._send(batch, now_s, supersedes=supersedes)
            except (KeyError, InternalError) as error:  # an unknown key, or a wrong phase
                policy.fail("plan", error)
                break
            if batch.questions:
                effects += self._questions(batch)
        if policy is not None and policy.failure is None and self._drops and not len(outstanding):
            effects += self._send(PlannedBatch(), now_s)
        if not self._lingering:
            self.changed.pop(self.worker_id, None)
        return effects

    def _send(self, batch: PlannedBatch, now_s: float, *, supersedes: bool = False) -> list[Effect]:
        """Apply a batch to the phases and return its plan, with the log notes of weighed preemptions."""
        self._last_batch = batch
        preemptions, notes = self._preemptions(batch) if batch.preemptions else ((), [])
        prefills, starts = self._prefills(batch, now_s) if batch.prefills else ((), ())
        known = self._decoding
        decodes = [
            Decode(ref=known.get(item.key) or self._decode(item.key), allocated_blocks=item.allocated_blocks)
            for item in batch.decodes
        ]
        if prefills or decodes:
            self.planned_s = now_s
        self._plan_seq += 1
        steps_ahead = self._outstanding.steps + batch.steps
        plan = BatchPlan(
            epoch=self.epoch,
            seq=self._plan_seq,
            steps=batch.steps,
            report_at=max(1, batch.steps + 1 - self.most_steps_ahead),
            valid_for_s=max(self.rules.valid_for_s, steps_ahead * self.longest_step_s),
            supersedes=supersedes,
            drops=tuple(self._drops),
            preemptions=preemptions,
            starts=starts,
            prefills=prefills,
            decodes=tuple(decodes),
        )
        self._drops.clear()
        self._outstanding.add(batch, plan, now_s)
        return [*notes, SendPlan(self.worker_id, plan)]

    def _preemptions(self, batch: PlannedBatch) -> tuple[tuple[Preemption, ...], list[Effect]]:
        """Return each preemption with its mode, and the log notes of the weighed ones."""
        found: list[Preemption] = []
        notes: list[Effect] = []
        for item in batch.preemptions:
            mode, relief = self.preempting.decide(self.report, item, self.rules.relief)
            if relief is not None:
                notes.append(NoteRelief(self.worker_id, relief))
            self._decoding.pop(item.key, None)
            found.append(Preemption(ref=self._ref(item.key), mode=mode))
            if item.key not in self._lingering:
                self.sequences[item.key].move_to(Phase.WAITING)
                self.note_waiting(self.sequences[item.key])
        return tuple(found), notes

    def _prefills(
        self, batch: PlannedBatch, now_s: float
    ) -> tuple[tuple[PrefillChunk, ...], tuple[SequenceSpec, ...]]:
        """Return the batch's chunks, and the specs of the sequences that start with them."""
        chunks, starts = [], []
        for item in batch.prefills:
            ref, blocks = self._ref(item.key), item.allocated_blocks
            chunks.append(
                PrefillChunk(
                    ref=ref, first_token=item.first_token, end_token=item.end_token, allocated_blocks=blocks
                )
            )
            self._decoding.pop(item.key, None)
            if item.key in self._lingering:
                continue
            sequence = self.sequences[item.key]
            if sequence.phase is Phase.PLACED and sequence.spec is not None:
                starts.append(sequence.spec)
            sequence.move_to(Phase.PREFILLING)
            self.feed.discard(self.worker_id, item.key)
            sequence.started_s = now_s if sequence.started_s is None else sequence.started_s
        return tuple(chunks), tuple(starts)

    def _ref(self, key: SequenceKey) -> SequenceRef:
        lingering = self._lingering.get(key)
        return self.sequences[key].ref if lingering is None else lingering[0]

    def _questions(self, batch: PlannedBatch) -> list[Effect]:
        asked = [
            (self.sequences[question.key], question.generated_tokens)
            for question in batch.questions
            if question.key not in self._lingering
        ]
        return [
            AskPrediction(sequence.ref, sequence.spec.prompt, sequence.max_tokens, generated_tokens)
            for sequence, generated_tokens in asked
            if sequence.spec is not None
        ]

    def _decode(self, key: SequenceKey) -> SequenceRef:
        """Mark the sequence as decoding and return its reference."""
        if key not in self._lingering and self.sequences[key].phase is not Phase.DECODING:
            self.sequences[key].move_to(Phase.DECODING)
            self.feed.discard(self.worker_id, key)
        ref = self._decoding[key] = self._ref(key)
        return ref

    def on_stepped(self, event: WorkerStepped, now_s: float) -> Trouble | None:
        """Apply a report of this incarnation, whose ends the fleet has already applied."""
        if self.policy is None:
            return None
        self.touch()
        progress = self._outstanding.on_stepped(event, self._is_over, now_s)
        if isinstance(progress, Trouble):
            return progress
        if progress.ran is not None:
            self._note(progress.ran)
        for hit in event.hits:
            if (sequence := self._here(hit.ref)) is not None:
                sequence.cached_tokens = max(sequence.cached_tokens, hit.cached_tokens)
                self.policy.on_prefix_hit(hit.ref.key, hit.cached_tokens, now_s)
        for short in event.shorts:
            if self._here(short.ref) is not None:
                self.policy.on_short(short.ref.key, short.missing_tokens, now_s)
        for gain in event.gains:
            if self._here(gain.ref) is not None:
                self.policy.on_gained(gain.ref.key, gain.tokens, now_s)
        for sent in progress.over:
            if sent.steps_done < sent.batch.steps or sent.passed:
                self._take_back(sent, self.policy, now_s)
        return None

    def _here(self, ref: SequenceRef) -> Sequence | None:
        """Return the sequence if exactly this attempt is at the worker."""
        sequence = self.sequences.get(ref.key)
        is_here = sequence is not None and sequence.ref == ref and sequence.worker_id == self.worker_id
        return sequence if is_here else None

    def _take_back(self, sent: SentPlan, policy: GuardedPolicy, now_s: float) -> None:
        """Take back the tokens that a plan did not decode, except those of replaced attempts."""
        known = {} if self._lingering else self._decoding
        for item, planned in zip(sent.batch.decodes, sent.plan.decodes, strict=True):
            key, ref = item.key, planned.ref
            missing = item.tokens - sent.steps_done + sent.passed.get(ref, 0)
            if missing <= 0:
                continue
            sequence = self.sequences.get(key)
            if known.get(key) is ref or (sequence is not None and sequence.ref == ref):
                policy.on_short(key, missing, now_s)

    def _is_over(self, ref: SequenceRef) -> bool:
        sequence = self.sequences.get(ref.key)
        return sequence is None or sequence.ref.attempt > ref.attempt or sequence.worker_id != self.worker_id

    def _note(self, sent: SentPlan) -> None:
        """Record that a plan ran: its starts arrived; after `_SMOOTH_REPORTS`, clear fault counts."""
        self._smooth_reports += 1
        for spec in sent.plan.starts:
            if (one := self.sequences.get(spec.ref.key)) is not None and one.ref == spec.ref:
                one.confirmed = True
        if self._smooth_reports % _SMOOTH_REPORTS == 0:
            self.policy_failures = 0
            batch = self._last_batch
            for key in [item.key for item in batch.prefills] + [item.key for item in batch.decodes]:
                if key in self.sequences:
                    self.sequences[key].faults = 0

    def on_heartbeat(self, report: WorkerReported, now_s: float) -> Trouble | None:
        self._wake()
        self.preempting.swapped_blocks = 0
        return None if self.policy is None else self._outstanding.on_heartbeat(report, now_s)

    def on_tick(self, now_s: float) -> Trouble | None:
        if self._outstanding.steps < self.most_steps_ahead:
            self._wake()
        return None if self.policy is None else self._outstanding.on_tick(now_s, self.longest_step_s)

    def _wake(self) -> None:
        """Plan again, unless there is nothing to plan for."""
        if self.here or self._lingering or self._drops or (self.policy and self.policy.failure):
            self.touch()

    def check_integrity(self) -> None:
        """Raises AssertionError when the pipeline or its policy is inconsistent."""
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
    """Return the blocks that plans may allocate: held, of each sequence, plus obtainable ones."""
    capacity, held_blocks = report.capacity, 0
    for listed in report.sequences:
        held_blocks += 0 if listed.state is SequenceState.ENDED else listed.allocated_blocks
    lasting_blocks = capacity.total_blocks - capacity.doomed_blocks
    return max(0, min(held_blocks + capacity.plannable_blocks, lasting_blocks))
