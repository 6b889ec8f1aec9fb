"""The scheduler's decisions: one method per event, each returning the effects to carry out in order.

Pure and deterministic. State is soft: a new core rebuilds it from heartbeats, snapshots and resubmissions.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

from services.scheduler.core.effects import Effect, NotePlaced, StepDown
from services.scheduler.core.fleet import Fleet
from services.scheduler.core.intake import Admission, Intake
from services.scheduler.core.long_waits import OversizedWatch, Standstill, wanted
from services.scheduler.core.moves import Moves
from services.scheduler.core.pressure import PressureWatch
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import HELD, OVER, Phase, Sequence
from services.scheduler.core.shadowing import Shadowing
from services.scheduler.core.sharing import Sharing
from services.scheduler.policy.contract import PolicyFactory, queue_rule
from shared.errors import InvalidRequest, PolicyFailed, UnavailableError
from shared.liveness import Start
from shared.messages.commands import CancelSequence, LengthPrediction
from shared.messages.lengths import LengthsRevised
from shared.messages.moves import BlocksPulled, SequenceMove, WorkerRoles
from shared.messages.plans import BatchPlan, WorkerStepped
from shared.messages.reports import GatewayReported, WorkerReported
from shared.messages.sequence import SequenceRef, SequenceSpec
from shared.messages.values import EPOCH_REACH
from shared.shards import WHOLE, Shard

_EXPIRE_INTERVAL_S = 1.0
WANT_INTERVAL_S = 0.25
_SHOWN = 40
"""Number of waiting sequences in `describe`."""
LEAST_TERM_S = 10.0
"""Shortest term, in seconds, that a worker's report of a later epoch can end."""


