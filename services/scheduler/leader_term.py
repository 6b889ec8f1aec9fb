"""One term of leadership: the cores, the bus events they receive, and the tasks that carry out effects.

All messages go through one queue and one task, so plans leave in order. `cells` asks other services.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from services.scheduler.cells import Cell, Cells
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import effects
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.sequence import Phase
from services.scheduler.policy.contract import PolicyFactory
from services.scheduler.reporting import TermReport
from shared import subjects
from shared.bus import Bus, Endpoint, Handler, Listener
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
from shared.log import get_logger
from shared.messages.base import Message
from shared.messages.commands import CancelSequence, SubmitReply, SubmitSequence, WantKv
from shared.messages.lengths import LengthsRevised
from shared.messages.moves import MoveSequences, MovesTaken, SequenceMove, WorkerRoles
from shared.messages.plans import BatchPlan, WorkerStepped
from shared.messages.reports import (
    GatewayReported,
    SchedulerAnnounced,
    SequenceHandedOver,
    SequencesGivenUp,
    ShardLoad,
    WorkerReported,
)
from shared.messages.sequence import FinishReason, SequenceSpec
from shared.messages.values import as_count
from shared.release import PROTOCOL, ReleaseWatch
from shared.shards import WHOLE, Shard
from shared.tasks import until_first

_log = get_logger("scheduler")
_MAX_OUTBOX = 16_384
_ANNOUNCE_S = 0.5

_HUNGRY_S = 0.1
"""Least time between two announcements of a shard with room, while another has a queue."""


def _handlers(shard: Shard) -> tuple[Handler, ...]:
    """Return a term's handlers. With several shards, `_steps_of` each of its workers is added."""
    submissions, moves = subjects.submissions_to(shard.number), subjects.moves_in(shard.number)
    by_shard: tuple[Handler, ...] = (
        Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped", sender="worker_id"),
    )
    if shard.count > 1:
        by_shard = (Listener(subjects.SCHEDULER_ANNOUNCED, SchedulerAnnounced, "on_announced"),)
    return (
        Endpoint(submissions, SubmitSequence, "submit", sender="spec.gateway_id"),
        Endpoint(moves, MoveSequences, "move"),
        Listener(subjects.ANY_SCHEDULER_CANCEL, CancelSequence, "on_cancel", sender="sender"),
        Listener(subjects.ANY_PREDICTOR_REVISED, LengthsRevised, "on_revised", sender="predictor_id"),
        Listener(subjects.ANY_GATEWAY_REPORTED, GatewayReported, "on_gateway_reported", sender="gateway_id"),
        Listener(subjects.PLACEMENT_ROLES, WorkerRoles, "on_roles"),
        *by_shard,
    )


def _steps_of(worker_id: str) -> Listener:
    return Listener(subjects.worker_stepped(worker_id), WorkerStepped, "on_stepped", sender="worker_id")


