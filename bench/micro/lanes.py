"""Cost of one event in the scheduler's core with many busy workers: the second part of `bench scheduler`.

Workers are simulated: every plan runs to its end and is reported. Placement answers at once with the worker
that has the fewest sequences. As many answers end as requests arrive, so each worker always has 64.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from random import Random

from services.scheduler.core.core import SchedulerCore
from services.scheduler.core.effects import AskPlacement, AskSnapshot, Effect, SendPlan
from services.scheduler.core.rules import Rules
from services.scheduler.policy import find_policy
from services.scheduler.policy.contract import PolicySettings
from shared.messages.commands import LengthPrediction
from shared.messages.plans import BatchPlan, EndedSequence, WorkerStepped
from shared.messages.reports import Capacity, WorkerReported
from shared.messages.sequence import FinishReason, Sampling, SequenceRef, SequenceSpec, pack_tokens

BLOCK_TOKENS = 16
RUNNING = 64
_TICK_EVERY = 400
"""Events per tick: 20 ms of a fleet with 20,000 events per second."""
_HEARTBEAT_EVERY = 10
_ENDS = 0.1
"""Share of steps in which an answer ends: 64 answers of some hundred tokens."""
_EVER_S = 1e9


@dataclass(slots=True)
class Lane:
    """One simulated worker."""

    name: str
    plans: deque[BatchPlan] = field(default_factory=deque)
    running: list[SequenceRef] = field(default_factory=list)
    reports: int = 0
    steps: int = 0


class BusyFleet:
    """A core that leads `lanes` workers with `RUNNING` sequences each."""

    def __init__(self, policy: str, lanes: int, seed: int) -> None:
        settings = PolicySettings(max_batch_sequences=RUNNING, token_budget=2048, start_tokens=1 << 30)
        rules = Rules(
            settings=settings,
            round_s=0.0,
            worker_timeout_s=_EVER_S,
            gateway_timeout_s=_EVER_S,
            snapshot_patience_s=_EVER_S,
            max_queued=1 << 20,
        )
        self._random = Random(seed)
        self._now_s = 0.0
        self._lanes = [Lane(f"w{index:05d}") for index in range(lanes)]
        self._by_name = {lane.name: lane for lane in self._lanes}
        self._loads = [(0, lane.name) for lane in self._lanes]
        heapify(self._loads)
        self._sent = 0
        self.took_s: list[float] = []
        self._left: list[str] = []
        self._core = SchedulerCore(rules, find_policy(policy), 1, 0.0)
        for lane in self._lanes:
            self._carry_out(self._core.on_worker_reported(self._report(lane), 0.0))
        self._carry_out(self._core.on_tick(0.0))
        for _ in range(lanes * RUNNING):
            self.arrive()
        while self._core.queued or any(len(lane.running) < RUNNING for lane in self._lanes):
            self._now_s += 0.025
            for lane in self._lanes:
                self._run(lane, ends=False)
            self._carry_out(self._core.on_tick(self._now_s))

    def _event(self, on_event: Callable[..., list[Effect]], *event: object) -> None:
        """Make one call into the core and measure its CPU time."""
        begin = time.thread_time()
        effects = on_event(*event, self._now_s)
        self.took_s.append(time.thread_time() - begin)
        self._carry_out(effects)

    def _submit(self, spec: SequenceSpec, now_s: float) -> list[Effect]:
        return self._core.on_submit(spec, now_s)[1]

    def _report(self, lane: Lane) -> WorkerReported:
        lane.reports += 1
        return WorkerReported(
            worker_id=lane.name,
            incarnation=1,
            seq=lane.reports,
            stepped_seq=lane.steps,
            epoch=0,
            plan_seq=0,
            model="bench",
            block_tokens=BLOCK_TOKENS,
            max_context_tokens=4096,
            capacity=Capacity(total_blocks=8192, free_blocks=8192),
            prefill_tokens_per_s=5000.0,
            decode_step_s=0.025,
        )

    def _spec(self) -> SequenceSpec:
        self._sent += 1
        prompt = [1] * self._random.randint(10, 400)
        return SequenceSpec(
            ref=SequenceRef(request_id=f"r{self._sent:08d}", choice=0, attempt=1),
            gateway_id="gateway-0",
            gateway_incarnation=1,
            prompt=pack_tokens(prompt),
            sampling=Sampling(seed=1, max_tokens=2048, temperature=0.0),
        )

    def arrive(self) -> None:
        """Submit one request and its prediction."""
        spec = self._spec()
        guess = self._random.randint(20, 900)
        told = LengthPrediction(
            rl_tokens=guess,
            p50_tokens=guess,
            p80_tokens=2 * guess,
            p90_tokens=2 * guess,
            p95_tokens=2 * guess,
            model_version="bench",
        )
        self._event(self._submit, spec)
        self._event(self._core.on_predicted, spec.ref, told)

    def turn(self) -> None:
        """Run one worker's step, sometimes with an ended answer and a new request in its place."""
        self._now_s += 0.025 / len(self._lanes)
        lane = self._lanes[self._random.randrange(len(self._lanes))]
        if self._run(lane, ends=self._random.random() < _ENDS):
            self.arrive()

    def tick(self) -> None:
        """Send a tick."""
        self._event(self._core.on_tick)

    def heartbeat(self) -> None:
        """Send one worker's heartbeat."""
        lane = self._lanes[self._random.randrange(len(self._lanes))]
        self._event(self._core.on_worker_reported, self._report(lane))

    def _run(self, lane: Lane, *, ends: bool) -> bool:
        """Run the worker's next plan to its end; return whether an answer ended."""
        if not lane.plans:
            return False
        plan = lane.plans.popleft()
        lane.steps += 1
        known = set(lane.running)
        lane.running += [start.ref for start in plan.starts if start.ref not in known]
        over: tuple[EndedSequence, ...] = ()
        if ends and lane.running:
            ref = lane.running.pop(self._random.randrange(len(lane.running)))
            over = (EndedSequence(ref=ref, finish_reason=FinishReason.STOP, generated_tokens=100),)
        event = WorkerStepped(
            worker_id=lane.name,
            incarnation=1,
            seq=lane.steps,
            epoch=plan.epoch,
            plan_seq=plan.seq,
            steps_done=plan.steps,
            plan_over=True,
            ended=over,
        )
        if over:
            self._left.append(lane.name)
        self._event(self._core.on_stepped, event)
        return bool(over)

    def _carry_out(self, effects: list[Effect]) -> None:
        """Play the other services' part."""
        for effect in effects:
            match effect:
                case SendPlan(worker_id=name, plan=plan):
                    if plan.supersedes:
                        self._by_name[name].plans.clear()
                    self._by_name[name].plans.append(plan)
                case AskPlacement(question=question, items=items) if question:
                    names = tuple(self._next_worker() for _ in items)
                    self._event(self._core.on_placed, question, names)
                case AskSnapshot(worker_id=name):
                    self._event(self._core.on_snapshot, self._report(self._by_name[name]))

    def _next_worker(self) -> str:
        if self._left:
            return self._left.pop()
        load, name = heappop(self._loads)
        heappush(self._loads, (load + 1, name))
        return name


def measure_events(policy: str, lanes: int, turns: int, seed: int) -> list[float]:
    """Return the milliseconds of each event, sorted."""
    fleet = BusyFleet(policy, lanes, seed)
    fleet.took_s.clear()
    for number in range(turns):
        fleet.turn()
        if number % _HEARTBEAT_EVERY == 0:
            fleet.heartbeat()
        if number % _TICK_EVERY == 0:
            fleet.tick()
    return sorted(1e3 * each for each in fleet.took_s)
