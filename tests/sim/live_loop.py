"""The live scheduler's core, placement's books and workers by the live rules: no bus, virtual time.

Messages take no time, but what reaches a worker in the middle of a step counts from the step's end on. Speeds
are not measured, and predictions are there at once, or after a while.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from services.placement.core.fleet import FleetCapacity
from services.placement.policy.contract import PlacementPolicy
from services.placement.policy.fit import WorstFit
from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.effects import (
    AskPlacement,
    AskPrediction,
    AskSnapshot,
    Effect,
    SendPlan,
    SequenceLeft,
)
from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import PolicyFactory, PolicySettings, WorkerShape
from services.worker.core.plans import StepWork
from services.worker.core.sampling import Sampled
from services.worker.core.steps import StepCore
from services.worker.engine.simulated import SimulatedEngine
from services.worker.engine_thread import row_of
from services.worker.kv.core.block_pool import BlockPool
from shared.messages.commands import LengthPrediction, TakeSnapshot
from shared.messages.plans import BatchPlan, WorkerStepped
from shared.messages.sequence import SequenceKey, SequenceRef, SequenceSpec
from sim.events import EventPriority, EventQueue
from sim.predictors import SimPredictor
from sim.requests import SimRequest
from tests.shared.messages.builders import ref, spec
from tests.stack.actors import END_TOKEN, WorkerProcess, step_core, told_tokens

STEP_S = 1.0
_EVER_S = 1e9
Computed = tuple[list[Sampled | None], float]
"""What a step brought, and the seconds that it took."""
Compute = Callable[[StepWork], Computed]


def told(work: StepWork) -> Computed:
    """Steps of one second; an answer is as long as the first token of its prompt says."""
    return told_tokens(work), STEP_S


class EngineOnClock:
    """A simulated engine whose steps pass on the loop's clock."""

    def __init__(self, make: Callable[[Callable[[float], None]], SimulatedEngine]) -> None:
        """`make` is given the engine's way to let time pass."""
        self._passed_s = 0.0
        self._engine = make(self._let_pass)

    def _let_pass(self, seconds: float) -> None:
        self._passed_s = seconds

    def __call__(self, work: StepWork) -> Computed:
        return [*self._engine.step([row_of(item) for item in work.items])], self._passed_s


def spec_of(request: SimRequest) -> SequenceSpec:
    """As `told` wants it."""
    prompt = [request.output_tokens, *[1] * (request.prompt_tokens - 1)]
    return spec(ref(request.key[0]), prompt, max_tokens=request.max_tokens, end_token_ids=(END_TOKEN,))


@dataclass(eq=False)
class LiveWorker:
    """One worker: its core, what computes its steps, and what is on its way to it and from it."""

    process: WorkerProcess
    compute: Compute
    on_the_way: deque[BatchPlan] = field(default_factory=deque)
    stepped: list[WorkerStepped] = field(default_factory=list)
    work: StepWork | None = None
    tokens: list[Sampled | None] = field(default_factory=list)
    step_s: float = 0.0

    @property
    def core(self) -> StepCore:
        core: StepCore = self.process.core
        return core

    def deliver(self, now_s: float) -> None:
        while self.on_the_way:
            self.stepped += self.core.on_plan(self.on_the_way.popleft(), now_s).stepped

    def begin(self, now_s: float) -> bool:
        """The next step, if there is one."""
        self.work, effects = self.core.begin_step(now_s)
        self.stepped += effects.stepped
        if self.work is not None:
            self.tokens, self.step_s = self.compute(self.work)
        return self.work is not None

    def end(self, now_s: float) -> None:
        assert self.work is not None
        self.stepped += self.core.finish_step(self.work, self.tokens, now_s, self.step_s).stepped
        self.work = None


def live_worker(name: str, shape: WorkerShape, compute: Compute = told) -> LiveWorker:
    """A worker's own core, for its first life."""
    pool = BlockPool(shape.capacity_blocks, shape.block_tokens)
    core = step_core((name, 1), pool, shape.capacity_blocks * shape.block_tokens)
    return LiveWorker(WorkerProcess(name, core=core), compute)


