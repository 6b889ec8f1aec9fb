"""All sequences the scheduler knows, their workers, and recently finished ones. Pure.

Only this module adds and removes sequences. `fleet` decides which worker is lost.
"""

from collections import Counter

from services.scheduler.core.backlog import NO_QUESTION, Backlog, Feed, item_of
from services.scheduler.core.effects import (
    AskPlacement,
    CancelAtWorker,
    Effect,
    GiveToShard,
    NotePlaced,
    SequenceLeft,
)
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import HELD, Kind, Phase, Sequence, kinds_of
from services.scheduler.core.worker_pipeline import Sync, WorkerPipeline
from services.scheduler.policy.contract import BY_ARRIVAL, QueueRule
from services.scheduler.policy.waiting_queue import Line
from shared.errors import KvasirError
from shared.messages.moves import WorkerRoles
from shared.messages.reports import SequenceReport, WorkerReported
from shared.messages.sequence import FinishReason, SequenceKey, SequenceRef, Tenant, is_beyond_share
from shared.ttl_map import RecentMap, Tombstones


def _limit(sequence: Sequence) -> tuple[int, tuple[float, SequenceKey]]:
    return (-sequence.limit_tokens, sequence.order)


def _features(report: WorkerReported) -> tuple[object, ...]:
    """Return the worker's properties that affect other workers."""
    return (report.max_context_tokens, report.fingerprint, report.block_tokens, report.caches_prefixes)


_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)
_LIMIT = 65_536
"""Maximum entries of each record of finished things."""
_IDLE_S = 2.0
"""Seconds in which a sequence that runs alone waits for an idle worker, such as a restarted one."""
_TOLD_S = 3.0
"""Seconds for which a roles message from placement is valid."""
_ONE_SIDED = ({"prefill"}, {"decode"})
"""Worker roles with which no request can be served."""