class SchedulerCore:
    """Decisions of one term of leadership. `epoch` is final once `is_commanding`."""

    def __init__(
        self,
        rules: Rules,
        make_policy: PolicyFactory,
        epoch: int,
        now_s: float,
        most_epoch: int = EPOCH_REACH,
        began_s: float | None = None,
        awaited: Iterable[Start] = (),
        shard: Shard = WHOLE,
    ) -> None:
        """`most_epoch`: reports with a later epoch are ignored. `began_s`: when heartbeats were first
        received, now by default. `awaited`: workers known before; the first round ends early once all have
        reported or gone. `shard`: the one whose workers report here."""
        self._most_epoch = most_epoch
        self._commands_since_s = float("inf")
        self._rules = rules
        self._roster = Roster(rules, queue_rule(make_policy, rules.settings, rules.queue))
        self._fleet = Fleet(self._roster, make_policy, epoch)
        self._intake = Intake(self._roster)
        self._moves = Moves(self._roster, rules.moves)
        self._pressure = PressureWatch(self._roster, self._moves, rules.relief)
        self._shadowing = Shadowing(self._roster, self._moves, rules.shadow_from_s)
        self._oversized = OversizedWatch(self._roster, self._moves, rules.oversized)
        self._standstill = Standstill(self._roster, now_s)
        self._round_ends_s = (now_s if began_s is None else began_s) + rules.round_s
        self._awaited = set(awaited)
        self._has_waited_for_all = False
        """Whether every awaited worker has reported or gone."""
        self.sharing = Sharing(self._roster, shard, now_s) if shard.count > 1 else None
        self._ticked_s = now_s
        self._expired_s = now_s
        self._wanted_s = now_s
        self._deposed = False

    @property
    def epoch(self) -> int:
        return self._fleet.epoch

    @property
    def is_commanding(self) -> bool:
        return self._fleet.commanding

    @property
    def is_empty(self) -> bool:
        """Whether no worker and no sequence is known."""
        return not self._roster.pipelines and not self._roster.sequences

    @property
    def running(self) -> int:
        return sum(self._roster.phases[phase] for phase in HELD)

    @property
    def queued(self) -> int:
        """Number of sequences that no worker holds yet."""
        return len(self._roster.sequences) - self.running

    def charged_s(self) -> Iterator[tuple[str, float]]:
        """Return each tenant's service counter, in seconds."""
        return self._roster.backlog.queue.charged_s()

    def present(self) -> Counter[tuple[str, bool]]:
        """Return the number of sequences by tenant and whether a worker holds them."""
        everybody = self._roster.sequences.values()
        return Counter((one.tenant.name, one.phase in HELD) for one in everybody if one.phase not in OVER)

    @property
    def standstill_s(self) -> float:
        """Seconds for which work has waited without progress; 0 if all is well."""
        return self._standstill.still_s(self._ticked_s)

    def on_submit(self, spec: SequenceSpec, now_s: float) -> tuple[Admission, list[Effect]]:
        """Queue a sequence, or place it where only one worker is possible. Raises the errors of
        `Intake.on_submit`, and PolicyFailed if the batching policy fails; then nothing has changed."""
        try:
            if self._fleet.broken and self._roster.find(spec.ref) is None:
                self._fleet.check_policy()
            admission, effects = self._intake.on_submit(spec, now_s)
        except PolicyFailed as error:
            self._fleet.faults.count(error, now_s)
            raise
        sequence = self._roster.find(spec.ref)
        if sequence is None or self._deposed:
            return admission, effects + self._ask_placement(now_s)
        target = self._moves.pipeline_for(sequence) if self._moves.by_key else None
        pipeline = target or self._roster.pipeline_without_choice(sequence)
        if pipeline is None:
            return admission, effects + self._ask_placement(now_s)
        self._roster.place(sequence, pipeline, now_s, midway=target is not None)
        told = self._roster.told_of(sequence, pipeline)
        return admission, [*self._after(effects, now_s), told]

    def refusal_costs_s(self, spec: SequenceSpec, now_s: float) -> dict[str, float]:
        """Return the cost of a refused request, in seconds: its expected wait, if known, and its work."""
        queue, task = self._roster.backlog.queue, Sequence.from_spec(spec, now_s).task()
        wait_s = queue.wait_s(task, spec.tenant)
        return ({} if wait_s is None else {"wait": wait_s}) | {"first": queue.work_s(task)}

    def on_move(self, order: SequenceMove, now_s: float) -> list[Effect]:
        """Begin a move. Raises InvalidRequest if it is impossible."""
        if self._deposed:
            raise InvalidRequest("this scheduler was replaced", param="moves")
        if order.target in self._roster.reserved:
            raise InvalidRequest(f"a sequence runs alone at {order.target}", param="moves")
        return self._after(self._moves.begin(order, now_s), now_s)

    def on_tokens(
        self, ref: SequenceRef, tokens: tuple[int, ...] | None, now_s: float, *, is_shadow: bool = False
    ) -> list[Effect]:
        """Apply the answer to `AskTokens` of a move or a shadow; None if there was none."""
        copies = self._shadowing if is_shadow else self._moves
        return self._after(copies.on_tokens(ref, tokens, now_s), now_s)

    def on_pulled(
        self, ref: SequenceRef, pulled: BlocksPulled | None, now_s: float, *, is_shadow: bool = False
    ) -> list[Effect]:
        """Apply the answer to `AskPull` of a move or a shadow; None if there was none."""
        copies = self._shadowing if is_shadow else self._moves
        return self._after(copies.on_pulled(ref, pulled, now_s), now_s)

    def on_roles(self, event: WorkerRoles, now_s: float) -> list[Effect]:
        """Set the roles that placement assigns and repeats (`Roster.shortage`)."""
        self._roster.roles, self._roster.roles_told_s = event, now_s
        return []

    def on_cancel(self, command: CancelSequence, now_s: float) -> list[Effect]:
        return self._after(self._intake.on_cancel(command, now_s), now_s)

    def on_gateway_reported(self, event: GatewayReported, now_s: float) -> list[Effect]:
        """Apply a gateway's heartbeat; ignore a replaced incarnation."""
        try:
            return self._after(self._intake.on_gateway_reported(event, now_s), now_s)
        except UnavailableError:
            return []

    def on_worker_reported(self, report: WorkerReported, now_s: float) -> list[Effect]:
        """Apply a heartbeat. A later epoch ends the term, unless it is new: a worker may be faulty."""
        self._stop_awaiting((report.worker_id, report.incarnation))
        if report.epoch > self._most_epoch:
            return []
        if report.epoch >= self.epoch and not self.is_commanding:
            self._fleet.epoch = report.epoch + 1
        if report.epoch > self.epoch:
            if now_s - self._commands_since_s < LEAST_TERM_S:
                return []
            self._deposed = True
            return [StepDown(report.epoch, f"{report.worker_id} obeys epoch {report.epoch}")]
        return self._after(self._fleet.on_reported(report, now_s), now_s)

    def on_worker_gone(self, start: Start, now_s: float) -> list[Effect]:
        """Remove a worker that left the bus."""
        self._stop_awaiting(start)
        return self._after(self._fleet.on_gone(*start, now_s), now_s)

    def _stop_awaiting(self, start: Start) -> None:
        """Stop waiting for this start of a worker, and earlier ones: it has reported or gone."""
        if self._awaited:
            self._awaited = {one for one in self._awaited if one[0] != start[0] or one[1] > start[1]}
            self._has_waited_for_all = not self._awaited

    def on_stepped(self, event: WorkerStepped, now_s: float) -> list[Effect]:
        return self._after(self._fleet.on_stepped(event, now_s), now_s)

    def on_snapshot(self, snapshot: WorkerReported, now_s: float) -> list[Effect]:
        effects = self._fleet.on_snapshot(snapshot, now_s)
        for listed in snapshot.sequences:
            self._intake.watch(listed.gateway_id, now_s)
        return self._after(effects, now_s)

    def on_plan_unsent(self, worker_id: str, plan: BatchPlan, reason: str, now_s: float) -> list[Effect]:
        """Handle a plan that is too large for the bus. (Lost plans are detected from reports.)"""
        return self._after(self._fleet.on_plan_unsent(worker_id, plan, reason, now_s), now_s)

    def on_snapshot_failed(self, worker_id: str, now_s: float) -> list[Effect]:
        """Schedule another request for the snapshot."""
        self._fleet.on_snapshot_failed(worker_id, now_s)
        return []

    def on_placed(
        self,
        question: int,
        worker_ids: tuple[str | None, ...] | None,
        now_s: float,
        expected_tokens: tuple[int, ...] = (),
    ) -> list[Effect]:
        """Apply placement's answer: one worker or None per item; `worker_ids` None if there was no answer.
        `expected_tokens`: prompt tokens that each worker should have cached."""
        answered, backlog = worker_ids or (), self._roster.backlog
        more = len(backlog) > len(answered) and any(answered)
        refs, effects = backlog.close(question, more=more, now_s=now_s), list[Effect]()
        for ref, worker_id, expected in zip_longest(
            refs, answered[: len(refs)], expected_tokens[: len(refs)]
        ):
            sequence = self._roster.find(ref)
            if sequence is None or sequence not in backlog:
                continue
            if self.sharing is not None and (handed := self.sharing.follow(sequence, worker_id, now_s)):
                effects += handed
                continue
            sequence.expected_tokens = expected
            pipeline = self._roster.in_step(worker_id)
            if pipeline is None or pipeline.worker_id in self._roster.reserved:
                continue
            if sequence.limit_tokens <= pipeline.report.max_context_tokens:
                self._roster.place(sequence, pipeline, now_s)
        return self._after(effects, now_s)

    def on_unplaced(self, question: int, now_s: float) -> list[Effect]:
        """Place the sequences of a question that placement did not answer at the least loaded workers."""
        roster, told = self._roster, list[Effect]()
        for ref in roster.backlog.close(question, more=False, now_s=now_s):
            sequence = roster.find(ref)
            if sequence is None or sequence not in roster.backlog:
                continue
            pipeline = roster.least_loaded(sequence)
            if pipeline is not None:
                roster.place(sequence, pipeline, now_s)
                told.append(NotePlaced(ref, pipeline.worker_id, "placement did not answer"))
                told.append(roster.told_of(sequence, pipeline))
        return [*self._after([], now_s), *told]

    def on_place_failed(self, question: int, error: PolicyFailed, now_s: float) -> list[Effect]:
        """Give up the sequences of a question for which the placement policy raised."""
        refs = self._roster.backlog.close(question, more=True, now_s=now_s)
        found = [sequence for ref in refs if (sequence := self._roster.find(ref)) is not None]
        waiting = [sequence for sequence in found if sequence in self._roster.backlog]
        return self._after([self._roster.give_up(one, error, now_s) for one in waiting], now_s)

    def on_predicted(self, ref: SequenceRef, prediction: LengthPrediction, now_s: float) -> list[Effect]:
        self._predict(ref, prediction, now_s)
        return self._after([], now_s)

    def on_revised(self, event: LengthsRevised, now_s: float) -> list[Effect]:
        """Apply revised predictions; ignore other cores' sequences."""
        here = [revised for revised in event.lengths if self._roster.find(revised.ref) is not None]
        for revised in here:
            self._predict(revised.ref, revised.prediction, now_s)
        return self._after([], now_s) if here else []

    def _predict(self, ref: SequenceRef, prediction: LengthPrediction, now_s: float) -> None:
        sequence = self._roster.find(ref)
        if sequence is None:
            return
        sequence.prediction = prediction
        self._roster.backlog.queue.on_predicted(ref.key, prediction)
        if (pipeline := self._roster.pipelines.get(sequence.worker_id or "")) is not None:
            pipeline.predict(ref.key, prediction, now_s)

    def on_tick(self, now_s: float) -> list[Effect]:
        """Advance time. Call it every few hundredths of a second, only while connected."""
        self._ticked_s = now_s
        working = len(self._roster.pipelines) - len(self._roster.unready)
        self._roster.backlog.queue.foreseen.on_tick(now_s, working)
        effects: list[Effect] = []
        if not self.is_commanding and (self._has_waited_for_all or now_s >= self._round_ends_s):
            effects += self._fleet.command(self.epoch, now_s)
            self._commands_since_s = now_s
        effects += self._fleet.on_tick(now_s)
        effects += self._intake.on_tick(now_s)
        effects += self._pressure.on_tick(now_s)
        if not self._deposed:
            effects += self._shadowing.on_tick(now_s)
            effects += self._roster.seat_alone(now_s)
            if self.sharing is not None:
                effects += self.sharing.on_tick(now_s)
        effects += self._standstill.on_tick(now_s)
        if now_s - self._expired_s > _EXPIRE_INTERVAL_S:
            self._expired_s = now_s
            self._roster.expire(now_s)
            self._shadowing.expire(now_s)
        if now_s - self._wanted_s > WANT_INTERVAL_S and not self._deposed:
            self._wanted_s = now_s
            may_gather = self.sharing is None or self.sharing.may_gather(now_s)
            wants = wanted(self._roster, may_gather=may_gather)
            effects += self._pressure.with_limits(wants, now_s)
            effects += self._oversized.on_wants(wants, now_s)
        return self._after(effects, now_s)

    def _after(self, effects: list[Effect], now_s: float) -> list[Effect]:
        """Plan and ask for placement after an event. The cost does not grow with idle workers."""
        if self._deposed:
            return effects
        if self._roster.backlog.turns:
            effects += self._roster.backlog.turns
            self._roster.backlog.turns = []
        if self._moves.by_key:
            effects += self._moves.advance(now_s)
        for pipeline in self._roster.changed_pipelines():
            effects += pipeline.next_plans(now_s)
            effects += self._fleet.settle(pipeline, now_s)
        return effects + self._ask_placement(now_s)

    def _ask_placement(self, now_s: float) -> list[Effect]:
        roster = self._roster
        if roster.feed.has_freed:
            roster.feed.has_freed = False
            roster.backlog.poke()
        if not roster.backlog.is_due(now_s) or len(roster.unready) == len(roster.pipelines):
            return []
        question = roster.backlog.ask(roster.closed_workers(), now_s, roster.summary()[1])
        return [] if question is None else [question]

    def describe(self) -> dict[str, Any]:
        """Return counts and one row per worker, for people."""
        pipelines, everybody = self._roster.pipelines.values(), list(self._roster.sequences.values())
        are_refused = any(pipeline.refusal for pipeline in pipelines)
        workers = [
            {
                "worker": pipeline.worker_id,
                "sync": str(pipeline.sync),
                "outstanding_steps": pipeline.outstanding_steps,
                "sequences": len(self._roster.of_worker(pipeline.worker_id)),
                "free_blocks": pipeline.report.capacity.free_blocks,
                "total_blocks": pipeline.report.capacity.total_blocks,
                **({"refused": pipeline.refusal.message if pipeline.refusal else ""} if are_refused else {}),
            }
            for pipeline in pipelines
        ]
        preempted = sum([one.preempting.counts for one in pipelines], Counter[str]())
        placed = sorted((one for one in everybody if one.phase is Phase.PLACED), key=lambda one: one.rank)
        return {
            "epoch": self.epoch,
            "snapshots": self._fleet.snapshots,
            "trouble": self._fleet.faults.text(self._ticked_s),
            "standstill_s": round(self.standstill_s, 1),
            "foreseen_wait_s": round(self._roster.backlog.queue.foreseen.longest_s(), 1),
            **Counter(str(sequence.phase) for sequence in everybody),
            **self._moves.describe(),
            **self._shadowing.describe(),
            **{f"relief_{rung}": count for rung, count in sorted(self._pressure.decisions.items())},
            **{f"preempted_{mode}": count for mode, count in preempted.items()},
            "workers": workers,
            "queue": [
                {
                    "request": one.ref.request_id,
                    "choice": one.ref.choice,
                    "tenant": one.tenant.name,
                    "worker": one.worker_id or "",
                    "prompt_tokens": one.prompt_tokens,
                    "predicted_tokens": one.prediction.p50_tokens if one.prediction else one.max_tokens,
                    "waited_s": round(max(0.0, self._ticked_s - one.arrival_s), 2),
                    "priority": one.priority,
                }
                for one in [*placed, *self._roster.backlog.first(_SHOWN)][:_SHOWN]
            ],
        }

    def check_integrity(self) -> None:
        """Raises AssertionError when roster, backlog, pipelines or a policy disagree, or a policy raised."""
        assert not self._fleet.faults.text(self._ticked_s), self._fleet.faults.text(self._ticked_s)
        self._roster.check_integrity()
        self._moves.check_integrity()
        self._shadowing.check_integrity()
