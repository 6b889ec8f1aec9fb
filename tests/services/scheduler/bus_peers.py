"""The scheduler's peers on the real bus: a worker's core, a placement, a predictor, with their handlers."""

import asyncio

from services.worker.kv.core.block_pool import BlockPool
from shared import subjects
from shared.bus import Bus, Endpoint, Listener
from shared.clock import monotonic_s
from shared.messages.commands import (
    CancelSequence,
    LengthPrediction,
    Placements,
    PlaceSequences,
    PredictLength,
    SubmitReply,
    SubmitSequence,
    TakeSnapshot,
)
from shared.messages.plans import BatchPlan, WorkerStepped
from shared.messages.reports import GatewayReported, SchedulerAnnounced, WorkerLost, WorkerReported
from shared.messages.sequence import SequenceSpec
from tests.shared.messages.builders import predicted, ref, spec
from tests.stack.actors import END_TOKEN, WorkerProcess, step_core, told_tokens

WORKER_HANDLERS = (
    Listener(subjects.worker_plan, BatchPlan, "on_plan"),
    Listener(subjects.worker_cancel.to, CancelSequence, "on_cancel", sender="sender"),
    Endpoint(subjects.worker_snapshot, TakeSnapshot, "snapshot"),
)


class WorkerOnBus:
    """A worker's own core with heartbeats and step reports; an answer is as long as its prompt's first token
    says."""

    def __init__(self, bus: Bus, *, kv_blocks: int = 64, step_s: float = 0.002) -> None:
        self.bus, self.step_s = bus, step_s
        self.core = step_core((bus.instance, bus.incarnation), BlockPool(kv_blocks, 4), kv_blocks * 4)
        self.process = WorkerProcess(bus.instance, core=self.core, clock=monotonic_s)
        self.plans: list[BatchPlan] = []
        self._stepped: list[WorkerStepped] = []

    def on_plan(self, plan: BatchPlan) -> None:
        self.plans.append(plan)
        self._stepped += self.core.on_plan(plan, monotonic_s()).stepped

    def on_cancel(self, command: CancelSequence) -> None:
        self.core.on_cancel(command, monotonic_s())

    async def snapshot(self, command: TakeSnapshot) -> WorkerReported:
        return self.process.numbered(self.core.on_snapshot(command, monotonic_s()))

    async def run(self) -> None:
        await self.bus.attach(WORKER_HANDLERS, self)
        reported_s = 0.0
        while True:
            work, effects = self.core.begin_step(monotonic_s())
            self._stepped += effects.stepped
            if work is not None:
                self.process.step_tokens.append((work.prefilled_tokens, work.decoded_tokens))
                self._stepped += self.core.finish_step(work, told_tokens(work), monotonic_s(), 0.0).stepped
            stepped, self._stepped = self._stepped, []
            for event in stepped:
                await self.bus.publish(subjects.worker_stepped(self.bus.instance), event)
            if monotonic_s() - reported_s > 0.1:
                reported_s = monotonic_s()
                report = self.process.numbered(self.core.report(reported_s))
                await self.bus.publish(subjects.worker_reported(self.bus.instance), report)
            await asyncio.sleep(self.step_s)


class PlacementOnBus:
    """Every sequence to the same worker; can be told to keep silent."""

    HANDLERS = (Endpoint(subjects.PLACEMENT_PLACE, PlaceSequences, "place"),)

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.delay_s = 0.0

    async def place(self, command: PlaceSequences) -> Placements:
        await asyncio.sleep(self.delay_s)
        free = self.worker_id not in command.excluded_workers
        return Placements(worker_ids=tuple(self.worker_id if free else None for _ in command.items))


class PredictorOnBus:
    HANDLERS = (Endpoint(subjects.PREDICTOR_PREDICT, PredictLength, "predict"),)

    def __init__(self) -> None:
        self.asked: list[PredictLength] = []

    async def predict(self, command: PredictLength) -> LengthPrediction:
        self.asked.append(command)
        return predicted(min(8, command.max_tokens))


class Reader:
    """What a gateway hears and says."""

    HANDLERS = (
        Listener(subjects.SCHEDULER_ANNOUNCED, SchedulerAnnounced, "on_announced"),
        Listener(subjects.SCHEDULER_WORKER_LOST, WorkerLost, "on_lost"),
        Listener(subjects.ANY_WORKER_STEPPED, WorkerStepped, "on_stepped"),
    )

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.announced: list[SchedulerAnnounced] = []
        self.lost: list[WorkerLost] = []
        self.ended: dict[str, int] = {}

    def on_announced(self, event: SchedulerAnnounced) -> None:
        self.announced.append(event)

    def on_lost(self, event: WorkerLost) -> None:
        self.lost.append(event)

    def on_stepped(self, event: WorkerStepped) -> None:
        for end in event.ended:
            self.ended[end.ref.request_id] = self.ended.get(end.ref.request_id, 0) + 1

    def spec(
        self,
        name: str,
        *,
        prompt_tokens: int = 8,
        answer_tokens: int = 12,
        max_tokens: int = 40,
        attempt: int = 1,
    ) -> SequenceSpec:
        return spec(
            ref(name, attempt),
            [answer_tokens, *([7] * (prompt_tokens - 1))],
            max_tokens=max_tokens,
            end_token_ids=(END_TOKEN,),
            gateway_id=self.bus.instance,
            gateway_incarnation=self.bus.incarnation,
            model="m",
        )

    async def submit(self, spec: SequenceSpec) -> SubmitReply:
        return await self.bus.request(
            subjects.scheduler_submit(self.bus.instance),
            SubmitSequence(spec=spec),
            SubmitReply,
            deadline_s=2.0,
        )

    async def beat(self) -> None:
        event = GatewayReported(gateway_id=self.bus.instance, incarnation=self.bus.incarnation)
        await self.bus.publish(subjects.gateway_reported(self.bus.instance), event)
