"""The live scheduler's core and a worker by the live rules, in steps of one second, without a bus.

Messages take no time, but what reaches a worker in the middle of a step counts from the step's end on. Speeds
are not measured, and predictions are there at once.
"""

from collections import deque
from collections.abc import Sequence

from services.placement.core.fleet import FleetCapacity
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
from services.worker.kv.core.block_pool import BlockPool
from shared.messages.commands import TakeSnapshot
from shared.messages.plans import BatchPlan, WorkerStepped
from shared.messages.sequence import SequenceKey
from sim.predictors import SimPredictor
from sim.requests import SimRequest
from tests.shared.messages.builders import ref, spec
from tests.stack.actors import END_TOKEN, WorkerProcess, step_core, told_tokens

STEP_S = 1.0
_EVER_S = 1e9


def worker_of(name: str, kv_blocks: int, block_tokens: int) -> WorkerProcess:
    """A worker's own core, for its first life."""
    pool = BlockPool(kv_blocks, block_tokens)
    return WorkerProcess(name, core=step_core((name, 1), pool, kv_blocks * block_tokens))


class LiveLoop:
    """`run` lets requests arrive at their times and returns when all are over."""

    def __init__(
        self, policy: PolicyFactory, shape: WorkerShape, settings: PolicySettings, predictor: SimPredictor
    ) -> None:
        rules = Rules(
            settings=settings,
            round_s=0.0,
            valid_for_s=_EVER_S,
            worker_timeout_s=_EVER_S,
            gateway_timeout_s=_EVER_S,
            plan_grace_s=_EVER_S,
        )
        self._worker = worker_of("worker-0", shape.capacity_blocks, shape.block_tokens)
        self._idle = worker_of("worker-1", 1, shape.block_tokens)
        """Never chosen; there so that placement is asked, and predictions are known by then."""
        self._placement = FleetCapacity(silence_s=_EVER_S, reservation_s=_EVER_S)
        self._core = SchedulerCore(rules, policy, 1, 0.0)
        self._predictor = predictor
        self._requests: dict[SequenceKey, SimRequest] = {}
        self._on_the_way: deque[BatchPlan] = deque()
        self._step_ends_s: float | None = None
        self._work: StepWork | None = None
        self._stepped: list[WorkerStepped] = []
        self.ended: list[SequenceKey] = []
        for worker in (self._worker, self._idle):
            self._carry_out(self._core.on_worker_reported(worker.numbered(worker.core.report(0.0)), 0.0), 0.0)
        self._carry_out(self._core.on_tick(0.0), 0.0)

    def run(self, requests: Sequence[SimRequest]) -> None:
        """Steps end before what arrives at the same instant."""
        arrivals = deque(sorted(requests, key=lambda request: request.arrival_s))
        while arrivals or self._step_ends_s is not None:
            step_s = _EVER_S if self._step_ends_s is None else self._step_ends_s
            if arrivals and arrivals[0].arrival_s < step_s:
                self._submit(arrivals.popleft())
            else:
                self._end_step(step_s)
        assert len(self.ended) == len(requests)

    def _submit(self, request: SimRequest) -> None:
        self._requests[request.key] = request
        prompt = [request.output_tokens, *[1] * (request.prompt_tokens - 1)]
        asked = spec(ref(request.key[0]), prompt, max_tokens=request.max_tokens, end_token_ids=(END_TOKEN,))
        _, effects = self._core.on_submit(asked, request.arrival_s)
        self._carry_out(effects, request.arrival_s)
        self._start_step(request.arrival_s)

    def _end_step(self, now_s: float) -> None:
        assert self._work is not None
        tokens = told_tokens(self._work)
        self._stepped += self._worker.core.finish_step(self._work, tokens, now_s, 0.0).stepped
        self._step_ends_s = None
        self._deliver(now_s)
        self._report(now_s)
        self._start_step(now_s)

    def _start_step(self, now_s: float) -> None:
        """The next step begins, unless one runs; plans of which nothing is left to do take no time."""
        while self._step_ends_s is None:
            if not self._worker.core.has_plans:
                self._deliver(now_s)
            if not self._worker.core.has_plans:
                return
            self._work, effects = self._worker.core.begin_step(now_s)
            self._stepped += effects.stepped
            if self._work is not None:
                self._step_ends_s = now_s + STEP_S
            else:
                self._report(now_s)

    def _deliver(self, now_s: float) -> None:
        while self._on_the_way:
            self._stepped += self._worker.core.on_plan(self._on_the_way.popleft(), now_s).stepped

    def _report(self, now_s: float) -> None:
        stepped, self._stepped = self._stepped, []
        for event in stepped:
            self._carry_out(self._core.on_stepped(event, now_s), now_s)

    def _place(self, asked: AskPlacement, now_s: float) -> tuple[str | None, ...]:
        self._placement.on_reported(self._worker.numbered(self._worker.core.report(now_s)), now_s)
        return self._placement.place(asked.items, frozenset(), WorstFit(), now_s, asked.ahead)

    def _carry_out(self, effects: list[Effect], now_s: float) -> None:
        self._core.check_integrity()
        for effect in effects:
            match effect:
                case SendPlan(plan=plan):
                    self._on_the_way.append(plan)
                case AskPlacement():
                    self._carry_out(
                        self._core.on_placed(effect.question, self._place(effect, now_s), now_s), now_s
                    )
                case AskPrediction():
                    asked = self._requests[effect.ref.key]
                    told = self._predictor.predict(asked, effect.generated_tokens)
                    if told is not None:
                        self._carry_out(self._core.on_predicted(effect.ref, told, now_s), now_s)
                case AskSnapshot():
                    asked_worker = self._worker if effect.worker_id == "worker-0" else self._idle
                    snapshot = asked_worker.core.on_snapshot(TakeSnapshot(epoch=effect.epoch), now_s)
                    self._carry_out(self._core.on_snapshot(asked_worker.numbered(snapshot), now_s), now_s)
                case SequenceLeft(ref=left):
                    self.ended.append(left.key)
                case _:
                    raise AssertionError(f"nothing goes wrong here: {effect}")
