"""The workers: heartbeats, loss, and resync by snapshot. Pure.

Anything unexpected leads to the same resync: no plan until the worker has sent a snapshot. Sequences that run
there continue, stale attempts are dropped, and starts that never arrived are placed again.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from services.scheduler.core.effects import (
    AskSnapshot,
    Effect,
    NotePolicyFailed,
    PublishWorkerLost,
    RefuseWorker,
)
from services.scheduler.core.outstanding import Trouble
from services.scheduler.core.roster import Roster
from services.scheduler.core.sequence import HELD, Phase, Sequence
from services.scheduler.core.worker_pipeline import Sync, WorkerPipeline, planned_capacity_blocks
from services.scheduler.policy.contract import GuardedPolicy, Holding, PolicyFactory, WorkerShape
from shared.errors import InternalError, ModelMismatch, PolicyFailed
from shared.liveness import Liveness
from shared.messages.plans import BatchPlan, WorkerStepped
from shared.messages.reports import SequenceReport, SequenceState, WorkerLost, WorkerReported
from shared.messages.sequence import SequenceRef
from shared.plugins import PluginFaults

_PHASES = {
    SequenceState.WAITING: Phase.WAITING,
    SequenceState.PREFILLING: Phase.PREFILLING,
    SequenceState.DECODING: Phase.DECODING,
}
_WITH_BLOCKS = (Phase.PREFILLING, Phase.DECODING)


def adopt_snapshot(
    roster: Roster,
    pipeline: WorkerPipeline,
    snapshot: WorkerReported,
    make_policy: PolicyFactory,
    now_s: float,
) -> list[Effect]:
    """Bring `pipeline` into step. Its new policy adopts each live sequence, or its next plan drops it."""
    effects = [effect for listed in snapshot.sequences for effect in roster.note_owner(listed, now_s)]
    effects += _note_ends(roster, snapshot, now_s)
    alive = [listed for listed in snapshot.sequences if listed.state is not SequenceState.ENDED]
    adopted: list[tuple[Sequence, SequenceReport]] = []
    stale: list[SequenceReport] = []
    for listed in alive:
        if _is_stale(roster, pipeline, listed, now_s):
            stale.append(listed)
            continue
        older = roster.sequences.get(listed.ref.key)
        if older is not None and older.ref.attempt < listed.ref.attempt:
            effects.append(roster.leave(older, Phase.REPLACED, now_s))
        sequence = roster.find(listed.ref) or _from_report(listed, now_s)
        sequence.generated_tokens = listed.generated_tokens
        roster.adopt(sequence, pipeline, _PHASES[listed.state], now_s)
        adopted.append((sequence, listed))
    effects += _note_missing(roster, pipeline, {sequence.key for sequence, _ in adopted}, now_s)
    shape = WorkerShape(snapshot.block_tokens, planned_capacity_blocks(snapshot))
    settings = roster.rules.settings
    if roster.rules.sized_by_workers and snapshot.batch_sequences:
        sizes = snapshot.batch_sequences, max(snapshot.batch_sequences, snapshot.step_tokens)
        settings = replace(settings, max_batch_sequences=sizes[0], token_budget=sizes[1])
    policy = GuardedPolicy(make_policy, shape, settings)
    policy.on_measured(snapshot.prefill_tokens_per_s, snapshot.decode_step_s, now_s)
    for sequence, listed in adopted:
        decoding = listed.state is SequenceState.DECODING
        holding = Holding(listed.computed_tokens, listed.allocated_blocks, decoding)
        policy.on_adopted(sequence.task(), holding, now_s)
    pipeline.begin(policy, snapshot, now_s)
    for listed in stale:
        pipeline.drop(listed.ref)
    for sequence in roster.of_worker(pipeline.worker_id):
        if sequence.phase is Phase.PLACED:
            pipeline.arrive(sequence, now_s)
        elif sequence.phase is Phase.WAITING:
            pipeline.note_waiting(sequence)
    roster.backlog.poke()
    return effects


def _is_stale(roster: Roster, pipeline: WorkerPipeline, listed: SequenceReport, now_s: float) -> bool:
    """Return whether this attempt must not run here."""
    key, attempt = listed.ref.key, listed.ref.attempt
    given_up, ended = roster.dropped.get((listed.gateway_id, key), now_s), roster.ended.get(key, now_s)
    handed = roster.handed.get((listed.gateway_id, key), now_s)
    if any(known is not None and attempt <= known[0] for known in (given_up, handed)):
        return True
    if ended is not None and attempt <= ended[0] and ended[1] != pipeline.worker_id:
        return True
    known = roster.sequences.get(key)
    is_foreign = known is not None and listed.gateway_id not in ("", known.gateway_id)
    if is_foreign or roster.tombstones.covers(listed.gateway_id, listed.ref, now_s):
        return True
    if known is None or known.ref.attempt < attempt:
        return False
    lives_elsewhere = known.phase in HELD and known.confirmed and known.worker_id != pipeline.worker_id
    return known.ref.attempt > attempt or lives_elsewhere


def _from_report(listed: SequenceReport, now_s: float) -> Sequence:
    """Return an adopted sequence. It needs no spec until its gateway resubmits it."""
    return Sequence(
        ref=listed.ref,
        gateway_id=listed.gateway_id,
        gateway_incarnation=0,
        prompt_tokens=listed.prompt_tokens,
        max_tokens=listed.max_tokens,
        generated_tokens=listed.generated_tokens,
        arrival_s=now_s - listed.waited_s,
        accepted_s=now_s,
        phase=_PHASES[listed.state],
        deadline_s=None if listed.deadline_in_s is None else now_s + listed.deadline_in_s,
        started_s=now_s,
    )


def _note_ends(roster: Roster, snapshot: WorkerReported, now_s: float) -> list[Effect]:
    """Apply ends whose report was lost. The worker keeps the tokens for the gateway."""
    effects: list[Effect] = []
    for listed in snapshot.sequences:
        if listed.state is not SequenceState.ENDED:
            continue
        known = roster.sequences.get(listed.ref.key)
        if known is not None and known.ref.attempt > listed.ref.attempt:
            continue
        if known is not None and known.ref == listed.ref and known.worker_id in (None, snapshot.worker_id):
            effects.append(
                roster.leave(known, Phase.ENDED, now_s, listed.finish_reason, listed.generated_tokens)
            )
        if roster.sequences.get(listed.ref.key) is None:
            roster.ended.put(listed.ref.key, (listed.ref.attempt, snapshot.worker_id), now_s)
    return effects


def _note_missing(
    roster: Roster, pipeline: WorkerPipeline, found: set[tuple[str, int]], now_s: float
) -> list[Effect]:
    """Handle held sequences that the snapshot lacks: lost if they had arrived, else to be started again."""
    effects: list[Effect] = []
    for sequence in roster.of_worker(pipeline.worker_id):
        if sequence.phase not in HELD or sequence.key in found:
            continue
        if sequence.confirmed or sequence.spec is None:
            effects.append(roster.leave(sequence, Phase.LOST, now_s))
        else:
            sequence.move_to(Phase.PLACED)
    return effects


def prevailing(reports: Iterable[WorkerReported]) -> WorkerReported | None:
    """Return a report of the most common model and weights; ties go to the lowest worker id."""
    by_id = sorted(reports, key=lambda report: report.worker_id)
    counts = Counter((report.model, report.weights) for report in by_id)
    return max(by_id, key=lambda report: counts[(report.model, report.weights)], default=None)


def mismatch(report: WorkerReported, accepted: Iterable[WorkerReported]) -> ModelMismatch | None:
    """Return why this worker cannot serve beside the accepted ones, or None if it can."""
    for other in accepted:
        if report.model != other.model:
            return ModelMismatch(
                f"{report.worker_id} serves {report.model!r}, {other.worker_id} serves {other.model!r}; "
                "give all workers of a stack the same model and served_name, or another stack",
                param="served_name",
            )
        if report.weights and other.weights and report.weights != other.weights:
            return ModelMismatch(
                f"{report.worker_id} and {other.worker_id} both serve {report.model!r}, with different "
                f"weights, configurations or adapters ({report.weights[:8]}…, {other.weights[:8]}…); load "
                "the same files, in the same dtype, on all of them",
                param="model",
            )
    return None


_PATIENT_FAILURES = 3
"""Failures of a policy in a row after which its worker's sequences are given up and retries slow down."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_STRANGER_HEARTBEATS = 4
_LOOKED_AT = 16
"""Least number of workers checked in one tick."""
_TICKS_IN_ROUND = 50


