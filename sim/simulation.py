"""The simulation: requests arrive, workers run, policies plan, until every request has ended.

Drives `BatchPolicy` objects through the same events, in the same order, as the live scheduler's core; a plan
that breaks a law raises `PlanError`, and work that nobody plans any more raises `WedgeError`. Source of the
rules: algorithms.md §1; `sim/worker.py` on plans made ahead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.placement.policy.contract import Room
from services.scheduler.policy import find_policy
from services.scheduler.policy.contract import PlannedBatch, PolicySettings, Task, WorkerShape
from services.worker.core.costs.base import CostModel
from sim.books import Held, WorkerBooks
from sim.events import EventQueue, Priority
from sim.meters import WorkerMeter
from sim.predictors import SimPredictor
from sim.requests import ServedRecord, SimRequest
from sim.routers import LeastWork, Router
from sim.worker import SimWorker


class WedgeError(AssertionError):
    """Requests are unfinished, and nothing will ever happen again."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything but the requests."""

    policy: str
    shape: WorkerShape
    settings: PolicySettings
    cost: CostModel
    predictor: SimPredictor
    workers: int = 1
    router: Router = field(default_factory=LeastWork)
    outstanding_steps: int = 2
    ahead_s: float = 0.0
    """Where steps are short, plans reach so far ahead; the live scheduler's value is 0.008."""
    prediction_delay_s: float = 0.0
    """0: the prediction is there when the request arrives."""
    is_checked: bool = False
    """Call the policy's own `check_integrity` after every event: slow."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run, drained."""

    records: list[ServedRecord]
    meters: list[WorkerMeter]
    shape: WorkerShape
    end_s: float


class Simulation:
    """One run over `requests`; `on_end` hears of each that is over, and may raise to stop the run."""

    def __init__(
        self,
        setup: Setup,
        requests: Sequence[SimRequest],
        on_end: Callable[[ServedRecord], None] | None = None,
    ) -> None:
        factory = find_policy(setup.policy)
        self._setup = setup
        self._events: EventQueue[tuple[Callable[..., None], tuple[object, ...]]] = EventQueue()
        self._requests = sorted(requests, key=lambda request: (request.arrival_s, request.index))
        self._records = {request.key: ServedRecord(request) for request in self._requests}
        self._workers = [
            SimWorker(
                factory(setup.shape, setup.settings),
                WorkerBooks(setup.shape, setup.settings, {}, set()),
                setup.cost,
                WorkerMeter(),
                setup.outstanding_steps,
                setup.ahead_s,
            )
            for _ in range(setup.workers)
        ]
        self._is_plan_due = [False] * setup.workers
        self._arrived = self._ended = 0
        self._on_end = on_end

    def run(self) -> Outcome:
        """Until the last request has ended. Raises PlanError, WedgeError, AssertionError of a policy's
        check.
        """
        self._push_arrival()
        while len(self._events):
            _, (handler, arguments) = self._events.pop()
            handler(*arguments)
        if self._ended < len(self._requests):
            raise WedgeError(f"{self._setup.policy}: {self._stuck()}")
        meters = [worker.meter for worker in self._workers]
        return Outcome(list(self._records.values()), meters, self._setup.shape, self._events.now_s)

    def _stuck(self) -> str:
        held = [held for worker in self._workers for held in worker.books.held.values()]
        shown = [
            f"{h.record.request.key[0]}: {h.computed_tokens}/{h.prefill_tokens} tokens, "
            f"{h.allocated_blocks} blocks"
            for h in held[:4]
        ]
        waits = f"{len(held)} of {len(self._requests)} requests wait for ever"
        return f"{waits} at {self._events.now_s:.3f} s: {shown}"

    def _push_arrival(self) -> None:
        if self._arrived < len(self._requests):
            at_s = max(self._events.now_s, self._requests[self._arrived].arrival_s)
            self._events.push(at_s, Priority.ARRIVAL, (self._on_arrival, (self._requests[self._arrived],)))
            self._arrived += 1

    def _on_arrival(self, request: SimRequest) -> None:
        now_s = self._events.now_s
        index = 0 if len(self._workers) == 1 else self._setup.router.choose(request, self._rooms())
        worker = self._workers[index]
        record = self._records[request.key]
        record.worker = index
        worker.books.held[request.key] = Held(record)
        is_known = self._setup.prediction_delay_s == 0.0
        told = self._setup.predictor.predict(request, 0) if is_known else None
        task = Task(
            request.key, request.prompt_tokens, request.max_tokens, request.arrival_s, prediction=told
        )
        worker.policy.on_arrival(task, now_s)
        worker.is_urgent = True
        if not is_known:
            self._push_answer(index, request, 0)
        self._push_plan(index)
        self._push_arrival()

    def _rooms(self) -> list[Room]:
        block_tokens = self._setup.shape.block_tokens
        total_tokens = self._setup.shape.capacity_blocks * block_tokens
        return [
            Room(
                str(index),
                total_tokens - _spoken_for(worker, block_tokens),
                total_tokens,
                len(worker.books.held),
            )
            for index, worker in enumerate(self._workers)
        ]

    def _push_answer(self, index: int, request: SimRequest, generated_tokens: int) -> None:
        at_s = self._events.now_s + self._setup.prediction_delay_s
        self._events.push(at_s, Priority.ANSWER, (self._on_answer, (index, request, generated_tokens)))

    def _on_answer(self, index: int, request: SimRequest, generated_tokens: int) -> None:
        worker = self._workers[index]
        told = self._setup.predictor.predict(request, generated_tokens)
        if told is not None and request.key in worker.books.held:
            worker.policy.on_predicted(request.key, told, self._events.now_s)
            self._push_plan(index)

    def _push_plan(self, index: int) -> None:
        if not self._is_plan_due[index]:
            self._is_plan_due[index] = True
            self._events.push(self._events.now_s, Priority.PLAN, (self._on_plan, (index,)))

    def _on_plan(self, index: int) -> None:
        worker, now_s = self._workers[index], self._events.now_s
        self._is_plan_due[index] = False
        before = worker.stretch_end()
        self._ask(index, worker.next_plans(now_s))
        self._check(worker)
        after = worker.stretch_end()
        if after is not None and after != before:
            self._events.push(after[0], Priority.STEP, (self._on_stretch_end, (index, after[1])))

    def _ask(self, index: int, batches: Iterable[PlannedBatch]) -> None:
        """What policies want predicted anew."""
        for batch in batches:
            for question in batch.questions:
                self._push_answer(index, self._records[question.key].request, question.generated_tokens)

    def _on_stretch_end(self, index: int, serial: int) -> None:
        worker = self._workers[index]
        if not worker.is_current(serial):
            return
        for held in worker.advance(self._events.now_s):
            self._note_end(held.record)
        self._check(worker)
        after = worker.stretch_end()
        if after is not None:
            self._events.push(after[0], Priority.STEP, (self._on_stretch_end, (index, after[1])))
        self._push_plan(index)

    def _note_end(self, record: ServedRecord) -> None:
        self._ended += 1
        self._setup.predictor.observe(record.request)
        if self._on_end is not None:
            self._on_end(record)

    def _check(self, worker: SimWorker) -> None:
        if self._setup.is_checked:
            worker.policy.check_integrity()
            worker.books.check_integrity()


def _spoken_for(worker: SimWorker, block_tokens: int) -> int:
    """Tokens allocated, and prompts of those that hold nothing yet."""
    return sum(
        held.allocated_blocks * block_tokens or held.prefill_tokens for held in worker.books.held.values()
    )
