"""A worker without tensors: the rules of `shared/messages/plans.py`, made-up tokens, strict book-keeping.

Token `i` of an answer is a function of (request, choice, i), so that an answer is the same wherever it is
computed. Raises AssertionError when a plan makes it hold more blocks than it has, or compute more tokens
than a budget.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from shared.errors import StaleEpoch
from shared.messages.commands import CancelSequence
from shared.messages.plans import (
    BatchPlan,
    Decode,
    EndedSequence,
    PrefillChunk,
    SkippedItem,
    SkipReason,
    StepOutcome,
    WorkerStepped,
)
from shared.messages.reports import Capacity, SequenceReport, SequenceState, WorkerReported
from shared.messages.sequence import FinishReason, SequenceKey, SequenceRef, SequenceSpec, unpack_tokens
from shared.messages.tokens import TokenDelta

END = 0


def answer_token(key: SequenceKey, index: int, length: int) -> int:
    """Token `index` of the one answer to this sequence, which ends by itself after `length` tokens."""
    return END if index == length - 1 else 1 + (sum(key[0].encode()) * 31 + key[1] * 7 + index * 13) % 1000


def natural_length(spec_prompt: bytes) -> int:
    """The first prompt token says how long the answer is."""
    return max(1, unpack_tokens(spec_prompt)[0])


@dataclass
class Held:
    spec: SequenceSpec
    tokens: list[int]
    state: SequenceState = SequenceState.WAITING
    computed: int = 0
    blocks: int = 0
    reason: FinishReason | None = None

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.spec.prompt_tokens


@dataclass
class Queued:
    plan: BatchPlan
    received_s: float
    steps_done: int = 0
    told: set[SequenceRef] = field(default_factory=set)
    """Ended while it ran, or reported as skipped: passed over silently from then on."""


@dataclass
class FakeWorker:
    """Call `on_plan`, `on_cancel`, `on_snapshot`, `step`; take `events` and `deltas` away."""

    worker_id: str
    incarnation: int
    total_blocks: int = 64
    doomed_blocks: int = 0
    """About to go: still given out to plans on their way, and not reported as lasting."""
    block_tokens: int = 4
    max_context_tokens: int = 10_000
    reach_tokens: int = 0
    """More than fit here, as others would lend to it."""
    epoch: int = 0
    last_seq: int = 0
    stepped_seq: int = 0
    report_seq: int = 0
    held: dict[SequenceKey, Held] = field(default_factory=dict)
    tombstones: dict[SequenceKey, int] = field(default_factory=dict)
    queue: deque[Queued] = field(default_factory=deque)
    events: list[WorkerStepped] = field(default_factory=list)
    deltas: list[tuple[str, TokenDelta]] = field(default_factory=list)
    ended_now: list[EndedSequence] = field(default_factory=list)
    step_tokens: list[tuple[int, int]] = field(default_factory=list)
    """(prefilled, decoded) of each step."""
    refused: set[str] = field(default_factory=set)
    """Requests whose items it always skips."""
    fingerprint: bytes = b""
    """Anything: the scheduler takes it for one whose blocks outlive their sequences."""
    prefill_tokens_per_s: float = 0.0
    kv_block_bytes: int = 0
    decode_step_s: float = 0.0
    measured: dict[str, Any] = field(default_factory=dict)
    """What else its reports say."""
    lendable_blocks: int | None = None
    growable_blocks: int = 0
    is_mute: bool = False
    """Answers no snapshot."""
    weights: str = "11" * 16

    @property
    def used_blocks(self) -> int:
        return sum(held.blocks for held in self.held.values())

    def on_plan(self, plan: BatchPlan, now_s: float) -> None:
        if plan.epoch < self.epoch:
            self._give_up(Queued(plan, now_s), StepOutcome.STALE_EPOCH)
            return
        if plan.epoch > self.epoch:
            self._give_up_all(StepOutcome.STALE_EPOCH)
            self.epoch, self.last_seq = plan.epoch, 0
        if plan.seq <= self.last_seq:
            return
        if plan.seq != self.last_seq + 1:
            self._give_up(Queued(replace_seq(plan, plan.seq - 1), now_s), StepOutcome.EXPIRED)
            if self.last_seq == 0:
                return
        self.last_seq = plan.seq
        if plan.supersedes:
            self._give_up_all(StepOutcome.SUPERSEDED)
        self.queue.append(Queued(plan, now_s))

    def on_cancel(self, command: CancelSequence) -> None:
        self._cancel(command.ref, command.reason)

    def on_snapshot(self, epoch: int) -> WorkerReported:
        if epoch < self.epoch:
            raise StaleEpoch("replaced")
        self.queue.clear()
        self.ended_now.clear()
        self.epoch, self.last_seq = epoch, 0
        return self.report()

    def acknowledge(self, ref: SequenceRef) -> None:
        held = self.held.get(ref.key)
        if held is not None and held.spec.ref == ref and held.state is SequenceState.ENDED:
            del self.held[ref.key]

    def step(self, now_s: float) -> bool:
        """Run one step of the plan at the head of the queue. False when there was none."""
        while self.queue and now_s - self.queue[0].received_s > self.queue[0].plan.valid_for_s:
            self._give_up(self.queue.popleft(), StepOutcome.EXPIRED)
        if not self.queue:
            return False
        queued = self.queue[0]
        plan, first = queued.plan, queued.steps_done == 0
        skipped = self._apply(plan) if first else []
        prefilled, decoded, ran = 0, 0, False
        items: list[PrefillChunk | Decode] = [*(plan.prefills if first else ()), *plan.decodes]
        for item in items:
            outcome = self._run(item)
            if outcome is None:
                ran = True
                decoded += isinstance(item, Decode)
                prefilled += item.end_token - item.first_token if isinstance(item, PrefillChunk) else 0
            elif item.ref not in queued.told:
                queued.told.add(item.ref)
                skipped.append(SkippedItem(ref=item.ref, reason=outcome))
        queued.told.update(ended.ref for ended in self.ended_now)
        assert self.used_blocks <= self.total_blocks, "more blocks than there are"
        queued.steps_done += ran
        over = not ran or queued.steps_done >= plan.steps
        if over:
            self.queue.popleft()
        self.step_tokens.append((prefilled, decoded))
        if over or skipped or self.ended_now or queued.plan.report_at in (0, queued.steps_done):
            self._report_step(queued, StepOutcome.RAN, over, tuple(skipped))
        return True

    def report(self) -> WorkerReported:
        self.report_seq += 1
        return WorkerReported(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            seq=self.report_seq,
            stepped_seq=self.stepped_seq,
            epoch=self.epoch,
            plan_seq=self.last_seq,
            model="fake",
            weights=self.weights,
            block_tokens=self.block_tokens,
            max_context_tokens=min(
                self.max_context_tokens,
                (self.total_blocks - self.doomed_blocks) * self.block_tokens + self.reach_tokens,
            ),
            capacity=Capacity(
                total_blocks=self.total_blocks,
                doomed_blocks=self.doomed_blocks,
                free_blocks=self.total_blocks - self.used_blocks,
                lendable_blocks=self.lendable_blocks,
                growable_blocks=self.growable_blocks,
            ),
            sequences=tuple(_listed(held) for held in self.held.values()),
            fingerprint=self.fingerprint,
            caches_prefixes=bool(self.fingerprint),
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_step_s=self.decode_step_s,
            kv_block_bytes=self.kv_block_bytes,
            **self.measured,
        )

    def _apply(self, plan: BatchPlan) -> list[SkippedItem]:
        skipped = []
        for ref in plan.drops:
            self._cancel(ref, FinishReason.CANCELLED)
        for preemption in plan.preemptions:
            held = self._find(preemption.ref)
            if held is None:
                skipped.append(SkippedItem(ref=preemption.ref, reason=SkipReason.UNKNOWN))
            else:
                held.state, held.computed, held.blocks = SequenceState.WAITING, 0, 0
        for spec in plan.starts:
            held = self.held.get(spec.ref.key)
            if held is not None and held.spec.ref.attempt == spec.ref.attempt:
                continue
            buried = self.tombstones.get(spec.ref.key, 0) >= spec.ref.attempt
            if buried or (held is not None and held.spec.ref.attempt > spec.ref.attempt):
                skipped.append(SkippedItem(ref=spec.ref, reason=SkipReason.UNKNOWN))
                continue
            if held is not None:
                self._cancel(held.spec.ref, FinishReason.CANCELLED)
            self.held[spec.ref.key] = Held(spec, unpack_tokens(spec.prompt) + unpack_tokens(spec.generated))
        return skipped

    def _find(self, ref: SequenceRef) -> Held | None:
        held = self.held.get(ref.key)
        alive = held is not None and held.spec.ref == ref and held.state is not SequenceState.ENDED
        return held if alive else None

    def _run(self, item: PrefillChunk | Decode) -> SkipReason | None:
        held = self._find(item.ref)
        if held is None:
            return SkipReason.UNKNOWN
        if item.ref.request_id in self.refused:
            return SkipReason.MISALIGNED
        decoding = held.state is SequenceState.DECODING
        if isinstance(item, Decode):
            aligned, end = decoding, len(held.tokens)
        else:
            aligned, end = not decoding and held.computed == item.first_token, item.end_token
        if not aligned or end > len(held.tokens) or end <= held.computed:
            return SkipReason.MISALIGNED
        if max(0, item.allocated_blocks - held.blocks) > self.total_blocks - self.used_blocks:
            return SkipReason.NO_BLOCKS
        held.blocks = max(held.blocks, item.allocated_blocks)
        if held.blocks * self.block_tokens < end:
            return SkipReason.EXHAUSTED
        held.computed = end
        held.state = SequenceState.DECODING if end == len(held.tokens) else SequenceState.PREFILLING
        if held.state is SequenceState.DECODING:
            self._sample(held)
        return None

    def _sample(self, held: Held) -> None:
        index, spec = held.generated, held.spec
        token = answer_token(spec.ref.key, index, natural_length(spec.prompt))
        held.tokens.append(token)
        if token == END:
            held.reason = FinishReason.STOP
        elif held.generated >= spec.sampling.max_tokens:
            held.reason = FinishReason.LENGTH
        ref = spec.ref
        if not spec.rehearsal:
            delta = TokenDelta(ref.request_id, ref.choice, ref.attempt, index, (token,), held.reason)
            self.deltas.append((spec.gateway_id, delta))
        if held.reason is not None:
            self._end(held, held.reason)

    def _end(self, held: Held, reason: FinishReason) -> None:
        held.state, held.reason, held.blocks, held.computed = SequenceState.ENDED, reason, 0, 0
        self.ended_now.append(
            EndedSequence(ref=held.spec.ref, finish_reason=reason, generated_tokens=held.generated)
        )
        if held.spec.rehearsal:
            del self.held[held.spec.ref.key]

    def _cancel(self, ref: SequenceRef, reason: FinishReason) -> None:
        self.tombstones[ref.key] = max(ref.attempt, self.tombstones.get(ref.key, 0))
        held = self.held.get(ref.key)
        if held is not None and held.spec.ref.attempt <= ref.attempt:
            if held.state is not SequenceState.ENDED:
                self._end(held, reason)
            self.held.pop(ref.key, None)

    def _give_up(self, queued: Queued, outcome: StepOutcome) -> None:
        self._report_step(queued, outcome, True, ())

    def _give_up_all(self, outcome: StepOutcome) -> None:
        while self.queue:
            self._give_up(self.queue.popleft(), outcome)

    def _report_step(
        self, queued: Queued, outcome: StepOutcome, over: bool, skipped: tuple[SkippedItem, ...]
    ) -> None:
        self.stepped_seq += 1
        self.events.append(
            WorkerStepped(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                seq=self.stepped_seq,
                epoch=queued.plan.epoch,
                plan_seq=queued.plan.seq,
                outcome=outcome,
                steps_done=queued.steps_done,
                plan_over=over,
                ended=tuple(self.ended_now) if outcome is StepOutcome.RAN else (),
                skipped=skipped,
            )
        )
        if outcome is StepOutcome.RAN:
            self.ended_now.clear()


def replace_seq(plan: BatchPlan, seq: int) -> BatchPlan:
    return BatchPlan(epoch=plan.epoch, seq=seq)


def _listed(held: Held) -> SequenceReport:
    return SequenceReport(
        ref=held.spec.ref,
        gateway_id="" if held.spec.rehearsal else held.spec.gateway_id,
        state=held.state,
        prompt_tokens=held.spec.prompt_tokens,
        generated_tokens=held.generated,
        computed_tokens=held.computed,
        max_tokens=held.spec.sampling.max_tokens,
        allocated_blocks=held.blocks,
        finish_reason=held.reason,
    )