class Term:
    """The scheduler from gaining the lease to losing it. `run` returns when a core steps down."""

    def __init__(
        self,
        config: SchedulerConfig,
        bus: Bus,
        make_policy: PolicyFactory,
        epoch: int,
        most_epoch: int,
        present: Mapping[str, tuple[int, str]],
        shard: Shard = WHOLE,
    ) -> None:
        """`present`: incarnation and model of recently heard workers of the shard, by name."""
        self._config = config
        self._bus = bus
        self._incarnation = new_incarnation()
        self._awake_s = AwakeClock(monotonic_s, lambda: bus.connected)
        """Clock for plans, questions and silence. It skips pauses of this process."""
        self._make_policy = make_policy
        self._present = present
        self._shard = shard
        self._subscribed = dict.fromkeys(present if shard.count > 1 else (), True)
        """Workers whose step reports are subscribed; False: not confirmed yet."""
        self._first_reports: dict[str, WorkerReported] = {}
        """Reports of workers to subscribe."""
        self._is_asked_for = asyncio.Event()
        self._is_hungry = asyncio.Event()
        """Set if another shard has a queue while this one has room."""
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
        self._report = TermReport(bus.recorder)

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
            self._shard,
        )
        step_tokens = self._config.token_budget
        return Cell(model, core, self._bus, self._feed, self._report, step_tokens, self._shard)

    @property
    def epoch(self) -> int:
        """The latest epoch of any model."""
        return max((cell.core.epoch for cell in self._cells), default=self._epoch)

    @property
    def standstill_s(self) -> float:
        """Seconds for which work of some model has waited without progress."""
        return max((cell.core.standstill_s for cell in self._cells), default=0.0)

    def describe(self) -> dict[str, Any]:
        charged_s = [each for cell in self._cells for each in cell.core.charged_s()]
        present = [each for cell in self._cells for each in cell.core.present().items()]
        return {
            "queued": sum(cell.core.queued for cell in self._cells),
            "running": sum(cell.core.running for cell in self._cells),
            **self._report.plans,
            **self._cells.describe(),
            "epoch": self.epoch,
            "tenants": self._report.tenants(charged_s, present),
            **self._report.hits,
        }

    def _subscriptions(self) -> tuple[Handler, ...]:
        return (*_handlers(self._shard), *map(_steps_of, self._subscribed))

    async def run(self) -> None:
        """Receive messages until a core steps down or the task is cancelled. Raise the errors of
        `Bus.attach`."""
        try:
            await self._bus.attach(self._subscriptions(), self)
            await until_first(
                self._send(), self._tick(), self._announce(), self._subscribe(), self._ended.wait()
            )
        finally:
            await self._bus.detach(self._subscriptions(), self)
            for cell in self._cells:
                await cell.close()
            if self._report.spans is not None:
                self._report.spans.close()

    async def submit(self, command: SubmitSequence) -> SubmitReply:
        spec = command.spec
        try:
            cell = self._cells.by_model.get(spec.model) or self._cells.of_model(spec.model)
            admission, found = cell.core.on_submit(spec, self._awake_s())
        except KvasirError as error:
            self._refused(spec, error)
            raise
        except Exception as error:
            self._fail(error)
            raise
        self._report.submitted(spec, known=admission.known, queued=cell.core.queued)
        self._carry_out(found, cell)
        return SubmitReply(
            scheduler_id=self._bus.instance,
            incarnation=self._incarnation,
            epoch=cell.core.epoch,
            known=admission.known,
            worker_id=admission.worker_id,
            shard=admission.shard,
        )

    def _refused(self, spec: SequenceSpec, error: KvasirError) -> None:
        """Report a refusal for lack of capacity or roles, with the cost of accepting it where known."""
        if isinstance(error, Overloaded | RoleMissing):
            cell = self._cells.by_model.get(spec.model)
            is_costly = isinstance(error, Overloaded) and cell is not None
            costs_s = cell.core.refusal_costs_s(spec, self._awake_s()) if cell and is_costly else {}
            self._report.refused(spec, error, costs_s)

    async def move(self, command: MoveSequences) -> MovesTaken:
        """Begin the moves; each is accepted or refused separately."""
        return MovesTaken(refusals=tuple(self._begin_move(order) for order in command.moves))

    def _begin_move(self, order: SequenceMove) -> str:
        cell = self._cells.of_worker(order.target)
        if cell is None:
            return f"{order.target} is not known"
        try:
            found = cell.core.on_move(order, self._awake_s())
        except InvalidRequest as error:
            return error.message
        except Exception as error:
            self._fail(error)
            raise
        self._report.move_begun(order)
        self._carry_out(found, cell)
        return ""

    def on_cancel(self, command: CancelSequence) -> None:
        for cell in self._cells:
            self._feed(cell, cell.core.on_cancel, command)

    def on_worker_reported(self, report: WorkerReported) -> None:
        self._releases.note(report.worker_id, report.protocol)
        if self._shard.count > 1 and not self._subscribed.get(report.worker_id):
            self._first_reports[report.worker_id] = report
            self._is_asked_for.set()
            return
        try:
            cell = self._cells.of_report(report.worker_id, report.model)
        except UnavailableError as error:
            if not self._is_crowded:
                self._is_crowded = True
                _log.error("%s is not used, and neither are others: %s", report.worker_id, error.message)
            return
        self._feed(cell, cell.core.on_worker_reported, report)

    async def _subscribe(self) -> None:
        """Subscribe to the step reports of workers that are new, then pass on their heartbeats."""
        while True:
            await self._is_asked_for.wait()
            self._is_asked_for.clear()
            reports, self._first_reports = self._first_reports, {}
            names = [name for name in reports if name not in self._subscribed]
            self._subscribed |= dict.fromkeys(names, False)
            try:
                await self._bus.attach([_steps_of(name) for name in names], self)
            except KvasirError as error:
                _log.warning("steps of %s are not received: %s", ", ".join(names), error)
                await self._bus.detach([_steps_of(name) for name in names], self)
                for name in names:
                    del self._subscribed[name]
                continue
            self._subscribed |= dict.fromkeys(names, True)
            for report in reports.values():
                self.on_worker_reported(report)

    def on_announced(self, event: SchedulerAnnounced) -> None:
        """Note the load of another shard."""
        if event.shards != self._shard.count or event.shard == self._shard.number:
            return
        for model, load in event.loads.items():
            cell = self._cells.by_model.get(model)
            if cell is not None and cell.core.sharing is not None:
                cell.core.sharing.on_load(event.shard, load, self._awake_s())
                if load.queued and not cell.core.queued:
                    self._is_hungry.set()

    def on_gone(self, instance: str, incarnation: int) -> None:
        """Report a worker that left the bus."""
        if (cell := self._cells.of_worker(instance)) is not None:
            self._feed(cell, cell.core.on_worker_gone, (instance, incarnation))

    def on_stepped(self, event: WorkerStepped) -> None:
        if (cell := self._cells.of_worker(event.worker_id)) is not None:
            self._feed(cell, cell.core.on_stepped, event)

    def on_revised(self, event: LengthsRevised) -> None:
        for cell in self._cells:
            self._feed(cell, cell.core.on_revised, event)

    def on_roles(self, event: WorkerRoles) -> None:
        cell = self._cells.by_model.get(event.model)
        if cell is not None and event.shard == self._shard.number:
            self._feed(cell, cell.core.on_roles, event)

    def on_gateway_reported(self, event: GatewayReported) -> None:
        self._releases.note(event.gateway_id, event.protocol)
        for cell in self._cells:
            self._feed(cell, cell.core.on_gateway_reported, event)

    def _feed(self, cell: Cell, on_event: Callable[..., list[effects.Effect]], *event: Any) -> None:
        """Pass an event to a model's core. A core that raises is no longer trusted: the term ends."""
        try:
            found = on_event(*event, self._awake_s())
        except Exception as error:
            self._fail(error)
            return
        self._carry_out(found, cell)

    def _fail(self, error: Exception) -> None:
        _log.exception("the core failed")
        self.failure = self.failure or error
        self.end("the core failed")

    def _carry_out(self, found: list[effects.Effect], cell: Cell) -> None:
        """Carry out a core's effects in order, questions about lengths last."""
        if len(found) > 1:
            found = sorted(found, key=lambda effect: isinstance(effect, effects.AskPrediction))
        for effect in found:
            self._report.note(effect)
            match effect:
                case effects.SendPlan(worker_id, plan):
                    self._post(subjects.worker_plan(worker_id), plan, worker_id)
                case effects.CancelAtWorker(worker_id, ref, gateway_id, reason):
                    me = self._bus.instance
                    cancel = CancelSequence(ref=ref, sender=me, gateway_id=gateway_id, reason=reason)
                    self._post(subjects.worker_cancel(worker_id, me), cancel)
                case effects.WantKvAtWorker(worker_id, tokens, may_borrow_ahead):
                    want = WantKv(tokens=as_count(tokens), may_borrow_ahead=may_borrow_ahead)
                    self._post(subjects.worker_want(worker_id), want)
                case effects.PublishWorkerLost(lost):
                    self._post(subjects.SCHEDULER_WORKER_LOST, lost)
                case effects.PublishPrepared(prepared):
                    self._post(subjects.SCHEDULER_PREPARED, prepared)
                case effects.PublishMoved(moved):
                    self._post(subjects.SCHEDULER_MOVED, moved)
                case effects.SequenceLeft(ref, Phase.DROPPED, FinishReason.ERROR):
                    self._post(subjects.SCHEDULER_ABANDONED, SequencesGivenUp(refs=(ref,)))
                case effects.GiveToShard(ref, gateway_id, shard):
                    own = self._shard.number
                    handed = SequenceHandedOver(ref=ref, shard=shard, from_shard=own, epoch=self.epoch)
                    self._post(subjects.scheduler_handed(gateway_id), handed)
                case effects.StepDown(epoch, reason):
                    self.heard_epoch = epoch
                    self.end(reason)
                case _:
                    cell.ask(effect)

    def _post(self, subject: str, message: Message, worker_id: str = "") -> None:
        try:
            self._outbox.put_nowait((subject, message, worker_id))
        except asyncio.QueueFull:
            self.end("messages are not leaving")

    def end(self, reason: str) -> None:
        """Let `run` return."""
        self.end_reason = self.end_reason or reason
        self._ended.set()

    async def _send(self) -> None:
        while True:
            subject, message, worker_id = await self._outbox.get()
            try:
                await self._bus.publish(subject, message)
            except MessageTooLarge as error:
                _log.error("%s", error)
                cell = self._cells.of_worker(worker_id)
                if isinstance(message, BatchPlan) and cell is not None:
                    self._feed(cell, cell.core.on_plan_unsent, worker_id, message, error.message)
            except KvasirError as error:
                _log.warning("%s was not sent: %s", type(message).__name__, error)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._config.tick_s)
            if self._bus.connected:
                for cell in self._cells:
                    self._feed(cell, cell.core.on_tick)

    async def _announce(self) -> None:
        while True:
            queued = {cell.model: cell.core.queued for cell in self._cells}
            self._post(
                subjects.SCHEDULER_ANNOUNCED,
                SchedulerAnnounced(
                    scheduler_id=self._bus.instance,
                    incarnation=self._incarnation,
                    epoch=self.epoch,
                    policy=self._config.policy,
                    queued=sum(queued.values()),
                    running=sum(cell.core.running for cell in self._cells),
                    queued_by_model=queued,
                    **self._report.announced(),
                    protocol=PROTOCOL,
                    shard=self._shard.number,
                    shards=self._shard.count,
                    loads=self._loads(),
                ),
            )
            await self._until_announcement()

    def _loads(self) -> dict[str, ShardLoad]:
        cells = ((cell.model, cell.core.sharing) for cell in self._cells)
        now_s = self._awake_s()
        return {model: sharing.load(now_s) for model, sharing in cells if sharing is not None}

    async def _until_announcement(self) -> None:
        """Wait for the interval, less if another shard has sequences for this one's room."""
        if self._shard.count == 1:
            return await asyncio.sleep(_ANNOUNCE_S)
        await asyncio.sleep(_HUNGRY_S)
        self._is_hungry.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_hungry.wait(), _ANNOUNCE_S - _HUNGRY_S)
