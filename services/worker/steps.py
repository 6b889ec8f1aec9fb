"""One worker's decisions from message to step and back. Pure: computes nothing and sends nothing itself.

The caller alternates `begin_step` and `finish_step`, and calls the `on_…` methods in between, never during a
step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.worker.frames import AddressedFrame, assemble, fetched
from services.worker.kv.extended import capacity_of
from services.worker.kv.tree import Tier
from services.worker.plans import GivenUpPlan, PlanQueue, QueuedPlan
from services.worker.sampling import Sampled
from services.worker.sequences import SequenceTable, WorkItem
from services.worker.speed import SpeedMeter
from services.worker.state import HeldSequence
from shared.errors import StaleEpoch
from shared.messages.commands import CancelSequence, TakeSnapshot
from shared.messages.plans import (
    BatchPlan,
    Decode,
    EndedSequence,
    PrefillChunk,
    PrefixHit,
    ShortStart,
    SkippedItem,
    WorkerStepped,
)
from shared.messages.reports import GatewayReported, WorkerReported
from shared.messages.sequence import FinishReason
from shared.messages.tokens import AcknowledgeEnds, ExtendSequence, FetchedTokens, FetchTokens


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself in every report."""

    worker_id: str
    incarnation: int
    model: str
    max_context_tokens: int
    host: str
    weights: str = ""
    """Digest of the model's weights."""


@dataclass(frozen=True, slots=True)
class Effects:
    """To be sent, in this order."""

    frames: tuple[AddressedFrame, ...] = ()
    stepped: tuple[WorkerStepped, ...] = ()


@dataclass(frozen=True, slots=True)
class StepWork:
    """One iteration of the engine: what to compute, for which plan."""

    queued: QueuedPlan
    items: tuple[WorkItem, ...]
    skipped: tuple[SkippedItem, ...]
    ended: tuple[HeldSequence, ...]
    """Ended since the last report, before this iteration."""
    hits: tuple[PrefixHit, ...] = ()
    shorts: tuple[ShortStart, ...] = ()

    @property
    def prefilled_tokens(self) -> int:
        return sum(item.end_token - item.first_token for item in self.items if not item.is_decode)

    @property
    def decoded_tokens(self) -> int:
        return sum(item.is_decode for item in self.items)


