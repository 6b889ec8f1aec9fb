"""The core of one worker: messages in, steps and reports out. Pure: it computes and sends nothing itself.

The caller alternates `begin_step` and `finish_step`, and calls the `on_…` methods only between steps."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from services.worker.core.decodes import DecodeBatch, SteadyGroup, StepTokens, as_array, by_length
from services.worker.core.drafts import Drafts
from services.worker.core.frames import AddressedFrame, assemble, decoded, fetched
from services.worker.core.guessing import Guessing
from services.worker.core.plans import PlanQueue, PutOff, QueuedPlan, StepWork, WorkItem
from services.worker.core.reports import Identity, SpeedMeter, StepReports, StepTally
from services.worker.core.sampling import Sampled
from services.worker.core.sequence import HeldSequence, is_scheduler
from services.worker.core.sequences import SequenceTable
from services.worker.kv.core.borrowed_pool import capacity_of
from services.worker.kv.core.radix_tree import Tier
from shared.errors import InvalidRequest, StaleEpoch
from shared.messages.commands import CancelSequence, TakeSnapshot
from shared.messages.lengths import MOST_STATES, AnswerState, WorkerObserved
from shared.messages.plans import BatchPlan, Decode, PrefillChunk, SkippedItem, WorkerStepped
from shared.messages.reports import GatewayReported, WorkerReported
from shared.messages.sequence import FinishReason, SequenceKey, SequenceRef
from shared.messages.tokens import AcknowledgeEnds, ExtendSequence, FetchedTokens, FetchTokens
from shared.messages.values import as_count
from shared.release import PROTOCOL

_MOST_TOKENS, _LEAST_RESUMED = 512, 64
"""Token limit of a step that computes put-off work, and the least put-off tokens in it."""
_MOST_OBSERVED_BYTES = 262_144
"""Maximum size of hidden states in one message; the rest is dropped."""
_WHOLE = frozenset({FinishReason.STOP, FinishReason.LENGTH})


@dataclass(frozen=True, slots=True)
class StepEffects:
    """Messages to send, in this order."""

    frames: tuple[AddressedFrame, ...] = ()
    stepped: tuple[WorkerStepped, ...] = ()
    observed: WorkerObserved | None = None


class StepCore:
    """The plan queue and sequence table of one worker, and the reports about them."""

    def __init__(
        self,
        identity: Identity,
        table: SequenceTable,
        speed: SpeedMeter | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """`speed` holds the profile from the start. With `drafts`, steps may not overlap."""
        self._identity = identity
        self._reports = StepReports(identity, table.pool, table.in_flight)
        self._table = table
        self._plans = PlanQueue()
        self._speed = speed or SpeedMeter()
        self._tally = StepTally()
        self._guessing = None if drafts is None else Guessing(drafts, table, self._reports.gains)
        self._last: DecodeBatch | None = None
        """The decodes of the step prepared last."""
        self._whole: QueuedPlan | None = None
        """The plan whose decodes are all in that group, apart from ended ones."""
        self._items: list[WorkItem] = []
        self._passed: list[SequenceRef] = []
        self._skipped: list[SkippedItem] = []
        """What is being prepared."""
        self.settle: Callable[[], None] = lambda: None
        """Finishes the steps in flight. The engine's thread sets it."""
        self._stalled: tuple[QueuedPlan, StepWork] | None = None
        """A step without rows, prepared while others were in flight."""
        self.is_held = False
        """Whether the last `begin_step` found only sequences that wait for stored blocks."""

    @property
    def guesses(self) -> dict[str, int]:
        """Return how many guessed tokens were kept and how many were wrong, for `status`; nothing without
        guesses. Any thread may call this."""
        if self._guessing is None:
            return {}
        return {"kept_guesses": self._guessing.drafts.kept, "wrong_guesses": self._guessing.drafts.wrong}

    @property
    def has_plans(self) -> bool:
        return len(self._plans) > 0

    @property
    def put_off(self) -> Collection[SequenceKey]:
        """Keys of sequences that wait for stored blocks."""
        return self._table.put_off.keys()

    def on_plan(self, plan: BatchPlan, now_s: float) -> StepEffects:
        if not self._plans.is_next(plan):
            self.settle()
        if plan.starts and self._table.prefixes is not None:
            self._table.prefixes.expect(plan.starts)
        return StepEffects(stepped=self._reports.of_given_up(self._plans.offer(plan, now_s)))

    def on_cancel(self, cancel: CancelSequence, now_s: float) -> None:
        """Cancel a sequence. Raises ForeignSequence, as the next three methods do."""
        gateway_id = cancel.gateway_id if is_scheduler(cancel.sender) else cancel.sender
        self._table.cancel(cancel.ref, cancel.reason, now_s, gateway_id, cancel.heir_key)

    def on_acknowledge(self, acknowledged: AcknowledgeEnds, now_s: float) -> None:
        self._table.acknowledge(acknowledged.refs, acknowledged.sender, now_s)

    def on_fetch(self, fetch: FetchTokens) -> FetchedTokens:
        self._table.check_owner(fetch.ref, fetch.sender, fetch.heir_key)
        return fetched(self._table.find(fetch.ref), fetch.first_index)

    def on_extend(self, extend: ExtendSequence) -> None:
        """Add late tokens. Raises ForeignSequence, or InvalidRequest for unknown tokens."""
        self._table.check_owner(extend.ref, extend.sender)
        self._table.add_late(extend)

    def on_gateway(self, reported: GatewayReported, now_s: float) -> None:
        self._table.hear_gateway(reported.gateway_id, reported.incarnation, now_s)

    def on_snapshot(self, snapshot: TakeSnapshot, now_s: float) -> WorkerReported:
        """Give up all plans and report what is held. Raises StaleEpoch for a replaced scheduler, and
        InvalidRequest for an impossible epoch."""
        if snapshot.epoch < self._plans.epoch:
            raise StaleEpoch(f"epoch {snapshot.epoch} was replaced by {self._plans.epoch}")
        if not self._plans.may_follow(snapshot.epoch):
            raise InvalidRequest(
                f"no scheduler can have come from epoch {self._plans.epoch} to {snapshot.epoch}"
            )
        self._plans.reset(snapshot.epoch)
        self._table.take_ended()
        self._table.close_all()
        self._table.give_up_postponed()
        return self.report(now_s)

    def on_kv_lost(self, blocks: Iterable[int], now_s: float) -> None:
        """End sequences whose borrowed blocks are gone; the next step or tick reports them."""
        self._table.lose_blocks(blocks, now_s)

    def on_tick(self, now_s: float) -> StepEffects:
        """Handle expired plans, silent gateways and ends kept too long."""
        self._table.tick(now_s)
        _, expired = self._plans.head(now_s)
        shorts = self._table.late.take_shorts()
        stepped = self._reports.of_given_up(expired)
        if shorts:
            stepped = (*stepped, self._reports.between_steps(self._plans.epoch, shorts))
        return StepEffects(stepped=stepped)

    def foreseen_s(self, work: StepWork) -> float:
        """Return the foreseen duration of a step in seconds; 0: unknown. Any thread may call this."""
        tokens = (item.end_token - item.first_token for item in work.items)
        return self._speed.foreseen_s(sum(count for count in tokens if count > 1))

    def begin_step(self, now_s: float) -> tuple[StepWork | None, StepEffects]:
        """Return the next step's work; None when no plan has any, or when the steps in flight must be over
        first. A plan whose sequences all wait for stored blocks is held until one has them, or a later plan
        has other sequences."""
        frames: list[AddressedFrame] = []
        stepped: list[WorkerStepped] = []
        self.is_held = False
        in_flight = self._table.in_flight
        if in_flight and self._must_settle(now_s):
            return None, StepEffects()
        self._table.publish_full()
        while True:
            queued, work = self._stalled or (None, None)
            self._stalled = None
            if work is None:
                queued, expired = self._plans.head(now_s)
                if expired:
                    stepped += self._reports.of_given_up(expired)
                if queued is None and self._table.put_off:
                    queued = self._plans.unplanned(now_s)
                work = None if queued is None else self._prepare(queued, now_s)
            if queued is not None and work is not None and len(work):
                self._begin(queued, work)
            elif queued is not None and work is not None and in_flight:
                self._stalled, work = (queued, work), None
            if queued is None or work is None or len(work):
                return work, StepEffects(tuple(frames), tuple(stepped))
            frames += self._frames([], work.ended)
            is_over = queued.plan.seq > 0 and not (work.waits and not self._may_pass())
            if is_over:
                self._plans.finish_head()
            if is_over or work.has_news:
                stepped.append(self._reports.of_step(work, work.ended, plan_over=is_over))
            if not is_over:
                self.is_held = queued.plan.seq > 0
                self._plans.hold_head(now_s)
                return None, StepEffects(tuple(frames), tuple(stepped))

    def finish_step(
        self, work: StepWork, tokens: Sequence[Sampled | None], now_s: float, step_s: float
    ) -> StepEffects:
        """Record that the step ran. `tokens` has each item's sampled token, or None, or `FAILED`."""
        sampled, states, items = list[tuple[HeldSequence, int]](), list[AnswerState](), work.others
        batch = None if work.decodes is None else self._commit_decodes(work.decodes, tokens, now_s)
        if work.decodes is not None and batch is None:
            items = work.items
        elif work.decodes is not None:
            tokens = tokens[len(work.decodes) :]
        commit = self._table.commit
        for item, token in zip(items, tokens, strict=True):
            if not item.sequence.alive:
                continue  # It ended while the step was in flight.
            if item.guessed:
                if item.is_right:
                    commit(item, token, now_s)
                continue
            commit(item, token, now_s)
            if item.samples and not item.sequence.rehearsal:
                if item.end_token == item.sequence.prompt_tokens + item.sequence.sampling.forced_tokens:
                    self._tally.first_s.add(now_s - item.sequence.received_s)
                sampled.append((item.sequence, item.end_token - item.sequence.prompt_tokens))
                if token is not None and token.state is not None and item.sequence.alive:
                    states.append(
                        AnswerState(
                            ref=item.sequence.ref,
                            prompt_tokens=item.sequence.prompt_tokens,
                            generated_tokens=item.sequence.generated_tokens,
                            max_tokens=item.sequence.sampling.max_tokens,
                            state=token.state,
                        )
                    )
        decoded_tokens = work.decoded_tokens
        if self._guessing is not None:
            decoded_tokens -= self._guessing.learn(work, step_s)
        prefixes = self._table.prefixes
        if prefixes is not None and prefixes.doubted:
            self._table.settle_audits(now_s)
        self._table.in_flight.end()
        ended = (*work.ended, *self._table.take_ended())
        queued = work.queued
        if ended:
            for sequence in ended:
                queued.ended.add(sequence.ref)
                if sequence.finish_reason in _WHOLE and not sequence.rehearsal:
                    self._tally.last_s.add(now_s - sequence.received_s)
        queued.steps_done += 1
        queued.passed.update(work.passed)
        is_over = queued.over and queued.plan.seq > 0
        if is_over:
            self._plans.finish_head()
        prefilled_tokens = work.prefilled_tokens
        prefill_s = self._speed.on_step(prefilled_tokens, decoded_tokens, step_s, work.preceding_tokens)
        if prefill_s and prefixes is not None:
            prefixes.on_prefilled(prefilled_tokens, prefill_s)
        self._reports.on_step(prefilled_tokens, decoded_tokens)
        self._tally.tokens.add(prefilled_tokens + decoded_tokens)
        frames = self._frames(sampled, ended, batch)
        observed = self._observed(states) if states else None
        is_due = queued.over or queued.plan.report_at in (0, queued.steps_done)
        if not (is_due or ended or work.has_news or self._reports.gains):
            return StepEffects(frames, observed=observed)
        stepped = self._reports.of_step(work, ended, plan_over=is_over, step_s=step_s)
        return StepEffects(frames, (stepped,), observed)

    def _commit_decodes(
        self, batch: DecodeBatch, tokens: Sequence[Sampled | None], now_s: float
    ) -> DecodeBatch | None:
        """Commit a batch and return its rows that were alive; None, with nothing done, if one needs more."""
        values = tokens.decodes if isinstance(tokens, StepTokens) else as_array(tokens[: len(batch)])
        if values is None or int(values.min()) < 0:
            return None
        if batch.group.revision != self._table.revision:
            alive = [row for row, sequence in enumerate(batch.group.sequences) if sequence.alive]
            if not alive:
                return None
            if len(alive) < len(batch):
                batch, values = batch.only(alive, self._table.revision), values[alive]
        self._table.commit_decodes(batch, values, now_s)
        return batch

    def publish_full(self) -> None:
        """Publish blocks that became full; otherwise `begin_step` does so."""
        self._table.publish_full()

    def _observed(self, states: Sequence[AnswerState]) -> WorkerObserved:
        identity = self._identity
        return WorkerObserved(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            model=identity.model,
            states=tuple(states[: min(MOST_STATES, _MOST_OBSERVED_BYTES // len(states[0].state))]),
        )

    def report(self, now_s: float) -> WorkerReported:
        """Return a heartbeat, or the answer to a snapshot; its sender sets `seq`."""
        pool, prefixes = self._table.pool, self._table.prefixes
        return WorkerReported(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            seq=0,
            stepped_seq=self._reports.last_seq,
            epoch=self._plans.epoch,
            plan_seq=self._plans.last_seq,
            model=self._identity.model,
            block_tokens=pool.block_tokens,
            max_context_tokens=self._identity.max_context_tokens,
            batch_sequences=self._identity.carries[0],
            step_tokens=self._identity.carries[1],
            capacity=capacity_of(pool),
            sequences=self._table.reports(now_s),
            host=self._identity.host,
            weights=self._identity.weights,
            adapters=self._identity.adapters,
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
            prefill_context_tokens=as_count(round(self._speed.prefill_context_tokens)),
            decode_step_s=self._speed.decode_step_s,
            fingerprint=self._identity.fingerprint,
            caches_prefixes=prefixes is not None,
            host_block_s=0.0 if prefixes is None else prefixes.cache.gate.block_s(Tier.HOST),
            cache=None if prefixes is None else prefixes.cache.report(),
            swap_room_blocks=0 if prefixes is None else prefixes.cache.keepable_blocks,
            shadow_room_blocks=0 if prefixes is None else prefixes.cache.shadows.room_blocks(now_s),
            steps=self._tally.report(),
            protocol=PROTOCOL,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless queue and table are each consistent."""
        self._plans.check_integrity()
        self._table.check_integrity()

    def _must_settle(self, now_s: float) -> bool:
        """Whether the steps in flight have to be over before the next one is prepared."""
        queued, table = self._plans.first(), self._table
        if queued is None or table.put_off or not queued.is_valid(now_s):
            return True
        if self._whole is queued:
            return False
        plan, missing = queued.plan, 0
        found = queued.decoding = [table.find(item.ref) for item in plan.decodes]
        if not queued.has_begun:
            chunked = [table.find(item.ref) for item in plan.prefills]
            if (
                plan.preemptions
                or plan.drops
                or any(each is not None and each.is_in_flight for each in chunked)
            ):
                return True
            allocated = [item.allocated_blocks for items in (plan.decodes, plan.prefills) for item in items]
            for blocks, sequence in zip(allocated, (*found, *chunked), strict=True):
                missing += max(0, blocks - (0 if sequence is None else len(sequence.blocks)))
        is_delicate = any(
            each is not None and (each.open_tokens or each.audited) and each.is_in_flight for each in found
        )
        return is_delicate or not table.pool.can_allocate(missing)

    def _begin(self, queued: QueuedPlan, work: StepWork) -> None:
        """Note that a step is in flight."""
        queued.steps_begun += 1
        self._table.in_flight.begin()
        if work.decodes is not None:
            work.decodes.begin()
        for item in work.others:
            item.sequence.begun_tokens = item.end_token

    def _prepare(self, queued: QueuedPlan, now_s: float) -> StepWork:
        """Apply the valid items of the plan's next step; report each skipped item once per plan."""
        plan, first = queued.plan, not queued.has_begun
        queued.has_begun = True
        skipped = self._table.apply_plan(plan, now_s) if first else []
        ended = self._table.take_ended()
        for gone in ended:
            queued.ended.add(gone.ref)
        self._items, self._passed, self._skipped = [], [], skipped
        batch = None if first or self._table.put_off else self._continued(queued)
        if batch is None:
            seen: set[int] = set()
            if first:
                for chunk in plan.prefills:
                    sequence = self._table.find(chunk.ref)
                    if sequence is None or id(sequence) not in seen:
                        seen.add(id(sequence))
                        self._apply(queued, chunk, sequence)
            batch = self._decodes(queued, seen)
        items, passed = self._items, self._passed
        if self._table.put_off:
            planned_tokens = sum(item.end_token - item.first_token for item in items)
            planned_tokens += 0 if batch is None else len(batch)
            for ref, resumed in self._table.resume(now_s, max(_LEAST_RESUMED, _MOST_TOKENS - planned_tokens)):
                if isinstance(resumed, WorkItem):
                    items.append(resumed)
                else:
                    skipped.append(SkippedItem(ref=ref, reason=resumed))
        guessing = self._guessing
        if guessing is not None and batch is not None and all(item.is_decode for item in items):
            batch, is_whole = guessing.take_out(batch, items, self._table.revision)
            self._whole = self._whole if is_whole else None
        waiting = self._table.put_off
        waits = bool(passed or (waiting and any(item.ref.key in waiting for item in plan.prefills)))
        hits = () if self._table.prefixes is None else self._table.prefixes.take_hits()
        shorts = self._table.late.take_shorts()
        told = (tuple(skipped), tuple(ended), hits, shorts)
        self._last = batch
        return StepWork(queued, tuple(items), *told, tuple(passed), waits, batch)

    def _continued(self, queued: QueuedPlan) -> DecodeBatch | None:
        """Return the next step of the group that has all of the plan's decodes; None when there is none."""
        batch, table = self._last, self._table
        if self._whole is not queued or batch is None or batch.group.revision != table.revision:
            return None
        is_known = batch.sampled is not None or table.in_flight
        return batch.next() if is_known and batch.group.goes_on(batch) else None

    def _decodes(self, queued: QueuedPlan, seen: set[int]) -> DecodeBatch | None:
        """Apply the plan's decodes, except for the sequences `seen`; return those that make a group."""
        table, items, size = self._table, self._items, self._table.pool.block_tokens
        found = queued.decoding
        if found is None:
            found = queued.decoding = [table.find(item.ref) for item in queued.plan.decodes]
        plain: dict[int, HeldSequence] = {}
        is_whole = not seen
        for at, item in enumerate(queued.plan.decodes):
            sequence = found[at]
            if sequence is not None and sequence.is_plain and not (seen and id(sequence) in seen):
                done, begun = sequence.computed_tokens, sequence.begun_tokens
                goes_on = begun <= done or begun + 1 < sequence.limit_tokens
                held_blocks = len(sequence.blocks)
                if goes_on and item.allocated_blocks <= held_blocks and max(done, begun) < held_blocks * size:
                    plain[id(sequence)] = sequence
                    continue
            if sequence is None:
                sequence = found[at] = table.find(item.ref)
            if sequence is not None and (id(sequence) in seen or id(sequence) in plain):
                continue
            count = len(items)
            self._apply(queued, item, sequence)
            if sequence is not None and sequence.is_plain and len(items) > count:
                plain[id(sequence)] = items.pop().sequence
            else:
                seen.add(id(sequence))
                is_whole = is_whole and (sequence is None or not sequence.alive)
        self._whole = queued if is_whole else None
        if not plain:
            return None
        return SteadyGroup(by_length(plain.values()), size, table.revision).first

    def _apply(self, queued: QueuedPlan, item: PrefillChunk | Decode, sequence: HeldSequence | None) -> None:
        """Apply one item of a plan; report it once if it cannot be applied."""
        prepared = self._table.prepare(item, sequence)
        if isinstance(prepared, WorkItem):
            self._items.append(prepared)
        elif isinstance(prepared, PutOff):
            if isinstance(item, Decode):
                self._passed.append(item.ref)
        elif prepared is not None and item.ref not in queued.ended and item.ref not in queued.skips_reported:
            queued.skips_reported.add(item.ref)
            self._skipped.append(SkippedItem(ref=item.ref, reason=prepared))

    def _may_pass(self) -> bool:
        """Whether a plan behind the head has a sequence that is not put off."""
        put_off = self._table.put_off
        refs = (
            item.ref
            for plan in self._plans.behind()
            for items in (plan.prefills, plan.decodes)
            for item in items
        )
        return any(ref.key not in put_off for ref in refs)

    def _frames(
        self,
        sampled: Sequence[tuple[HeldSequence, int]],
        ended: Sequence[HeldSequence],
        batch: DecodeBatch | None = None,
    ) -> tuple[AddressedFrame, ...]:
        """Return frames with this step's tokens and ends, without sequences that were cancelled."""
        changed = list(sampled)
        if ended:
            told = {id(sequence) for sequence, _ in sampled}
            if batch is not None:
                told.update(map(id, batch.group.sequences))
            changed += [
                (sequence, sequence.generated_tokens)
                for sequence in ended
                if id(sequence) not in told and self._table.find(sequence.ref) is sequence
            ]
        deltas = {} if batch is None else decoded(batch, has_ends=bool(ended))
        return assemble(self._identity.worker_id, self._identity.incarnation, changed, deltas)
