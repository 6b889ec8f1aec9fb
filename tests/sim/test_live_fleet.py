"""One event list to simulated workers below the live scheduler, and to the simulator: the same decisions.

Workers have their own cores and block pools, a `SimulatedEngine` and the cost model's times; placement has
its own books. Who starts when and where, who is preempted, and when every answer ends.
"""

from collections.abc import Callable
from random import Random
from typing import Any, cast

import msgspec
import pytest

from services.scheduler.policy import BUILT_IN, find_policy, policy_names
from services.scheduler.policy.contract import (
    TRIAL_SHAPE,
    BatchPolicy,
    PlannedBatch,
    PolicyFactory,
    PolicySettings,
    WorkerShape,
)
from services.scheduler.policy.fleet_queue import FleetQueue
from services.worker.core.costs import CostModel
from services.worker.core.costs.fitted import OPT_13B_A100
from services.worker.engine.simulated import SimulatedEngine, answer_tokens
from shared.messages.sequence import SequenceSpec
from sim.predictors import find_predictor
from sim.requests import SimRequest
from sim.routers import find_router
from sim.setup import Setup
from sim.simulation import Simulation
from tests.shared.messages.builders import ref, spec
from tests.sim.live_loop import EngineOnClock, LiveLoop
from tests.sim.simple import OneSecond
from tests.stack.actors import END_TOKEN

SHAPE = WorkerShape(block_tokens=16, capacity_blocks=48)
SETTINGS = PolicySettings(max_batch_sequences=12, token_budget=96, max_steps=4, start_tokens=1 << 20)
LONGEST_ANSWER = 160
WORKERS = 3
PREDICTION_S = 0.004
"""Until a prediction is there: later than a place, as live."""
Decision = tuple[float, str, object]
"""When, what, whom; or a whole batch."""


class Witness:
    """A policy that writes down what it decides, and is told no speeds."""

    def __init__(self, policy: BatchPolicy, decisions: list[Decision]) -> None:
        self._policy, self._decisions = policy, decisions
        self._started: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def on_arrival(self, task: Any, now_s: float) -> None:
        self._note(now_s, "comes", task.key[0])
        self._policy.on_arrival(task, now_s)

    def on_ended(self, key: Any, now_s: float, answer_tokens: int | None = None) -> None:
        self._note(now_s, f"ends with {answer_tokens}", key[0])
        self._policy.on_ended(key, now_s, answer_tokens)

    def on_measured(self, prefill_tokens_per_s: float, decode_step_s: float, now_s: float) -> None:
        """The live side measures nothing here."""

    def plan(self, now_s: float) -> PlannedBatch | None:
        batch = self._policy.plan(now_s)
        if batch is not None:
            self._note(now_s, "is planned", batch)
        for item in batch.preemptions if batch else ():
            self._started.discard(item.key[0])
            self._note(now_s, "is preempted", item.key[0])
        for chunk in batch.prefills if batch else ():
            if chunk.key[0] not in self._started:
                self._started.add(chunk.key[0])
                self._note(now_s, "starts", chunk.key[0])
        return batch

    def _note(self, now_s: float, what: str, whom: object) -> None:
        self._decisions.append((round(now_s, 6), what, whom))


def witnessed(policy: str, decisions: list[list[Decision]]) -> PolicyFactory:
    """Each worker's decisions, in the order in which they got their policies."""
    factory = find_policy(policy)

    def made(shape: WorkerShape, settings: PolicySettings) -> BatchPolicy:
        if shape is TRIAL_SHAPE:  # asked for the queue's order alone
            return factory(shape, settings)
        decisions.append([])
        return cast(BatchPolicy, Witness(factory(shape, settings), decisions[-1]))

    return made


def crowd(seed: int, count: int = 60) -> list[SimRequest]:
    """Bursts and lulls, more than there is memory for. Answers as the engine will write them."""
    drawn, at_s, made = Random(seed), 0.0, []
    for index in range(count):
        at_s += drawn.choice([0.001, 0.002, 0.01, 0.1, 0.8])
        answer = min(LONGEST_ANSWER, answer_tokens(_seed(index), 0))
        made.append(SimRequest(index, at_s, drawn.randint(1, 260), answer, LONGEST_ANSWER))
    return made