class StepCore:
    """Plan queue and sequence table of one worker, and the reports about them."""

    def __init__(self, identity: Identity, table: SequenceTable, speed: SpeedMeter | None = None) -> None:
        """`speed` has what was profiled at the start."""
        self._identity = identity
        self._table = table
        self._plans = PlanQueue()
        self._speed = speed or SpeedMeter()
        self._stepped_seq = 0
        self._unreported = [0, 0]
        """Tokens prefilled and decoded since the last report."""

    @property
    def has_plans(self) -> bool:
        return len(self._plans) > 0

    def on_plan(self, plan: BatchPlan, now_s: float) -> Effects:
        if plan.starts and self._table.prefixes is not None:
            self._table.prefixes.expect(plan.starts)
        return Effects(stepped=self._give_up(self._plans.offer(plan, now_s)))

    def on_cancel(self, cancel: CancelSequence, now_s: float) -> Effects:
        self._table.cancel(cancel.ref, cancel.reason, now_s)
        return Effects()

    def on_acknowledge(self, acknowledged: AcknowledgeEnds, now_s: float) -> Effects:
        self._table.acknowledge(acknowledged.refs, now_s)
        return Effects()

    def on_gateway(self, reported: GatewayReported, now_s: float) -> Effects:
        self._table.hear_gateway(reported.gateway_id, reported.incarnation, now_s)
        return Effects()

    def on_fetch(self, fetch: FetchTokens) -> FetchedTokens:
        return fetched(self._table.find(fetch.ref), fetch.first_index)

    def on_extend(self, extend: ExtendSequence) -> Effects:
        self._table.late.add(extend.ref, extend.first_index, extend.tokens)
        return Effects()

    def on_snapshot(self, snapshot: TakeSnapshot, now_s: float) -> WorkerReported:
        """Give up all plans and say what is held. Raises StaleEpoch for a scheduler that was replaced."""
        if snapshot.epoch < self._plans.epoch:
            raise StaleEpoch(f"epoch {snapshot.epoch} was replaced by {self._plans.epoch}")
        self._plans.reset(snapshot.epoch)
        self._table.take_ended()
        self._table.close_all()
        return self.report(now_s)

    def on_kv_lost(self, blocks: Iterable[int], now_s: float) -> Effects:
        """Blocks that other workers kept are gone; the ends are reported with the next step or tick."""
        self._table.lose_blocks(blocks, now_s)
        return Effects()

    def on_tick(self, now_s: float) -> Effects:
        """Let time pass: expired plans, silent gateways, ends kept too long."""
        self._table.tick(now_s)
        _, expired = self._plans.head(now_s)
        shorts = self._table.late.take_shorts()
        return Effects(stepped=(*self._give_up(expired), *([self._told(shorts)] if shorts else [])))

    def begin_step(self, now_s: float) -> tuple[StepWork | None, Effects]:
        """The next iteration, or None when no plan has anything to compute."""
        frames: list[AddressedFrame] = []
        stepped: list[WorkerStepped] = []
        while True:
            queued, expired = self._plans.head(now_s)
            stepped += self._give_up(expired)
            work = None if queued is None else self._prepare(queued, now_s)
            if work is None or work.items:
                return work, Effects(tuple(frames), tuple(stepped))
            self._plans.finish_head()
            frames += self._frames([], work.ended)
            stepped.append(self._stepped(work, work.ended, plan_over=True))

    def finish_step(
        self, work: StepWork, tokens: Sequence[Sampled | None], now_s: float, step_s: float
    ) -> Effects:
        """The iteration ran. `tokens` holds, per item, the sampled token; None where none was; `FAILED`."""
        sampled: list[tuple[HeldSequence, int]] = []
        commit = self._table.commit
        for item, token in zip(work.items, tokens, strict=True):
            commit(item, token, now_s)
            if item.samples and not item.sequence.rehearsal:
                sampled.append((item.sequence, item.end_token - item.sequence.prompt_tokens))
        ended = (*work.ended, *self._table.take_ended())
        queued = work.queued
        if ended:
            queued.ended.update(sequence.ref for sequence in ended)
        queued.steps_done += 1
        if queued.over:
            self._plans.finish_head()
        prefilled_tokens, decoded_tokens = work.prefilled_tokens, work.decoded_tokens
        prefill_s = self._speed.on_step(prefilled_tokens, decoded_tokens, step_s)
        if prefill_s and self._table.prefixes is not None:
            self._table.prefixes.on_prefilled(prefilled_tokens, prefill_s)
        self._unreported[0] += prefilled_tokens
        self._unreported[1] += decoded_tokens
        frames = self._frames(sampled, ended)
        if not (queued.report_is_due or ended or work.skipped or work.hits or work.shorts):
            return Effects(frames)
        return Effects(frames, (self._stepped(work, ended, plan_over=queued.over, step_s=step_s),))

    def report(self, now_s: float) -> WorkerReported:
        """A heartbeat, or the answer to a snapshot; whoever sends it numbers it (`seq` is 0 here)."""
        pool, prefixes = self._table.pool, self._table.prefixes
        return WorkerReported(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            seq=0,
            stepped_seq=self._stepped_seq,
            epoch=self._plans.epoch,
            plan_seq=self._plans.last_seq,
            model=self._identity.model,
            block_tokens=pool.block_tokens,
            max_context_tokens=self._identity.max_context_tokens,
            capacity=capacity_of(pool),
            sequences=self._table.reports(now_s),
            host=self._identity.host,
            weights=self._identity.weights,
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
            decode_step_s=self._speed.decode_step_s,
            fingerprint=b"" if prefixes is None else prefixes.fingerprint,
            host_block_s=0.0 if prefixes is None else prefixes.cache.gate.block_s(Tier.HOST),
            swap_room_blocks=0 if prefixes is None else prefixes.cache.keepable_blocks,
        )

    def check_integrity(self) -> None:
        """AssertionError unless queue and table are each consistent."""
        self._plans.check_integrity()
        self._table.check_integrity()

    def _prepare(self, queued: QueuedPlan, now_s: float) -> StepWork:
        """Apply what is valid of the plan's next step. An item is reported as skipped once per plan."""
        plan, first = queued.plan, queued.steps_done == 0
        skipped = self._table.apply_plan(plan, now_s) if first else []
        ended = self._table.take_ended()
        queued.ended.update(sequence.ref for sequence in ended)
        items: list[WorkItem] = []
        seen: set[int] = set()
        planned: tuple[PrefillChunk | Decode, ...] = plan.decodes
        if first:
            planned = (*plan.prefills, *plan.decodes)
        for item in planned:
            sequence = self._table.find(item.ref)
            if id(sequence) in seen:
                continue
            if sequence is not None:
                seen.add(id(sequence))
            prepared = self._table.prepare(item, sequence)
            if isinstance(prepared, WorkItem):
                items.append(prepared)
            elif (
                prepared is not None
                and item.ref not in queued.ended
                and item.ref not in queued.skips_reported
            ):
                queued.skips_reported.add(item.ref)
                skipped.append(SkippedItem(ref=item.ref, reason=prepared))
        hits = () if self._table.prefixes is None else self._table.prefixes.take_hits()
        shorts = self._table.late.take_shorts()
        return StepWork(queued, tuple(items), tuple(skipped), tuple(ended), hits, shorts)

    def _frames(
        self, sampled: Sequence[tuple[HeldSequence, int]], ended: Sequence[HeldSequence]
    ) -> tuple[AddressedFrame, ...]:
        """Tokens sampled in this step, and ends without one; nothing of what was taken away."""
        changed = list(sampled)
        if ended:
            told = {id(sequence) for sequence, _ in sampled}
            changed += [
                (sequence, sequence.generated_tokens)
                for sequence in ended
                if id(sequence) not in told and self._table.find(sequence.ref) is sequence
            ]
        return assemble(self._identity.worker_id, self._identity.incarnation, changed)

    def _stepped(
        self,
        work: StepWork,
        ended: Iterable[HeldSequence],
        *,
        plan_over: bool,
        step_s: float = 0.0,
    ) -> WorkerStepped:
        self._stepped_seq += 1
        (prefilled_tokens, decoded_tokens), self._unreported = self._unreported, [0, 0]
        return WorkerStepped(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            seq=self._stepped_seq,
            epoch=work.queued.plan.epoch,
            plan_seq=work.queued.plan.seq,
            steps_done=work.queued.steps_done,
            plan_over=plan_over,
            prefilled_tokens=prefilled_tokens,
            decoded_tokens=decoded_tokens,
            step_s=step_s,
            free_blocks=self._plannable_blocks,
            ended=tuple(_ended(sequence) for sequence in ended),
            skipped=work.skipped,
            hits=work.hits,
            shorts=work.shorts,
        )

    def _told(self, shorts: tuple[ShortStart, ...]) -> WorkerStepped:
        """A report between steps, about no plan."""
        self._stepped_seq += 1
        return WorkerStepped(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            seq=self._stepped_seq,
            epoch=self._plans.epoch,
            plan_seq=0,
            steps_done=0,
            plan_over=False,
            free_blocks=self._plannable_blocks,
            shorts=shorts,
        )

    @property
    def _plannable_blocks(self) -> int:
        pool = self._table.pool
        return max(0, pool.free_blocks + pool.evictable_blocks - pool.doomed_blocks)

    def _give_up(self, plans: Iterable[GivenUpPlan]) -> tuple[WorkerStepped, ...]:
        reports = []
        for plan in plans:
            self._stepped_seq += 1
            reports.append(
                WorkerStepped(
                    worker_id=self._identity.worker_id,
                    incarnation=self._identity.incarnation,
                    seq=self._stepped_seq,
                    epoch=plan.epoch,
                    plan_seq=plan.seq,
                    outcome=plan.outcome,
                    steps_done=plan.steps_done,
                    plan_over=True,
                    free_blocks=self._plannable_blocks,
                )
            )
        return tuple(reports)


def _ended(sequence: HeldSequence) -> EndedSequence:
    return EndedSequence(
        ref=sequence.ref,
        finish_reason=sequence.finish_reason or FinishReason.ERROR,
        generated_tokens=sequence.generated_tokens,
    )