class Roster:
    """The tables of sequences by key and pipelines by worker, and the backlog between them."""

    def __init__(self, rules: Rules, rule: QueueRule = BY_ARRIVAL) -> None:
        self.rules = rules
        self.sequences: dict[SequenceKey, Sequence] = {}
        self.phases: Counter[Phase] = Counter()
        """Number of `sequences` by phase."""
        self.pipelines: dict[str, WorkerPipeline] = {}
        self._changed: dict[str, WorkerPipeline] = {}
        self._welcomed = 0
        self.feed = Feed(rules.feed_sequences)
        """Requests that wait at workers."""
        self.backlog = Backlog(rules, rule, self.feed)
        self.unready: dict[str, None] = {}
        """Workers that are not in step."""
        self._at: dict[str, dict[SequenceKey, Sequence]] = {}
        """Sequences by worker."""
        self._by_limit: Line[Sequence] = Line(_limit)
        self.roles = WorkerRoles()
        """Placement's latest message, and when it came."""
        self.roles_told_s = float("-inf")
        self.known_summary: tuple[int | None, tuple[Kind, ...]] | None = None
        """Cache of `summary`; None after the usable workers or their features changed."""
        self.tombstones = Tombstones(rules.tombstone_s, _LIMIT)
        """Cancelled attempts."""
        self.owners: RecentMap[SequenceKey, str] = RecentMap(max(rules.tombstone_s, rules.ended_s), _LIMIT)
        """Gateway of each sequence that a worker held recently, or that an unsynced worker reports."""
        self.ended: RecentMap[SequenceKey, tuple[int, str]] = RecentMap(rules.ended_s, _LIMIT)
        """Ended attempt and the worker that keeps its tokens."""
        self.dropped: RecentMap[tuple[str, SequenceKey], tuple[int, KvasirError]] = RecentMap(
            rules.tombstone_s, _LIMIT
        )
        """By gateway and sequence: the attempt that was given up, and the error."""
        self.handed: RecentMap[tuple[str, SequenceKey], tuple[int, int]] = RecentMap(
            rules.tombstone_s, _LIMIT
        )
        """By gateway and sequence: the attempt that was handed over, and to which shard."""
        self._alone: dict[SequenceKey, Sequence] = {}
        """Sequences beside which nothing else may run."""
        self.reserved: dict[str, SequenceKey] = {}
        """Workers of such sequences, from the wait for the worker to become idle."""
        self.lost_workers: RecentMap[str, int] = RecentMap(rules.tombstone_s, _LIMIT)
        """Incarnation of each lost worker, until it reports again."""

    def find(self, ref: SequenceRef) -> Sequence | None:
        """Return the sequence if exactly this attempt is known."""
        sequence = self.sequences.get(ref.key)
        return sequence if sequence is not None and sequence.ref.attempt == ref.attempt else None

    def is_foreign(self, key: SequenceKey, gateway_id: str, now_s: float) -> bool:
        """Return whether the key belongs, or recently belonged, to another gateway."""
        known = self.sequences.get(key)
        owner = self.owners.get(key, now_s) if known is None else known.gateway_id
        return owner not in (None, gateway_id)

    def note_owner(self, listed: SequenceReport, now_s: float) -> list[Effect]:
        """Record an unsynced worker's sequence; an unconfirmed one of another gateway is dropped."""
        key = listed.ref.key
        known = self.sequences.get(key)
        if not listed.gateway_id or (known is not None and known.gateway_id == listed.gateway_id):
            return []
        if known is None:
            if self.owners.get(key, now_s) is None:
                self.owners.put(key, listed.gateway_id, now_s)
            return []
        if known.confirmed:
            return []
        left = self.leave(known, Phase.DROPPED, now_s)
        self.owners.put(key, listed.gateway_id, now_s)
        return [left]

    def in_step(self, worker_id: str | None) -> WorkerPipeline | None:
        """Return the worker's pipeline if it is in step: it can take work now."""
        pipeline = self.pipelines.get(worker_id or "")
        return pipeline if pipeline is not None and pipeline.sync is Sync.IN_STEP else None

    def others_in_step(self, pipeline: WorkerPipeline) -> list[WorkerPipeline]:
        return [one for one in self.pipelines.values() if one is not pipeline and one.sync is Sync.IN_STEP]

    def of_worker(self, worker_id: str) -> list[Sequence]:
        return list(self._at.get(worker_id, {}).values())

    def counts(self) -> dict[str, int]:
        """Return the number of sequences at each worker."""
        return {worker_id: len(here) for worker_id, here in self._at.items() if here}

    def longer_than(self, tokens: int) -> list[Sequence]:
        """Return sequences whose limit exceeds `tokens`, longest first."""
        return list(self._by_limit.irange_key(max_key=(-tokens,)))

    def _assign(self, sequence: Sequence, worker_id: str | None) -> None:
        if sequence.worker_id is not None:
            self._at[sequence.worker_id].pop(sequence.key, None)
        sequence.worker_id = worker_id
        if worker_id is not None:
            self._at.setdefault(worker_id, {})[sequence.key] = sequence

    def welcome(self, report: WorkerReported, epoch: int, now_s: float) -> WorkerPipeline:
        """Create the pipeline of a worker's incarnation."""
        self._welcomed += 1
        self.known_summary = None
        self.unready[report.worker_id] = None
        pipeline = self.pipelines[report.worker_id] = WorkerPipeline(
            worker_id=report.worker_id,
            incarnation=report.incarnation,
            epoch=epoch,
            rules=self.rules,
            sequences=self.sequences,
            report=report,
            since_s=now_s,
            number=self._welcomed,
            changed=self._changed,
            feed=self.feed,
            unready=self.unready,
            here=self._at.setdefault(report.worker_id, {}),
        )
        self.lost_workers.pop(report.worker_id)
        return pipeline

    def lose(self, pipeline: WorkerPipeline, now_s: float) -> None:
        """Remove a pipeline; the caller handles its sequences."""
        del self.pipelines[pipeline.worker_id]
        self._changed.pop(pipeline.worker_id, None)
        self.feed.leave(pipeline.worker_id)
        self.unready.pop(pipeline.worker_id, None)
        self.known_summary = None
        self.lost_workers.put(pipeline.worker_id, pipeline.incarnation, now_s)

    def changed_pipelines(self) -> list[WorkerPipeline]:
        """Return pipelines with events since their last plan, in order of arrival."""
        return sorted(self._changed.values(), key=lambda pipeline: pipeline.number)

    def is_full(self, tenant: Tenant, *, resumed: bool) -> bool:
        """Return whether the queue is full and this tenant uses its share. `resumed`: twice the limit."""
        limit = self.rules.max_queued * (2 if resumed else 1)
        if len(self.sequences) < limit:
            return False
        waiting = (each.tenant.name for each in self.sequences.values() if each.phase not in HELD)
        return is_beyond_share(Counter(waiting), tenant.name, limit)

    def closed_workers(self) -> tuple[str, ...]:
        """Return workers that cannot take work, which placement may not know yet."""
        return tuple(sorted([*self.unready, *self.lost_workers, *self.reserved]))

    def summary(self) -> tuple[int | None, tuple[Kind, ...]]:
        """Return the longest context, None without workers, and the kinds of workers that share blocks."""
        if self.known_summary is None:
            reports = self.reports()
            longest = max((report.max_context_tokens for report in reports), default=None)
            self.known_summary = (longest, kinds_of(reports))
        return self.known_summary

    def note_report(self, pipeline: WorkerPipeline, report: WorkerReported) -> None:
        """Store the worker's latest report."""
        if _features(pipeline.report) != _features(report):
            self.known_summary = None
        pipeline.take_report(report)
        memory_tokens = report.capacity.total_blocks * report.block_tokens
        self.backlog.queue.on_measured(report.prefill_tokens_per_s, report.decode_step_s, memory_tokens)

    def reports(self) -> list[WorkerReported]:
        """Return the latest report of every worker that is not refused."""
        return [pipeline.report for pipeline in self.pipelines.values() if pipeline.sync is not Sync.REFUSED]

    def shortage(self, now_s: float) -> str:
        """Return why no new request can be served, or "": placement's recent word, if it fits the workers."""
        if now_s - self.roles_told_s > _TOLD_S:
            return ""
        roles = {self.roles.roles.get(worker_id) for worker_id in self.pipelines}
        return self.roles.shortage if roles in _ONE_SIDED else ""

    def pipeline_without_choice(self, sequence: Sequence) -> WorkerPipeline | None:
        """Return the only worker, if placement could only choose it. Nothing else may wait, and all limits
        must fit."""
        count, batch = len(self.sequences), self.rules.settings.max_batch_sequences
        is_only_one = len(self.pipelines) == len(self.backlog) == 1 and sequence in self.backlog
        if not is_only_one or self._alone or count > batch:
            return None
        (pipeline,) = self.pipelines.values()
        report = pipeline.report
        if pipeline.sync is not Sync.IN_STEP or sequence.limit_tokens > report.max_context_tokens:
            return None
        blocks = sum([-(-each.limit_tokens // report.block_tokens) for each in self.sequences.values()])
        return pipeline if blocks < pipeline.lasting_blocks else None

    def least_loaded(self, sequence: Sequence) -> WorkerPipeline | None:
        """Return the worker with the fewest sequences of those with room for this one, or None."""

        def has_room(pipeline: WorkerPipeline) -> bool:
            report, here = pipeline.report, self.of_worker(pipeline.worker_id)
            limits = [each.limit_tokens for each in (*here, sequence)]
            blocks = sum(-(-tokens // report.block_tokens) for tokens in limits)
            return (
                pipeline.sync is Sync.IN_STEP
                and pipeline.worker_id not in self.reserved
                and sequence.limit_tokens <= report.max_context_tokens
                and self.roles.roles.get(pipeline.worker_id) != "decode"
                and (not here or blocks <= pipeline.lasting_blocks)
            )

        found = [pipeline for pipeline in self.pipelines.values() if has_room(pipeline)]
        return min(found, key=lambda pipeline: len(self._at.get(pipeline.worker_id, ())), default=None)

    def seat_alone(self, now_s: float) -> list[Effect]:
        """Place sequences that run alone at idle workers, and after `_IDLE_S` reserve the least loaded ones.
        Return what the log and placement are told."""
        if not self._alone:
            self.reserved.clear()
            return []
        self._alone = {key: one for key, one in self._alone.items() if self.sequences.get(key) is one}
        self.reserved = {name: key for name, key in self.reserved.items() if key in self._alone}
        told: list[Effect] = []
        for key, sequence in self._alone.items():
            if sequence not in self.backlog:
                continue
            own = next((name for name, holder in self.reserved.items() if holder == key), "")
            if not own and len(self.reserved) >= max(1, len(self.pipelines) - 1):
                continue  # one worker is left to the others
            pipeline = self.pipelines.get(own) or self.least_loaded(sequence)
            is_idle = pipeline is not None and not self._at.get(pipeline.worker_id)
            if pipeline is None or not (is_idle or now_s - sequence.accepted_s > _IDLE_S):
                continue
            self.reserved.pop(own, None)
            self.reserved[pipeline.worker_id] = key
            if is_idle and pipeline.sync is Sync.IN_STEP:
                self.place(sequence, pipeline, now_s)
                told.append(NotePlaced(sequence.ref, pipeline.worker_id, "it runs alone"))
                told.append(self.told_of(sequence, pipeline))
        return told

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence. Raises PolicyFailed if the policy cannot rank it; then nothing has changed."""
        assert sequence.key not in self.sequences
        self.backlog.add(sequence)
        self.sequences[sequence.key] = sequence
        self._enter(sequence)
        if sequence.runs_alone:
            self._alone[sequence.key] = sequence

    def _enter(self, sequence: Sequence) -> None:
        self._by_limit.add(sequence)
        self.phases[sequence.phase] += 1
        sequence.counts = self.phases

    def adopt(self, sequence: Sequence, pipeline: WorkerPipeline, phase: Phase, now_s: float) -> None:
        """Assign a sequence found at this pipeline's worker, wherever it was before."""
        if sequence.key not in self.sequences:
            self._enter(sequence)
        known = self.sequences.setdefault(sequence.key, sequence) is sequence
        assert known, "another attempt is known"
        if sequence.worker_id is None and sequence in self.backlog:
            self.backlog.remove(sequence)
        elif sequence.worker_id not in (None, pipeline.worker_id):
            held = sequence.phase in HELD
            other = self._forget_at_pipeline(sequence, now_s)
            if other is not None and held:
                other.drop(sequence.ref)
        sequence.move_to(phase)
        self._assign(sequence, pipeline.worker_id)
        sequence.confirmed = True

    def place(
        self, sequence: Sequence, pipeline: WorkerPipeline, now_s: float, *, midway: bool = False
    ) -> None:
        """Move a sequence from the backlog to a worker's policy. `midway`: as the target of its migration."""
        self.backlog.start(sequence)
        sequence.move_to(Phase.PLACED)
        self._assign(sequence, pipeline.worker_id)
        pipeline.arrive(sequence, now_s, midway=midway)

    def told_of(self, sequence: Sequence, pipeline: WorkerPipeline) -> AskPlacement:
        """Return a message that tells placement where the sequence is. It expects no answer."""
        sequence.is_asked_for = True
        item = item_of(sequence, (), sequence.arrival_s)
        others = [name for name in self.pipelines if name != pipeline.worker_id]
        return AskPlacement(
            NO_QUESTION, (item,), (*self.closed_workers(), *others), self.backlog.take_withdrawn()
        )

    def take_back(self, sequence: Sequence, now_s: float) -> None:
        """Return a sequence to the backlog from a worker that never received it."""
        self._forget_at_pipeline(sequence, now_s)
        sequence.move_to(Phase.QUEUED)
        self._assign(sequence, None)
        sequence.confirmed = False
        self.backlog.queue.refund(sequence.key)
        self.backlog.add(sequence)

    def leave(
        self,
        sequence: Sequence,
        phase: Phase,
        now_s: float,
        reason: FinishReason | None = None,
        generated_tokens: int | None = None,
        *,
        lingers: bool = False,
    ) -> SequenceLeft:
        """Remove a finished sequence. Its worker drops it with the next plan, or lets it linger."""
        if sequence.is_asked_for and not sequence.confirmed and phase is not Phase.ENDED:
            self.backlog.withdraw(sequence.ref)
        if phase is Phase.ENDED or sequence.phase in HELD:
            self.owners.put(sequence.key, sequence.gateway_id, now_s)
        if sequence.phase is Phase.QUEUED:
            self.backlog.remove(sequence)
        elif sequence.worker_id is not None:
            if phase in (Phase.LOST, Phase.REPLACED):  # free for its tenant
                self.backlog.queue.refund(sequence.key)
            else:
                self.backlog.queue.end(sequence.key, generated_tokens, sequence.cached_tokens)
            held = sequence.phase in HELD
            is_whole = reason in _OWN_ENDS and not (sequence.spec is not None and sequence.spec.rehearsal)
            answer_tokens = generated_tokens if is_whole else None
            pipeline = self._forget_at_pipeline(sequence, now_s, answer_tokens, lingers=lingers and held)
            if lingers and held and pipeline is not None:
                pipeline.linger(sequence.ref, now_s)
            elif pipeline is not None and held and phase not in (Phase.ENDED, Phase.LOST):
                pipeline.drop(sequence.ref)
        sequence.move_to(phase)
        self.phases[phase] -= 1
        sequence.counts = None
        del self.sequences[sequence.key]
        self._by_limit.remove(sequence)
        if sequence.worker_id is not None:
            self._at[sequence.worker_id].pop(sequence.key, None)
        if phase is Phase.ENDED and sequence.worker_id is not None:
            self.ended.put(sequence.key, (sequence.ref.attempt, sequence.worker_id), now_s)
        self.backlog.poke()
        return SequenceLeft(
            ref=sequence.ref,
            phase=phase,
            finish_reason=reason,
            worker_id=sequence.worker_id,
            prompt_tokens=sequence.prompt_tokens,
            generated_tokens=generated_tokens,
            tenant=sequence.tenant,
            cached_tokens=sequence.cached_tokens,
            expected_tokens=sequence.expected_tokens,
            held_s=0.0 if sequence.started_s is None else now_s - sequence.started_s,
            queued_s=(now_s if sequence.started_s is None else sequence.started_s) - sequence.accepted_s,
            total_s=now_s - sequence.accepted_s,
        )

    def cancel(self, sequence: Sequence, reason: FinishReason, now_s: float) -> list[Effect]:
        """Cancel a sequence, also at its worker, and remember the attempt as cancelled."""
        self.tombstones.put(sequence.gateway_id, sequence.ref, now_s)
        held_by = sequence.worker_id if sequence.phase in HELD else None
        effects: list[Effect] = [self.leave(sequence, Phase.CANCELLED, now_s, reason)]
        if held_by is not None:
            effects.append(CancelAtWorker(held_by, sequence.ref, sequence.gateway_id, reason))
        return effects

    def give_up(self, sequence: Sequence, why: KvasirError, now_s: float) -> SequenceLeft:
        """Give up a sequence that can run nowhere. The gateway gets the error when it submits again."""
        self.dropped.put((sequence.gateway_id, sequence.key), (sequence.ref.attempt, why), now_s)
        return self.leave(sequence, Phase.DROPPED, now_s, FinishReason.ERROR)

    def hand_over(self, sequence: Sequence, shard: int, now_s: float) -> list[Effect]:
        """Give a queued sequence to another shard."""
        self.handed.put((sequence.gateway_id, sequence.key), (sequence.ref.attempt, shard), now_s)
        left = self.leave(sequence, Phase.REPLACED, now_s)
        return [left, GiveToShard(sequence.ref, sequence.gateway_id, shard)]

    def expire(self, now_s: float) -> None:
        records = (self.tombstones, self.owners, self.ended, self.dropped, self.handed, self.lost_workers)
        for record in records:
            record.expire(now_s)

    def check_integrity(self) -> None:
        self.backlog.check_integrity()
        queued = [sequence for sequence in self.sequences.values() if sequence.phase is Phase.QUEUED]
        assert {sequence.key for sequence in queued} == {sequence.key for sequence in self.backlog}
        for key, sequence in self.sequences.items():
            assert sequence.key == key
            assert (sequence.worker_id is None) == (sequence.phase is Phase.QUEUED)
            assert sequence.worker_id is None or sequence.worker_id in self.pipelines
            assert sequence.phase in HELD or sequence.spec is not None
        assert sum(self.counts().values()) == len(self.sequences) - len(queued)
        assert len(self._by_limit) == len(self.sequences)
        assert +self.phases == Counter(sequence.phase for sequence in self.sequences.values())
        self.feed.check_integrity()
        in_step = {name for name, pipeline in self.pipelines.items() if pipeline.sync is Sync.IN_STEP}
        assert in_step == self.pipelines.keys() - self.unready.keys()
        for worker_id, pipeline in self.pipelines.items():
            assert pipeline.worker_id == worker_id
            pipeline.check_integrity()
            if pipeline.sync is Sync.IN_STEP:
                here = self.of_worker(worker_id)
                waiting = {each.key for each in here if each.phase in (Phase.PLACED, Phase.WAITING)}
                assert self.feed.waiting(worker_id) <= waiting, "who waits there?"

    def _forget_at_pipeline(
        self, sequence: Sequence, now_s: float, answer_tokens: int | None = None, *, lingers: bool = False
    ) -> WorkerPipeline | None:
        pipeline = self.pipelines.get(sequence.worker_id or "")
        if not lingers and pipeline is not None and pipeline.sync is Sync.IN_STEP:
            pipeline.end(sequence.key, now_s, answer_tokens)
        return pipeline
