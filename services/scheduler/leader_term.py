"""One term of leadership: the cores, the bus events they receive, and the tasks that carry out effects.

All messages go through one queue and one task, so plans leave in order. Questions to other services are in
`rpc`.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from prometheus_client import Counter

from services.scheduler.cells import Cell, Cells
from services.scheduler.config import SchedulerConfig
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.effects import (
    AskPlacement,
    AskPrediction,
    AskPull,
    AskSnapshot,
    AskTokens,
    CancelAtWorker,
    Effect,
    NoteForeign,
    NotePolicyFailed,
    NoteRelief,
    NoteStandstill,
    NoteTurn,
    PublishMoved,
    PublishPrepared,
    PublishWorkerLost,
    RefuseWorker,
    SendPlan,
    SequenceLeft,
    StepDown,
    WantKvAtWorker,
)
from services.scheduler.core.sequence import Phase
from services.scheduler.policy.contract import PolicyFactory
from services.scheduler.recording import TermRecord, say_refused, say_turn
from services.scheduler.rpc import Questions
from services.scheduler.service_tally import HitTally, ServiceTally
from shared import metrics, subjects
from shared.bus import Bus, Endpoint, Listener
from shared.clock import monotonic_s
from shared.errors import (
    InvalidRequest,
    KvasirError,
    MessageTooLarge,
    Overloaded,
    RoleMissing,
    UnavailableError,
)
from shared.liveness import AwakeClock, new_incarnation
from shared.log import canonical, get_logger
from shared.messages.base import Message
from shared.messages.commands import CancelSequence, SubmitReply, SubmitSequence, WantKv
from shared.messages.lengths import LengthsRevised
from shared.messages.moves import MoveSequences, MovesTaken, SequenceMove, WorkerRoles
from shared.messages.plans import BatchPlan, WorkerStepped
from shared.messages.reports import (
    WAIT_BOUNDS_S,
    GatewayReported,
    SchedulerAnnounced,
    SequencesGivenUp,
    WorkerLost,
    WorkerReported,
)
from shared.messages.sequence import FinishReason, SequenceSpec
from shared.messages.values import as_count, as_seconds
from shared.release import PROTOCOL, ReleaseWatch


class PlanTally:
    """Counts of sent plans: metrics for the process, `describe` for one term."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {
            "plans": metrics.counter("kvasir_scheduler_plans_total", "Plans sent"),
            "steps": metrics.counter("kvasir_scheduler_planned_steps_total", "Steps planned"),
            "superseding": metrics.counter(
                "kvasir_scheduler_superseding_plans_total", "Plans that cut earlier ones short"
            ),
            "starts": metrics.counter("kvasir_scheduler_starts_total", "Sequences started at a worker"),
            "preemptions": metrics.counter("kvasir_scheduler_preemptions_total", "Sequences preempted"),
            "prefill_tokens": metrics.counter(
                "kvasir_scheduler_planned_prefill_tokens_total", "Prompt tokens planned"
            ),
        }
        self._counts = dict.fromkeys(self._counters, 0)

    def count(self, plan: BatchPlan) -> None:
        """Count one sent plan."""
        for name, amount in (
            ("plans", 1),
            ("steps", plan.steps),
            ("superseding", int(plan.supersedes)),
            ("starts", len(plan.starts)),
            ("preemptions", len(plan.preemptions)),
            ("prefill_tokens", sum(chunk.end_token - chunk.first_token for chunk in plan.prefills)),
        ):
            self._counts[name] += amount
            self._counters[name].inc(amount)

    @property
    def preemptions(self) -> int:
        """Number of preemptions in this term."""
        return self._counts["preemptions"]

    def describe(self) -> dict[str, Any]:
        """Return the counts of this term."""
        return dict(self._counts)


_log = get_logger("scheduler")
_MAX_OUTBOX = 16_384

HANDLERS = (
    Endpoint(subjects.ANY_SCHEDULER_SUBMIT, SubmitSequence, "submit", sender="spec.gateway_id"),
    Endpoint(subjects.SCHEDULER_MOVE, MoveSequences, "move"),
    Listener(subjects.ANY_SCHEDULER_CANCEL, CancelSequence, "on_cancel", sender="sender"),
    Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped", sender="worker_id"),
    Listener(subjects.ANY_PREDICTOR_REVISED, LengthsRevised, "on_revised", sender="predictor_id"),
    Listener(subjects.ANY_GATEWAY_REPORTED, GatewayReported, "on_gateway_reported", sender="gateway_id"),
    Listener(subjects.PLACEMENT_ROLES, WorkerRoles, "on_roles"),
)


