"""The table of sequences that a worker holds, and the rules for applying plan items to them. Pure.

A plan states intent: an item is applied where it is valid and otherwise reported with a `SkipReason`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

import msgspec

from services.worker.core.decodes import DecodeBatch, Int64s, is_plain
from services.worker.core.in_flight import InFlight
from services.worker.core.late_tokens import Latecomers
from services.worker.core.plans import PutOff, WorkItem
from services.worker.core.prefixes import Prefixes
from services.worker.core.sampling import FAILED, KV_LOST, Sampled
from services.worker.core.sequence import HeldSequence
from services.worker.kv.core.block_pool import BlockTable, block_table
from services.worker.kv.core.borrowed_pool import ExtendedPool, Pool
from shared.errors import InvalidRequest
from shared.liveness import AwakeTime, Liveness
from shared.messages.plans import (
    BatchPlan,
    Decode,
    Preemption,
    PreemptMode,
    PrefillChunk,
    SkippedItem,
    SkipReason,
)
from shared.messages.reports import SequenceReport, SequenceState
from shared.messages.sequence import FinishReason, SequenceKey, SequenceRef, SequenceSpec, proof_of
from shared.messages.tokens import ExtendSequence
from shared.ttl_map import Tombstones

MAX_SEQUENCES = 8192
"""Maximum number of held sequences, ended ones included."""
_MOST_BURIED = 65_536
"""Maximum number of tombstones per gateway."""
_LONGEST_WAIT_S = 2.0
"""Maximum wait for stored blocks; after it they are computed."""


@dataclass(frozen=True, slots=True)
class SequenceLimits:
    """Limits within which the worker can compute a sequence."""

    max_context_tokens: int
    vocabulary: int
    end_retention_s: float
    gateway_timeout_s: float
    adapters: tuple[str, ...] = ()


class SequenceTable:
    """Held sequences by (request, choice), their blocks, and tombstones of those that may not return.
    `prefixes` shares blocks between sequences; None: each sequence computes all of its blocks."""

    def __init__(
        self,
        pool: Pool,
        limits: SequenceLimits,
        prefixes: Prefixes | None = None,
        worker: tuple[str, int] = ("", 0),
    ) -> None:
        """With `prefixes`, `pool` is its cache or extends it. `worker`: this worker's id and incarnation."""
        self.pool = pool
        self._own = pool.own if isinstance(pool, ExtendedPool) else pool
        """The worker's own blocks: `pool` matters only once they are too few."""
        self._own_ids = pool.own_blocks if isinstance(pool, ExtendedPool) else inf
        self._worker = worker
        self.prefixes = prefixes
        self._block_tokens = pool.block_tokens
        self._limits = limits
        self._held: dict[SequenceKey, HeldSequence] = {}
        self._buried = Tombstones(limits.end_retention_s, _MOST_BURIED)
        """Sequences that were cancelled, dropped or acknowledged."""
        self._gateways = Liveness(limits.gateway_timeout_s)
        self._awake = AwakeTime(longest_gap_s=limits.gateway_timeout_s / 2)
        """Steps may be long; messages that arrive during one are read right after it."""
        self._unreported: list[HeldSequence] = []
        self.late = Latecomers()
        self.make_room: Callable[[HeldSequence, int], bool] = lambda *_: False  # see `core.guessing`
        self.revision = 0
        """Number of changes after which a `DecodeGroup` is invalid."""
        self.in_flight = InFlight(self._give_back)
        self._unpublished: list[HeldSequence] = []
        self.put_off: dict[SequenceKey, HeldSequence] = {}
        """Sequences that wait for stored blocks, or are behind what plans count as computed."""
        if isinstance(pool, ExtendedPool):
            pool.on_moved = self._follow

    def find(self, ref: SequenceRef) -> HeldSequence | None:
        """Return the sequence if exactly this attempt is held."""
        held = self._held.get((ref.request_id, ref.choice))
        return held if held is not None and held.ref.attempt == ref.attempt else None

    def check_owner(self, ref: SequenceRef, sender: str, heir_key: bytes = b"") -> None:
        """Raise ForeignSequence if `sender` may not act on the sequence held under that name."""
        held = self._held.get(ref.key)
        if held is not None:
            held.check_use(ref, sender, heir_key)

    def add_late(self, extend: ExtendSequence) -> None:
        """Add tokens that a sequence was started without. Raises InvalidRequest for unknown tokens."""
        vocabulary = self._limits.vocabulary
        if max(extend.tokens, default=0) >= vocabulary:
            raise InvalidRequest(f"{extend.ref}: a token is outside the model's vocabulary of {vocabulary}")
        self.late.add(extend.sender, extend.ref, extend.first_index, extend.tokens)

    def take_ended(self) -> list[HeldSequence]:
        """Return the sequences that ended or were cancelled since the last call."""
        ended, self._unreported = self._unreported, []
        return ended

    def close_all(self) -> None:
        """Stop taking late tokens for any sequence."""
        self.late.close_all(self._held.values())

    def reports(self, now_s: float) -> tuple[SequenceReport, ...]:
        return tuple(held.report(now_s) for held in self._held.values())

    def apply_plan(self, plan: BatchPlan, now_s: float) -> list[SkippedItem]:
        """Apply what a plan does once, before its first step: drops, preemptions, starts."""
        for ref in plan.drops:
            self.cancel(ref, FinishReason.CANCELLED, now_s)
        unknown = [one.ref for one in plan.preemptions if not self._preempt(one)]
        skipped = [SkippedItem(ref=ref, reason=SkipReason.UNKNOWN) for ref in unknown]
        for spec in plan.starts:
            reason = self._start(spec, now_s)
            if reason is not None:
                skipped.append(SkippedItem(ref=spec.ref, reason=reason))
        return skipped

    def prepare(
        self, item: PrefillChunk | Decode, sequence: HeldSequence | None
    ) -> WorkItem | SkipReason | PutOff | None:
        """Allocate blocks for one item; return what to compute or why not. None: nothing is left to do.
        `sequence` is what `find` returns for the item. `resume` does what is put off."""
        if sequence is None or not sequence.alive:
            return SkipReason.UNKNOWN
        if self.put_off and sequence.is_put_off:
            return self._join(sequence, item)
        if sequence.open_tokens:
            item = self.late.join(sequence, item)
        held_tokens, is_decode = len(sequence.tokens), isinstance(item, Decode)
        if isinstance(item, Decode) and sequence.is_in_flight:
            first = sequence.next_position
            if first + 1 >= sequence.limit_tokens:
                return None  # The token in flight is its last.
            end, aligned = first + 1, first == held_tokens
            held_tokens = end
        elif isinstance(item, Decode):
            first, end = sequence.computed_tokens, held_tokens
            aligned = sequence.state is SequenceState.DECODING
        else:
            first, end = item.first_token, item.end_token
            aligned = sequence.may_begin_at(first)
        if not aligned or not first < end <= held_tokens:
            return SkipReason.MISALIGNED
        if not is_decode and self.prefixes is not None:
            self.prefixes.extend(sequence, item.allocated_blocks)
            if sequence.computed_tokens and sequence.state is SequenceState.WAITING:
                sequence.move_to(SequenceState.PREFILLING)
            if sequence.awaited is not None and isinstance(item, PrefillChunk):
                return self._put_off(sequence, item)
            first = sequence.computed_tokens
        held_blocks = len(sequence.blocks)
        if item.allocated_blocks > held_blocks:
            missing = item.allocated_blocks - held_blocks
            pool = self._pool_with(missing)
            if pool is None:
                if not self._will_have(missing):
                    return SkipReason.NO_BLOCKS
                return PutOff.PUT_OFF if isinstance(item, Decode) else self._put_off(sequence, item)
            sequence.blocks.extend(pool.allocate(missing))
            held_blocks = item.allocated_blocks
        if held_blocks * self._block_tokens < end and not (is_decode and self.make_room(sequence, end)):
            return SkipReason.EXHAUSTED
        if first >= end:
            return None
        return WorkItem(sequence, first, end, end == held_tokens, is_decode)

    def resume(self, now_s: float, most_tokens: int) -> list[tuple[SequenceRef, WorkItem | SkipReason]]:
        """Return work that was put off and can run now, up to about `most_tokens`."""
        done: list[tuple[SequenceRef, WorkItem | SkipReason]] = []
        for key, sequence in list(self.put_off.items()):
            if self._waits(sequence, now_s):
                continue
            chunk, sequence.postponed = sequence.postponed, None
            del self.put_off[key]
            first = sequence.computed_tokens
            if chunk is None or first >= chunk.end_token:
                continue
            if most_tokens <= 0:
                self._put_off(sequence, chunk)
                continue
            prepared = self.prepare(msgspec.structs.replace(chunk, first_token=first), sequence)
            if isinstance(prepared, WorkItem):
                first, end = prepared.first_token, prepared.end_token
                if end - first > most_tokens:
                    self._put_off(sequence, chunk)
                    prepared = WorkItem(sequence, first, first + most_tokens, False, False)
                most_tokens -= prepared.end_token - first
            if isinstance(prepared, WorkItem | SkipReason):
                done.append((sequence.ref, prepared))
        return done

    def give_up_postponed(self) -> None:
        """Drop work put off for earlier plans: a snapshot reports how far each sequence is computed."""
        for key, sequence in list(self.put_off.items()):
            sequence.postponed = None
            if sequence.awaited is None:
                del self.put_off[key]

    def commit(self, item: WorkItem, sampled: Sampled | None, now_s: float) -> None:
        """Record that an item was computed. `sampled` is None when it samples no token; `FAILED` ends the
        sequence with ERROR, and `KV_LOST` with KV_LOST."""
        sequence = item.sequence
        if sampled is not None and sampled.token == KV_LOST.token:
            self.end(sequence, FinishReason.KV_LOST, now_s)
            return
        if (item.samples and sampled is None) or (sampled is not None and sampled.token == FAILED.token):
            self.end(sequence, FinishReason.ERROR, now_s)
            return
        sequence.computed_tokens = item.end_token
        if self.prefixes is not None:
            if sequence.kept and item.end_token >= len(sequence.kept) * self._block_tokens:
                self.prefixes.let_be(sequence)
            if item.end_token // self._block_tokens > sequence.published_blocks:
                self.prefixes.publish(sequence)
        if sequence.state is SequenceState.WAITING:
            sequence.move_to(SequenceState.PREFILLING)
        if sampled is None:
            return
        sequence.append(sampled)
        if sequence.state is SequenceState.PREFILLING:
            sequence.move_to(SequenceState.DECODING)
        reason = sequence.due_reason()
        if reason is not None:
            self.end(sequence, reason, now_s)
        elif not sequence.is_plain:
            sequence.is_plain = is_plain(sequence)

    def commit_decodes(self, batch: DecodeBatch, tokens: Int64s, now_s: float) -> None:
        """Record that all rows of a batch were computed. `publish_full` publishes their full blocks."""
        full, due = batch.commit(tokens)
        self._unpublished += full
        for sequence in due:
            if (reason := sequence.due_reason()) is not None:
                self.publish_full()
                self.end(sequence, reason, now_s)

    def publish_full(self) -> None:
        """Publish the blocks that batches have filled since the last call."""
        unpublished, self._unpublished = self._unpublished, []
        for sequence in unpublished:
            if self.prefixes is not None:
                self.prefixes.publish(sequence)

    def settle_audits(self, now_s: float) -> None:
        """Forget stored blocks that an audit refuted; end the sequences that have them as KV_LOST."""
        if self.prefixes is None or not self.prefixes.doubted:
            return
        doubted, self.prefixes.doubted = self.prefixes.doubted, []
        for sequence, block in doubted:
            self.lose_blocks([block], now_s)
            self.prefixes.end_audit(sequence)
            self.prefixes.cache.condemn(block)
            if sequence.alive:
                self.prefixes.publish(sequence)

    def end(self, sequence: HeldSequence, reason: FinishReason, now_s: float) -> None:
        """End an alive sequence. It is kept without blocks until acknowledged, or for `end_retention_s`.
        A rehearsal is forgotten at once."""
        self._free(sequence)
        if self.prefixes is not None and sequence.kept:
            self.prefixes.let_be(sequence)
        sequence.move_to(SequenceState.ENDED)
        sequence.finish_reason = reason
        sequence.ended_s = now_s
        self._unreported.append(sequence)
        if sequence.rehearsal:
            self._held.pop(sequence.ref.key, None)
            self._buried.put(sequence.gateway_id, sequence.ref, now_s)

    def lose_blocks(self, blocks: Iterable[int], now_s: float) -> None:
        """Forget blocks whose KV is gone; end the sequences that have any of them as KV_LOST."""
        gone = set(blocks)
        for held in list(self._held.values()):  # a rehearsal is forgotten with its end
            if self.prefixes is not None and not gone.isdisjoint(held.audited):
                self.prefixes.end_audit(held)
            if held.alive and not gone.isdisjoint(held.blocks):
                self.end(held, FinishReason.KV_LOST, now_s)
        if isinstance(self.pool, ExtendedPool):
            self.in_flight.lose(gone)  # first: a stored block that is lost must have no user
            self.pool.lose(gone)

    def cancel(
        self,
        ref: SequenceRef,
        reason: FinishReason,
        now_s: float,
        gateway_id: str = "",
        heir_key: bytes = b"",
    ) -> None:
        """Forget this attempt of a sequence and every lower one, now and if they arrive later. Without
        `gateway_id`, the owner is that of the held sequence. Raises ForeignSequence when another gateway owns
        it and the sender is no heir."""
        held = self._held.get(ref.key)
        if held is not None:
            if gateway_id:
                held.check_use(ref, gateway_id, heir_key)
            gateway_id = held.gateway_id
        if gateway_id:
            self._buried.put(gateway_id, ref, now_s)
        if held is not None and held.ref.attempt <= ref.attempt:
            if held.alive:
                self.end(held, reason, now_s)
            self._held.pop(ref.key, None)

    def acknowledge(self, refs: Iterable[SequenceRef], sender: str, now_s: float) -> None:
        """Forget ended sequences that their gateway has read to the end. Raises ForeignSequence if any
        belongs to another gateway; those are kept."""
        others: list[HeldSequence] = []
        for ref in refs:
            held = self.find(ref)
            if held is not None and not held.may_be_used_by(sender):
                others.append(held)
            elif held is not None and not held.alive:
                del self._held[ref.key]
                self._buried.put(held.gateway_id, ref, now_s)
        for held in others:
            held.check_use(held.ref, sender)

    def hear_gateway(self, gateway_id: str, incarnation: int, now_s: float) -> None:
        """Note a gateway's heartbeat. Sequences of its earlier incarnations have no reader and are cancelled;
        those that may have an heir, after a while."""
        if not self._gateways.hear(gateway_id, incarnation, self._awake.at(now_s)):
            return
        for held in list(self._held.values()):
            if held.gateway_id != gateway_id or held.gateway_incarnation == incarnation:
                continue
            if not held.heir_digest:
                self.cancel(held.ref, FinishReason.GATEWAY_LOST, now_s)
            elif held.orphaned_s is None:
                held.orphaned_s = now_s

    def tick(self, now_s: float) -> None:
        """Forget ends that were kept too long; end sequences whose gateway is silent."""
        self._buried.expire(now_s)
        self.late.tick(self._held.values(), now_s)
        for held in list(self._held.values()):
            if not held.alive and now_s - held.ended_s > self._limits.end_retention_s:
                del self._held[held.ref.key]
        silent = self._gateways.silent(self._awake.at(now_s))
        for held in list(self._held.values()):
            orphaned_s = held.orphaned_s
            if held.alive and held.gateway_id in silent:
                self.end(held, FinishReason.GATEWAY_LOST, now_s)
            if orphaned_s is not None and now_s - orphaned_s > self._limits.gateway_timeout_s:
                self.cancel(held.ref, FinishReason.GATEWAY_LOST, now_s)

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks are conserved and every sequence is consistent."""
        self.pool.check_integrity(
            [block for held in self._held.values() for block in (*held.blocks, *held.audited)]
            + [block for blocks in self.in_flight.blocks for block in blocks]
        )
        for key, held in self._held.items():
            assert held.ref.key == key
            assert not self._buried.covers(held.gateway_id, held.ref), f"{held.ref} is held and buried"
            assert held.computed_tokens <= len(held.blocks) * self._block_tokens
            held.check_integrity()
            assert held.is_put_off == (self.put_off.get(key) is held)
            assert held.alive or (held.finish_reason is not None and not held.blocks and not held.kept)
            if held.state is SequenceState.DECODING:
                late_tokens = len(held.tokens) - 1 - held.computed_tokens
                assert late_tokens == 0 or (late_tokens > 0 and held.takes_late)
            if held.state is SequenceState.WAITING:
                assert held.computed_tokens == 0

    def _put_off(self, sequence: HeldSequence, chunk: PrefillChunk) -> PutOff:
        sequence.postponed = chunk
        self.put_off[sequence.ref.key] = sequence
        if sequence.state is SequenceState.WAITING:
            sequence.move_to(SequenceState.PREFILLING)
        return PutOff.PUT_OFF

    def _join(self, sequence: HeldSequence, item: PrefillChunk | Decode) -> SkipReason | PutOff:
        """Handle an item for a sequence that is put off: a chunk is added to what it has to compute."""
        before = sequence.postponed
        if isinstance(item, Decode):
            return SkipReason.MISALIGNED if before is None else PutOff.PUT_OFF
        first, end = item.first_token, item.end_token
        stands = sequence.computed_tokens if before is None else before.end_token
        is_aligned = first == stands or 0 < first <= max(stands, sequence.promised_tokens)
        if not is_aligned or not first < end <= len(sequence.tokens) + sequence.open_tokens:
            return SkipReason.MISALIGNED
        if before is not None:
            blocks = max(before.allocated_blocks, item.allocated_blocks)
            item = msgspec.structs.replace(
                item, end_token=max(end, before.end_token), allocated_blocks=blocks
            )
        return self._put_off(sequence, item)

    def _waits(self, sequence: HeldSequence, now_s: float) -> bool:
        """Whether the sequence still waits for stored blocks; ends the wait once it is over or too long."""
        if sequence.awaited is None or self.prefixes is None:
            return False
        if sequence.awaited_until_s is None:
            sequence.awaited_until_s = now_s + _LONGEST_WAIT_S
        if not sequence.awaited.is_over and now_s < sequence.awaited_until_s:
            return True
        self.prefixes.collect(sequence)
        return False

    def _free(self, sequence: HeldSequence) -> None:
        if self.prefixes is not None and sequence.awaited is not None:
            self.prefixes.abandon(sequence)
        if self.prefixes is not None and sequence.audited:
            self.prefixes.end_audit(sequence)
        self.put_off.pop(sequence.ref.key, None)
        self.revision += 1
        (self.in_flight.leave if sequence.is_in_flight else self._give_back)(sequence.blocks)
        sequence.forget_blocks()

    def _give_back(self, blocks: BlockTable) -> None:
        is_own = max(blocks, default=0) < self._own_ids
        (self._own if is_own else self.pool).release(blocks)

    def _follow(self, moves: Mapping[int, int]) -> None:
        """Rename blocks in place, as the rows of a step share the same tables."""
        self.revision += 1
        for blocks in (*(held.blocks for held in self._held.values()), *self.in_flight.blocks):
            blocks[:] = block_table(moves.get(block, block) for block in blocks)

    def _pool_with(self, blocks: int) -> Pool | None:
        """A pool that can allocate so many blocks; None: there is none. Ends audits to make room."""
        for pool in (self._own, self.pool):
            if pool.can_allocate(blocks):
                return pool
        if self.prefixes is not None:  # Plans count on blocks that are held only to be compared.
            for held in self._held.values():
                self.prefixes.end_audit(held)
        return self.pool if self.pool.can_allocate(blocks) else None

    def _will_have(self, blocks: int) -> bool:
        """Whether so many blocks will be free once all loads have ended."""
        if self.prefixes is None or not self.prefixes.cache.arriving_blocks:
            return False
        awaited = sum(held.allocated_blocks - len(held.blocks) for held in self.put_off.values())
        used = {block for held in self._held.values() for block in held.blocks}
        return blocks <= self.pool.total_blocks - len(used) - awaited

    def _preempt(self, preemption: Preemption) -> bool:
        sequence = self.find(preemption.ref)
        if sequence is None or not sequence.alive:
            return False
        if self.prefixes is not None and preemption.mode is PreemptMode.SWAP:
            self.prefixes.keep(sequence)
        if sequence.postponed is not None and sequence.postponed.end_token >= len(sequence.tokens):
            self.late.miss(sequence, 1)  # Plans count on the token that it would have sampled.
        self._free(sequence)
        if sequence.state is not SequenceState.WAITING:
            sequence.move_to(SequenceState.WAITING)
        return True

    def _start(self, spec: SequenceSpec, now_s: float) -> SkipReason | None:
        held = self._held.get(spec.ref.key)
        if held is not None and held.gateway_id != spec.gateway_id:
            return SkipReason.UNKNOWN
        if held is not None and held.ref.attempt == spec.ref.attempt:
            return None
        superseded = held is not None and held.ref.attempt > spec.ref.attempt
        if superseded or self._buried.covers(spec.gateway_id, spec.ref):
            return SkipReason.UNKNOWN
        awake_s = self._awake.at(now_s)
        if not self._gateways.expect(spec.gateway_id, spec.gateway_incarnation, awake_s):
            return SkipReason.UNKNOWN
        if held is not None:
            self.cancel(held.ref, FinishReason.CANCELLED, now_s)
        if len(self._held) >= MAX_SEQUENCES and not self._forget_an_end():
            return SkipReason.NO_BLOCKS
        sequence = HeldSequence.from_spec(spec, self._limits.max_context_tokens, now_s)
        sequence.proof = proof_of(spec.capability, *self._worker)
        self._held[spec.ref.key] = sequence
        limits = self._limits
        fits = sequence.is_within(limits.max_context_tokens, limits.vocabulary, limits.adapters)
        reason = sequence.due_reason() if fits else FinishReason.ERROR
        if reason is not None:
            self.end(sequence, reason, now_s)
        return None

    def _forget_an_end(self) -> bool:
        """Forget the sequence that ended first; False when all are alive."""
        ended = [held for held in self._held.values() if not held.alive]
        if ended:
            del self._held[min(ended, key=lambda held: held.ended_s).ref.key]
        return bool(ended)