class LiveLoop:
    """`run` lets requests arrive at their times and returns when all are over."""

    def __init__(
        self,
        policy: PolicyFactory,
        shape: WorkerShape,
        settings: PolicySettings,
        predictor: SimPredictor,
        *,
        engines: Sequence[Compute] = (told,),
        router: PlacementPolicy | None = None,
        spec_of: Callable[[SimRequest], SequenceSpec] = spec_of,
        prediction_delay_s: float = 0.0,
    ) -> None:
        """A worker for each of `engines`."""
        rules = Rules(
            settings=settings,
            round_s=0.0,
            valid_for_s=_EVER_S,
            worker_timeout_s=_EVER_S,
            gateway_timeout_s=_EVER_S,
            plan_grace_s=_EVER_S,
        )
        names = {f"{index:05d}": compute for index, compute in enumerate(engines)}
        self._workers = {name: live_worker(name, shape, compute) for name, compute in names.items()}
        if len(engines) == 1:
            # Never chosen; there so that placement is asked, and predictions are known by then.
            self._workers["idle"] = live_worker("idle", WorkerShape(shape.block_tokens, 1))
        self._placement = FleetCapacity(silence_s=_EVER_S, reservation_s=_EVER_S)
        self._router = router or WorstFit()
        self._core = SchedulerCore(rules, policy, 1, 0.0)
        self._predictor, self._spec_of = predictor, spec_of
        self._prediction_delay_s = prediction_delay_s
        self._events: EventQueue[Callable[[], None]] = EventQueue()
        self._requests: dict[SequenceKey, SimRequest] = {}
        self.ended: list[SequenceKey] = []
        for worker in self._workers.values():
            report = worker.process.numbered(worker.core.report(0.0))
            self._carry_out(self._core.on_worker_reported(report, 0.0), 0.0)
        self._carry_out(self._core.on_tick(0.0), 0.0)

    def run(self, requests: Sequence[SimRequest]) -> None:
        """Events at the same instant come in the simulator's order."""
        for request in requests:
            self._events.push(request.arrival_s, EventPriority.ARRIVAL, partial(self._submit, request))
        while self._events:
            self._events.pop()[1]()
        assert len(self.ended) == len(requests)

    @property
    def now_s(self) -> float:
        return self._events.now_s

    def _submit(self, request: SimRequest) -> None:
        self._requests[request.key] = request
        _, effects = self._core.on_submit(self._spec_of(request), request.arrival_s)
        self._carry_out(effects, request.arrival_s)
        self._start_steps(request.arrival_s)

    def _predict(self, ref: SequenceRef, told: LengthPrediction) -> None:
        self._carry_out(self._core.on_predicted(ref, told, self.now_s), self.now_s)
        self._start_steps(self.now_s)

    def _end_step(self, worker: LiveWorker) -> None:
        now_s = self.now_s
        worker.end(now_s)
        worker.deliver(now_s)
        self._report(worker, now_s)
        self._start_steps(now_s)

    def _start_steps(self, now_s: float) -> None:
        """The next step begins wherever none runs; plans of which nothing is left to do take no time."""
        for worker in self._workers.values():
            while worker.work is None:
                if not worker.core.has_plans:
                    worker.deliver(now_s)
                if not worker.core.has_plans:
                    break
                if not worker.begin(now_s):
                    self._report(worker, now_s)
                    continue
                ends_s = now_s + worker.step_s
                self._events.push(ends_s, EventPriority.STEP, partial(self._end_step, worker))

    def _report(self, worker: LiveWorker, now_s: float) -> None:
        stepped, worker.stepped = worker.stepped, []
        for event in stepped:
            self._placement.on_stepped(event)
            self._carry_out(self._core.on_stepped(event, now_s), now_s)

    def _place(self, asked: AskPlacement, now_s: float) -> tuple[str | None, ...]:
        """With what workers hold by now: plans that were sent before have got there."""
        self._start_steps(now_s)
        for worker in self._workers.values():
            self._placement.on_reported(worker.process.numbered(worker.core.report(now_s)), now_s)
        return self._placement.place(asked.items, frozenset(), self._router, now_s, asked.ahead)

    def _ask_prediction(self, asked: AskPrediction, now_s: float) -> None:
        told = self._predictor.predict(self._requests[asked.ref.key], asked.generated_tokens)
        if told is None:
            return
        if self._prediction_delay_s:
            heard = partial(self._predict, asked.ref, told)
            self._events.push(now_s + self._prediction_delay_s, EventPriority.ANSWER, heard)
        else:
            self._carry_out(self._core.on_predicted(asked.ref, told, now_s), now_s)

    def _carry_out(self, effects: list[Effect], now_s: float) -> None:
        self._core.check_integrity()
        for effect in effects:
            match effect:
                case SendPlan(plan=plan):
                    self._workers[effect.worker_id].on_the_way.append(plan)
                case AskPlacement():
                    self._carry_out(
                        self._core.on_placed(effect.question, self._place(effect, now_s), now_s), now_s
                    )
                case AskPrediction():
                    self._ask_prediction(effect, now_s)
                case AskSnapshot():
                    worker = self._workers[effect.worker_id]
                    snapshot = worker.core.on_snapshot(TakeSnapshot(epoch=effect.epoch), now_s)
                    self._carry_out(self._core.on_snapshot(worker.process.numbered(snapshot), now_s), now_s)
                case SequenceLeft(ref=left):
                    self.ended.append(left.key)
                case _:
                    raise AssertionError(f"nothing goes wrong here: {effect}")