class Fleet:
    """The workers and their pipelines. `commanding`: one round of heartbeats has been received."""

    def __init__(self, roster: Roster, make_policy: PolicyFactory, epoch: int) -> None:
        self.roster = roster
        self.epoch = epoch
        self.commanding = False
        self.snapshots = 0
        self.faults = PluginFaults()
        """Failures of the batching policy."""
        self.broken: dict[str, PolicyFailed] = {}
        """Workers whose policy keeps failing, until the next attempt."""
        self._make_policy = make_policy
        self._rules = roster.rules
        self._liveness = Liveness(roster.rules.worker_timeout_s)
        self._round: list[str] = []
        """Workers still to check in this round."""

    def on_reported(self, report: WorkerReported, now_s: float) -> list[Effect]:
        if not self._liveness.hear(report.worker_id, report.incarnation, now_s):
            return []
        effects: list[Effect] = []
        pipeline = self.roster.pipelines.get(report.worker_id)
        if pipeline is not None and report.incarnation != pipeline.incarnation:
            effects += self.lose(pipeline, now_s)
            pipeline = None
        if pipeline is None:
            pipeline = self.roster.welcome(report, self.epoch, now_s)
        if report.seq < pipeline.report.seq:
            return effects
        if pipeline.sync is not Sync.IN_STEP:
            for listed in report.sequences:
                effects += self.roster.note_owner(listed, now_s)
        trouble = self._compare(pipeline, report, now_s)
        self.roster.note_report(pipeline, report)
        if pipeline.sync in (Sync.UNSYNCED, Sync.REFUSED) and self.commanding:
            effects += self._admit(pipeline, Trouble("worker heard of"), now_s)
        elif trouble is not None:
            effects += self._resync(pipeline, trouble, now_s)
        return effects

    def _compare(self, pipeline: WorkerPipeline, report: WorkerReported, now_s: float) -> Trouble | None:
        if pipeline.policy is None:
            return None
        if (capacity_blocks := planned_capacity_blocks(report)) != pipeline.capacity_blocks:
            pipeline.policy.on_resized(capacity_blocks, now_s)
        pipeline.policy.on_measured(report.prefill_tokens_per_s, report.decode_step_s, now_s)
        return pipeline.on_heartbeat(report, now_s) or self._strangers(pipeline, report)

    def _strangers(self, pipeline: WorkerPipeline, report: WorkerReported) -> Trouble | None:
        """Return Trouble if the worker repeatedly lists unknown sequences, whose blocks plans count on."""
        seen: dict[SequenceRef, int] = {}
        for listed in report.sequences:
            known = self.roster.find(listed.ref)
            here = known is not None and known.worker_id == pipeline.worker_id and known.phase in HELD
            if listed.state is not SequenceState.ENDED and not here:
                seen[listed.ref] = pipeline.strangers.get(listed.ref, 0) + 1
        pipeline.strangers = seen
        if any(count >= _STRANGER_HEARTBEATS for count in seen.values()):
            return Trouble("it holds sequences that are not known to be there")
        return None

    def check_policy(self) -> None:
        """Raises PolicyFailed if the policy fails at every worker."""
        if self.broken and self.broken.keys() >= self.roster.pipelines.keys():
            raise next(iter(self.broken.values())).with_traceback(None)

    def settle(self, pipeline: WorkerPipeline, now_s: float) -> list[Effect]:
        """Recover from a failed policy: resync with a new one, after a growing pause if it keeps failing."""
        policy = pipeline.policy
        if policy is None or policy.failure is None:
            return []
        failure = policy.failure
        effects: list[Effect] = []
        if self.faults.count(failure, now_s):
            effects.append(NotePolicyFailed(pipeline.worker_id, failure))
        lost = self._lost_with(pipeline, policy)
        doublings = min(10, pipeline.policy_failures - _PATIENT_FAILURES)
        if doublings >= 0:
            self.broken[pipeline.worker_id] = failure
            if self.broken.keys() >= self.roster.pipelines.keys():
                lost += list(self.roster.backlog)
        effects += [self.roster.give_up(sequence, failure, now_s) for sequence in lost]
        asked = self._resync(pipeline, Trouble(failure.message), now_s)
        if doublings < 0:
            return effects + asked
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**doublings)
        pipeline.asked_s = pipeline.ask_again_s = now_s + pause_s
        return effects

    def _lost_with(self, pipeline: WorkerPipeline, policy: GuardedPolicy) -> list[Sequence]:
        """Return the sequences to give up. One whose call failed, if it was not taken in or fails too often;
        if other calls keep failing, those without blocks, then all."""
        here = self.roster.of_worker(pipeline.worker_id)
        if policy.culprit is not None:
            culprit = next((one for one in here if one.key == policy.culprit), None)
            if culprit is None:
                return []
            culprit.faults += 1
            is_taken_in = policy.culprit_is_known and culprit.faults <= self._rules.max_faults
            return [] if is_taken_in else [culprit]
        pipeline.policy_failures += 1
        if pipeline.policy_failures >= _PATIENT_FAILURES:
            return here
        unbegun = [one for one in here if one.phase not in _WITH_BLOCKS]
        return unbegun if pipeline.policy_failures == _PATIENT_FAILURES - 1 else []

    def on_gone(self, worker_id: str, incarnation: int, now_s: float) -> list[Effect]:
        """Lose a worker whose process left the bus, without waiting for the timeout."""
        pipeline = self.roster.pipelines.get(worker_id)
        if pipeline is None or pipeline.incarnation != incarnation:
            return []
        self._liveness.forget(worker_id)
        return self.lose(pipeline, now_s)

    def on_stepped(self, event: WorkerStepped, now_s: float) -> list[Effect]:
        pipeline = self.roster.pipelines.get(event.worker_id)
        if pipeline is None or pipeline.incarnation != event.incarnation:
            return []
        effects: list[Effect] = []
        for end in event.ended:
            sequence = self.roster.find(end.ref)
            if sequence is not None and sequence.worker_id == event.worker_id and sequence.phase in HELD:
                effects.append(
                    self.roster.leave(sequence, Phase.ENDED, now_s, end.finish_reason, end.generated_tokens)
                )
        if (trouble := pipeline.on_stepped(event, now_s)) is not None:
            effects += self._resync(pipeline, trouble, now_s)
        return effects

    def command(self, epoch: int, now_s: float) -> list[Effect]:
        """Take over every worker once the first round of heartbeats is over."""
        self.epoch, self.commanding = epoch, True
        effects: list[Effect] = []
        pipelines = list(self.roster.pipelines.values())
        model = prevailing([pipeline.report for pipeline in pipelines])
        standard = [model] if model else []
        for pipeline in sorted(pipelines, key=lambda one: mismatch(one.report, standard) is not None):
            pipeline.epoch = epoch
            effects += self._admit(pipeline, Trouble("new scheduler"), now_s)
        return effects

    def _admit(self, pipeline: WorkerPipeline, trouble: Trouble, now_s: float) -> list[Effect]:
        """Resync the worker, or refuse it where its model differs; its sequences are then lost."""
        accepted = [
            other.report
            for other in self.roster.pipelines.values()
            if other is not pipeline and other.sync in (Sync.ASKED, Sync.IN_STEP)
        ]
        error = mismatch(pipeline.report, accepted)
        if error is None:
            return self._resync(pipeline, trouble, now_s)
        if pipeline.sync is Sync.REFUSED:
            return []
        pipeline.refuse(error)
        self.roster.known_summary = None
        held = [listed.ref for listed in pipeline.report.sequences if listed.state is not SequenceState.ENDED]
        lost = WorkerLost(
            worker_id=pipeline.worker_id, incarnation=pipeline.incarnation, refs=tuple(held), is_dead=False
        )
        return [RefuseWorker(pipeline.worker_id, error), *([PublishWorkerLost(lost)] if held else [])]

    def on_tick(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        silent = set(self._liveness.silent(now_s))
        for pipeline in self._due(silent):
            hung = pipeline.sync is Sync.ASKED and now_s - pipeline.asked_s > self._rules.snapshot_patience_s
            if hung or pipeline.worker_id in silent:
                self._liveness.forget(pipeline.worker_id)
                effects += self.lose(pipeline, now_s, is_dead=False)
                continue
            if (trouble := pipeline.on_tick(now_s)) is not None:
                effects += self._resync(pipeline, trouble, now_s)
            elif pipeline.ask_again_s is not None and now_s >= pipeline.ask_again_s:
                pipeline.ask_again_s = None
                effects.append(AskSnapshot(pipeline.worker_id, self.epoch, "asked again"))
        return effects

    def _due(self, silent: set[str]) -> list[WorkerPipeline]:
        """Return the pipelines to check in this tick: silent, not in step, and a share of the others."""
        pipelines, names = self.roster.pipelines, self._round
        if not names:
            names.extend(pipelines)
        count = min(len(names), max(_LOOKED_AT, len(pipelines) // _TICKS_IN_ROUND))
        chosen = dict.fromkeys([*silent, *self.roster.unready, *names[len(names) - count :]])
        del names[len(names) - count :]
        return [pipelines[name] for name in chosen if name in pipelines]

    def on_plan_unsent(self, worker_id: str, plan: BatchPlan, reason: str, now_s: float) -> list[Effect]:
        """Resync after a plan that is too large to send, and blame its longest start."""
        pipeline = self.roster.in_step(worker_id)
        if pipeline is None:
            return []
        longest = max(plan.starts, key=lambda spec: len(spec.prompt) + len(spec.generated), default=None)
        culprits = () if longest is None else (longest.ref,)
        return self._resync(pipeline, Trouble(f"plan {plan.seq} was not sent: {reason}", culprits), now_s)

    def on_snapshot_failed(self, worker_id: str, now_s: float) -> None:
        pipeline = self.roster.pipelines.get(worker_id)
        if pipeline is not None and pipeline.sync is Sync.ASKED:
            pipeline.ask_again_s = now_s + self._rules.snapshot_retry_s

    def lose(self, pipeline: WorkerPipeline, now_s: float, *, is_dead: bool = True) -> list[Effect]:
        """Remove a worker that seems gone (`is_dead`: see `WorkerLost`). Gateways resubmit what it held."""
        self.roster.lose(pipeline, now_s)
        self.broken.pop(pipeline.worker_id, None)
        effects: list[Effect] = []
        refs = []
        for sequence in self.roster.of_worker(pipeline.worker_id):
            if sequence.phase is Phase.PLACED:
                self.roster.take_back(sequence, now_s)
            else:
                refs.append(sequence.ref)
                effects.append(self.roster.leave(sequence, Phase.LOST, now_s))
        for key, (_, worker_id) in self.roster.ended.items():
            if worker_id == pipeline.worker_id:
                self.roster.ended.pop(key)
        lost = WorkerLost(
            worker_id=pipeline.worker_id, incarnation=pipeline.incarnation, refs=tuple(refs), is_dead=is_dead
        )
        return [*effects, PublishWorkerLost(lost)]

    def _resync(self, pipeline: WorkerPipeline, trouble: Trouble, now_s: float) -> list[Effect]:
        """Stop planning, ask for a snapshot, and give up sequences that repeatedly cause this."""
        effects: list[Effect] = []
        found = map(self.roster.find, dict.fromkeys(trouble.culprits))
        culprits = [sequence for sequence in found if sequence is not None]
        pipeline.lose_step(now_s)
        others = (each for each in self.roster.of_worker(pipeline.worker_id) if each not in culprits)
        if trouble.is_shortage and any(other.phase in _WITH_BLOCKS for other in others):
            culprits = []
        for sequence in culprits:
            sequence.faults += 1
            if sequence.faults > self._rules.max_faults:
                error = InternalError(f"{sequence.ref} was given up: {pipeline.worker_id}: {trouble.reason}")
                effects.append(self.roster.give_up(sequence, error, now_s))
        self.snapshots += 1
        return [*effects, AskSnapshot(pipeline.worker_id, self.epoch, trouble.reason)]

    def on_snapshot(self, snapshot: WorkerReported, now_s: float) -> list[Effect]:
        """Adopt the snapshot, with a new policy."""
        pipeline = self.roster.pipelines.get(snapshot.worker_id)
        if pipeline is None or pipeline.sync is not Sync.ASKED:
            return []
        if pipeline.incarnation != snapshot.incarnation:
            return []
        self._liveness.hear(snapshot.worker_id, snapshot.incarnation, now_s)
        self.broken.pop(snapshot.worker_id, None)
        return adopt_snapshot(self.roster, pipeline, snapshot, self._make_policy, now_s)