def _seed(index: int) -> int:
    return 1000 + index


def asked(request: SimRequest) -> SequenceSpec:
    drawn = Random(request.index)
    prompt = [drawn.randrange(20, 500) for _ in range(request.prompt_tokens)]
    made = spec(ref(request.key[0]), prompt, max_tokens=request.max_tokens, end_token_ids=(END_TOKEN,))
    sampling = msgspec.structs.replace(made.sampling, seed=_seed(request.index))
    return msgspec.structs.replace(made, sampling=sampling)


def engine(let_pass: Callable[[float], None], cost: CostModel = OPT_13B_A100) -> SimulatedEngine:
    return SimulatedEngine(
        vocabulary=512,
        max_positions=4096,
        kv_blocks=SHAPE.capacity_blocks,
        block_tokens=SHAPE.block_tokens,
        cost=cost,
        sleep=let_pass,
    )


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize(("router", "seed"), [("least_work", 0), ("worst_fit", 1)])
def test_simulated_workers_do_what_the_simulator_says(
    policy: str, router: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FleetQueue, "on_measured", lambda *_: None)
    live: list[list[Decision]] = []
    simulated: list[list[Decision]] = []
    predictor = find_predictor("sigma0.5", seed=seed)
    LiveLoop(
        witnessed(policy, live),
        SHAPE,
        SETTINGS,
        predictor,
        engines=[EngineOnClock(engine) for _ in range(WORKERS)],
        router=find_router(router),
        spec_of=asked,
        prediction_delay_s=PREDICTION_S,
    ).run(crowd(seed))
    monkeypatch.setitem(BUILT_IN, "witnessed", witnessed(policy, simulated))
    setup = Setup(
        "witnessed",
        SHAPE,
        SETTINGS,
        OPT_13B_A100,
        find_predictor("sigma0.5", seed=seed),
        workers=WORKERS,
        router=find_router(router),
        prediction_delay_s=PREDICTION_S,
    )
    Simulation(setup, crowd(seed)).run()
    for ours, theirs in zip(simulated, live, strict=True):
        assert ours == theirs
    assert all(any(what == "starts" for _, what, _ in decisions) for decisions in live)
    if policy == "vllm":
        assert any(what == "is preempted" for decisions in live for _, what, _ in decisions)


def apart(seed: int) -> list[SimRequest]:
    """Bursts and lulls, never at a step's end."""
    drawn, at_s, made = Random(seed), 0.0, []
    for index in range(40):
        at_s += drawn.choice([0, 0, 0, 1, 2, 5, 30])
        prompt, output = drawn.randint(1, 24), drawn.randint(1, 20)
        made.append(SimRequest(index, at_s + 0.5 + index / 1000, prompt, output, 20))
    return made


@pytest.mark.parametrize("policy", sorted(BUILT_IN))
@pytest.mark.parametrize("max_steps", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_the_simulator_plans_what_the_live_scheduler_plans(
    policy: str, max_steps: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FleetQueue, "on_measured", lambda *_: None)
    simulated: list[list[Decision]] = []
    live: list[list[Decision]] = []
    settings = PolicySettings(
        max_batch_sequences=6, token_budget=24, max_steps=max_steps, start_tokens=1 << 20
    )
    shape, oracle = WorkerShape(block_tokens=4, capacity_blocks=24), find_predictor("oracle")
    LiveLoop(witnessed(policy, live), shape, settings, oracle).run(apart(seed))
    monkeypatch.setitem(BUILT_IN, "witnessed", witnessed(policy, simulated))
    Simulation(Setup("witnessed", shape, settings, OneSecond(), oracle), apart(seed)).run()
    ours, theirs = ([whom for _, what, whom in each[0] if what == "is planned"] for each in (simulated, live))
    assert ours == theirs and ours