class Term:
    """The scheduler from gaining the lease to losing it. `run` returns when a core steps down."""

    def __init__(
        self,
        config: SchedulerConfig,
        bus: Bus,
        make_policy: PolicyFactory,
        epoch: int,
        most_epoch: int,
        present: Mapping[str, tuple[int, str]] | None = None,
    ) -> None:
        """`present`: incarnation and model of recently heard workers, by name."""
        self._config = config
        self._bus = bus
        self._incarnation = new_incarnation()
        self._awake_s = AwakeClock(monotonic_s, lambda: bus.connected)
        """Clock for plans, questions and silence. It skips pauses of this process, so no worker times out for
        them."""
        self._make_policy = make_policy
        self._present = dict(present or {})
        self._epoch, self._most_epoch, self._began_s = epoch, most_epoch, self._awake_s()
        self._cells = Cells(self._make_cell)
        self._is_crowded = False
        self._releases = ReleaseWatch()
        self._outbox: asyncio.Queue[tuple[str, Message, str]] = asyncio.Queue(_MAX_OUTBOX)
        self._ended = asyncio.Event()
        self.end_reason: str | None = None
        self.failure: Exception | None = None
        """The core's exception, if that ended the term."""
        self.heard_epoch = 0
        self._tally = PlanTally()
        self._waits = [0] * (len(WAIT_BOUNDS_S) + 1)
        self._waited_s = 0.0
        self._record = TermRecord(bus.recorder)
        self._services = ServiceTally()
        self._hits = HitTally()
        self._left = metrics.counter("kvasir_scheduler_sequences_total", "Sequences over", ("phase",))
        self._moved = metrics.counter("kvasir_scheduler_moves_total", "Migrations over", ("outcome",))
        self._still = metrics.gauge(
            "kvasir_scheduler_standstill_seconds",
            "For so long work has waited and nothing moved; 0: all is well",
        )
        self._foreign = metrics.counter(
            "kvasir_scheduler_foreign_cancels_total", "Cancels of another gateway's sequence; ignored"
        )
        self._lost = metrics.counter("kvasir_scheduler_workers_lost_total", "Workers given up")

    def _make_cell(self, model: str) -> Cell:
        """Return a model's cell, with the term's epoch or one above its workers' epoch."""
        core = SchedulerCore(
            self._config.rules(),
            self._make_policy,
            self.epoch,
            self._awake_s(),
            self._most_epoch,
            self._began_s,
            [(name, incarnation) for name, (incarnation, of) in self._present.items() if of == model],
        )
        questions = Questions(self._config, self._bus, core, partial(self._feed, model), model, self._record)
        return Cell(model, core, questions)

    @property
    def epoch(self) -> int:
        """The latest epoch of any model."""
        return max((cell.core.epoch for cell in self._cells), default=self._epoch)

    @property
    def _queued(self) -> int:
        return sum(cell.core.queued for cell in self._cells)

    @property
    def _running(self) -> int:
        return sum(cell.core.running for cell in self._cells)

    def describe(self) -> dict[str, Any]:
        counts = {"queued": self._queued, "running": self._running, **self._tally.describe()}
        charged_s = (each for cell in self._cells for each in cell.core.charged_s())
        present = (each for cell in self._cells for each in cell.core.present().items())
        tenants = self._services.describe(charged_s, present)
        return (
            counts
            | self._cells.describe()
            | {"epoch": self.epoch, "tenants": tenants, **self._hits.describe()}
        )

    async def run(self) -> None:
        """Run until a core steps down or the task is cancelled."""
        tasks = [asyncio.create_task(work) for work in (self._send(), self._tick(), self._announce())]
        ended = asyncio.create_task(self._ended.wait())
        try:
            done, _ = await asyncio.wait({ended, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (ended, *tasks):
                task.cancel()
            await asyncio.gather(ended, *tasks, return_exceptions=True)
            for cell in self._cells:
                await cell.questions.close()
            self._record.close()

    async def submit(self, command: SubmitSequence) -> SubmitReply:
        try:
            cell = self._cells.of_model(command.spec.model)
            admission, effects = cell.core.on_submit(command.spec, self._awake_s())
        except KvasirError as error:
            self._note_refusal(command.spec, error)
            raise
        except Exception as error:
            self._fail(error)
            raise
        self._record.submitted(command.spec, known=admission.known, queued=cell.core.queued)
        self._carry_out(effects, cell)
        return SubmitReply(
            scheduler_id=self._bus.instance,
            incarnation=self._incarnation,
            epoch=cell.core.epoch,
            known=admission.known,
            worker_id=admission.worker_id,
        )

    async def move(self, command: MoveSequences) -> MovesTaken:
        """Begin the moves; each is accepted or refused separately."""
        return MovesTaken(refusals=tuple(self._begin_move(order) for order in command.moves))

    def _begin_move(self, order: SequenceMove) -> str:
        cell = self._cells.of_worker(order.target)
        if cell is None:
            return f"{order.target} is not known"
        try:
            effects = cell.core.on_move(order, self._awake_s())
        except InvalidRequest as error:
            return error.message
        except Exception as error:
            self._fail(error)
            raise
        self._record.move_begun(order)
        self._carry_out(effects, cell)
        return ""

    def on_cancel(self, command: CancelSequence) -> None:
        for cell in self._cells:
            self._feed(cell.model, cell.core.on_cancel, command)

    def on_worker_reported(self, report: WorkerReported) -> None:
        self._releases.note(report.worker_id, report.protocol)
        try:
            cell = self._cells.of_report(report.worker_id, report.model)
        except UnavailableError as error:
            if not self._is_crowded:
                self._is_crowded = True
                _log.error("%s is not used, and neither are others: %s", report.worker_id, error.message)
            return
        self._feed(cell.model, cell.core.on_worker_reported, report)

    def on_gone(self, instance: str, incarnation: int) -> None:
        """Report a worker that left the bus."""
        cell = self._cells.of_worker(instance)
        if cell is not None:
            self._feed(cell.model, cell.core.on_worker_gone, (instance, incarnation))

    def on_stepped(self, event: WorkerStepped) -> None:
        cell = self._cells.of_worker(event.worker_id)
        if cell is not None:
            self._feed(cell.model, cell.core.on_stepped, event)

    def on_revised(self, event: LengthsRevised) -> None:
        for cell in self._cells:
            self._feed(cell.model, cell.core.on_revised, event)

    def on_roles(self, event: WorkerRoles) -> None:
        cell = self._cells.known(event.model)
        if cell is not None:
            self._feed(cell.model, cell.core.on_roles, event)

    def on_gateway_reported(self, event: GatewayReported) -> None:
        self._releases.note(event.gateway_id, event.protocol)
        for cell in self._cells:
            self._feed(cell.model, cell.core.on_gateway_reported, event)

    def _feed(self, model: str, on_event: Callable[..., list[Effect]], *event: Any) -> None:
        """Pass an event to a model's core. A core that raises is no longer trusted: the term ends."""
        cell = self._cells.known(model)
        if cell is None:
            return
        try:
            effects = on_event(*event, self._awake_s())
        except Exception as error:
            self._fail(error)
            return
        self._carry_out(effects, cell)

    def _fail(self, error: Exception) -> None:
        _log.exception("the core failed")
        self.failure = self.failure or error
        self._end("the core failed")

    def _carry_out(self, effects: list[Effect], cell: Cell) -> None:
        predictions = [effect for effect in effects if isinstance(effect, AskPrediction)]
        for effect in [effect for effect in effects if not isinstance(effect, AskPrediction)] + predictions:
            self._record.carried_out(effect)
            match effect:
                case SendPlan():
                    self._tally.count(effect.plan)
                    self._post(subjects.worker_plan(effect.worker_id), effect.plan, effect.worker_id)
                case CancelAtWorker():
                    self._cancel(effect)
                case WantKvAtWorker():
                    want = WantKv(tokens=as_count(effect.tokens), may_borrow_ahead=effect.may_borrow_ahead)
                    self._post(subjects.worker_want(effect.worker_id), want)
                case PublishWorkerLost():
                    self._lost.inc()
                    _say_lost(effect.lost)
                    self._post(subjects.SCHEDULER_WORKER_LOST, effect.lost)
                case RefuseWorker():
                    _log.error("refused: %s (%s)", effect.error.message, effect.error.code)
                case PublishPrepared():
                    self._post(subjects.SCHEDULER_PREPARED, effect.prepared)
                case PublishMoved():
                    self._note_move(effect)
                case NoteForeign(gateway_id, ref):
                    self._foreign.inc()
                    _log.warning("%s would have cancelled %s, which is another gateway's", gateway_id, ref)
                case NoteRelief():
                    canonical(_log, "relief", worker=effect.worker_id, reason=effect.relief.reason)
                case NotePolicyFailed(worker_id, error):
                    _log.error("%s at %s", error.message, worker_id)
                case NoteTurn():
                    say_turn(effect)
                case NoteStandstill(place, waiting, still_s):
                    _log.error(
                        "work waits and nothing moves: %d sequences at %s, for %.0f s; look at what `status` "
                        "says of blocks; a scheduler that is started anew asks all workers what they hold",
                        waiting,
                        place,
                        still_s,
                    )
                case AskTokens() | AskPull() | AskPlacement() | AskPrediction() | AskSnapshot():
                    cell.questions.ask(effect)
                case SequenceLeft():
                    self._note(effect)
                case StepDown():
                    self.heard_epoch = effect.epoch
                    self._end(effect.reason)

    def _cancel(self, effect: CancelAtWorker) -> None:
        me = self._bus.instance
        command = CancelSequence(
            ref=effect.ref, sender=me, gateway_id=effect.gateway_id, reason=effect.reason
        )
        self._post(subjects.worker_cancel(effect.worker_id, me), command)

    def _post(self, subject: str, message: Message, worker_id: str = "") -> None:
        try:
            self._outbox.put_nowait((subject, message, worker_id))
        except asyncio.QueueFull:
            self._end("messages are not leaving")

    def _end(self, reason: str) -> None:
        self.end_reason = self.end_reason or reason
        self._ended.set()

    def _note(self, left: SequenceLeft) -> None:
        self._left.labels(left.phase).inc()
        self._services.count(left)
        self._waits[bisect_left(WAIT_BOUNDS_S, left.queued_s)] += 1
        self._waited_s += max(0.0, left.queued_s)
        self._hits.count(left)
        if left.phase is Phase.DROPPED and left.finish_reason is FinishReason.ERROR:
            self._post(subjects.SCHEDULER_ABANDONED, SequencesGivenUp(refs=(left.ref,)))
        canonical(
            _log,
            "sequence",
            ref=str(left.ref),
            became=str(left.phase),
            reason=left.finish_reason and str(left.finish_reason),
            worker=left.worker_id,
            tenant=left.tenant.name or None,
            prompt_tokens=left.prompt_tokens,
            cached_tokens=left.cached_tokens or None,
            expected_tokens=left.expected_tokens,
            generated_tokens=left.generated_tokens,
            queued_s=round(left.queued_s, 4),
            total_s=round(left.total_s, 4),
        )

    def _note_refusal(self, spec: SequenceSpec, error: KvasirError) -> None:
        """Log a refusal for lack of capacity or roles, with the cost of accepting it where known."""
        if not isinstance(error, Overloaded | RoleMissing):
            return
        costs_s: dict[str, float] = {}
        cell = self._cells.known(spec.model)
        if isinstance(error, Overloaded) and cell is not None:
            costs_s = cell.core.refusal_costs_s(spec, self._awake_s())
        self._record.refused(spec.ref, error.code, costs_s)
        say_refused(spec, error, costs_s)

    def _note_move(self, effect: PublishMoved) -> None:
        moved = effect.moved
        self._moved.labels("failed" if moved.reason else "done").inc()
        canonical(
            _log,
            "move",
            ref=str(moved.ref),
            source=moved.source,
            target=moved.target,
            mode=str(moved.mode),
            failed=moved.reason or None,
            rounds=moved.rounds,
            rehearsed_tokens=moved.rehearsed_tokens,
            moved_bytes=moved.moved_bytes,
            late_bytes=moved.late_bytes or None,
            fallback=moved.fallback or None,
            prepare_s=round(moved.prepare_s, 4),
            switch_s=round(moved.switch_s, 4),
        )
        self._post(subjects.SCHEDULER_MOVED, moved)

    async def _send(self) -> None:
        while True:
            subject, message, worker_id = await self._outbox.get()
            try:
                await self._bus.publish(subject, message)
            except MessageTooLarge as error:
                _log.error("%s", error)
                cell = self._cells.of_worker(worker_id)
                if isinstance(message, BatchPlan) and cell is not None:
                    self._feed(cell.model, cell.core.on_plan_unsent, worker_id, message, error.message)
            except KvasirError as error:
                _log.warning("%s was not sent: %s", type(message).__name__, error)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.tick_s)
            if self._bus.connected:
                for cell in self._cells:
                    self._feed(cell.model, cell.core.on_tick)
                self._still.set(max((cell.core.standstill_s for cell in self._cells), default=0.0))

    async def _announce(self) -> None:
        while True:
            self._post(
                subjects.SCHEDULER_ANNOUNCED,
                SchedulerAnnounced(
                    scheduler_id=self._bus.instance,
                    incarnation=self._incarnation,
                    epoch=self.epoch,
                    policy=self._config.policy,
                    queued=self._queued,
                    running=self._running,
                    queued_by_model={cell.model: cell.core.queued for cell in self._cells},
                    preemptions=as_count(self._tally.preemptions),
                    waits=tuple(map(as_count, self._waits)),
                    waited_s=as_seconds(self._waited_s),
                    **self._hits.describe(),
                    protocol=PROTOCOL,
                ),
            )
            await asyncio.sleep(self._config.announce_s)


def _say_lost(lost: WorkerLost) -> None:
    """Log the loss; a worker without sequences was usually parked."""
    if lost.refs:
        _log.warning("worker %s is lost, with %d sequences", lost.worker_id, len(lost.refs))
    else:
        _log.info("worker %s has gone; it had nothing to do", lost.worker_id)
