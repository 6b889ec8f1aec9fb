"""One event list to the live scheduler and to the simulator, a recording too: the same decisions."""

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import pytest
from pytest import MonkeyPatch

from services.scheduler.core.effects import Effect
from services.scheduler.policy import BUILT_IN, find_policy, policy_names
from services.scheduler.policy.contract import (
    TRIAL_SHAPE,
    BatchPolicy,
    PlannedBatch,
    PolicyFactory,
    PolicySettings,
    QueueOrder,
    WorkerShape,
)
from services.scheduler.policy.fleet_queue import FleetQueue
from services.scheduler.reporting import TermReport
from services.stack.record import FORMAT, written
from services.worker.core.costs import CostModel
from services.worker.core.costs.fitted import OPT_13B_A100
from services.worker.core.steps import StepEffects
from services.worker.engine.simulated import SimulatedEngine, answer_tokens
from services.worker.engine.step_record import StepRecord
from shared.errors import ConfigError
from shared.messages.commands import LengthPrediction
from shared.messages.recordings import TellRecorded
from shared.messages.sequence import SequenceRef, SequenceSpec
from shared.recorder import Recorder
from sim.case import Case, Machine, run_case
from sim.linear_cost import LinearCost
from sim.meters import WorkerMeter
from sim.predictors import find_predictor
from sim.replay import Replay, main, read_recording, recorded_run
from sim.requests import SimRequest
from sim.routers import find_router
from sim.setup import Setup
from sim.simulation import Simulation
from sim.summary import measure_level, summarize
from sim.workloads import Source
from tests.shared.messages.builders import ref, spec
from tests.sim import simple
from tests.sim.live_loop import EngineOnClock, LiveLoop, LiveWorker
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


def _at_once(decision: Decision) -> tuple[float, str]:
    """Sort what happens at once by its words: the order of a step's rows is the worker's own."""
    return decision[0], str(decision[1:])


WAYS = [("least_work", 0), ("worst_fit", 1)]


@pytest.mark.parametrize(
    ("policy", "router", "seed"), [(name, *WAYS[at % 2]) for at, name in enumerate(policy_names())]
)
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
    kinds: dict[str, Any] = {"workers": WORKERS, "router": find_router(router), "cost": OPT_13B_A100}
    kinds["predictor"] = find_predictor("sigma0.5", seed=seed)
    simple.simulated("witnessed", crowd(seed), SHAPE, SETTINGS, prediction_delay_s=PREDICTION_S, **kinds)
    for ours, theirs in zip(simulated, live, strict=True):
        assert sorted(ours, key=_at_once) == sorted(theirs, key=_at_once)
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


@pytest.mark.parametrize(
    ("policy", "max_steps", "seed"),
    [(name, 1 + at % 2 * 7, at % 2) for at, name in enumerate(sorted(BUILT_IN))],
)
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


FULL_SHAPE = WorkerShape(block_tokens=4, capacity_blocks=24)
FULL_SETTINGS = PolicySettings(max_batch_sequences=6, token_budget=64, max_steps=1, start_tokens=1 << 20)


def full_memory() -> list[SimRequest]:
    """One that fills the memory; then eight long ones, more than a worker is fed with, and six short ones."""
    filling = SimRequest(0, 0.5, 76, 20, 20)
    long = [SimRequest(1 + n, 1.5 + n / 100, 40, 30, 36) for n in range(8)]
    return [filling, *long, *(SimRequest(9 + n, 2.5 + n / 100, 3, 4, 36) for n in range(6))]


def live_order(policy: str, requests: Sequence[SimRequest]) -> list[int]:
    loop = LiveLoop(find_policy(policy), FULL_SHAPE, FULL_SETTINGS, find_predictor("oracle"))
    loop.run(requests)
    return [int(key[0]) for key in loop.ended]


def simulated_order(policy: str, requests: Sequence[SimRequest]) -> list[int]:
    records = simple.simulated(policy, requests, FULL_SHAPE, FULL_SETTINGS).records
    return [record.request.index for record in sorted(records, key=lambda record: record.end_s)]


@pytest.mark.parametrize("order", [live_order, simulated_order])
def test_short_answers_start_before_long_ones_that_came_first_where_the_policy_wants_it(
    order: Callable[[str, Sequence[SimRequest]], list[int]],
) -> None:
    """Placement kept a first-come queue before every policy, which never saw whom it was to order."""
    by_work, by_arrival = order("kvasir", full_memory()), order("vllm", full_memory())
    assert set(by_work[1:7]) == set(range(9, 15)), by_work
    assert by_arrival.index(9) > by_arrival.index(7), by_arrival


def test_queues_by_arrival_and_by_work_with_one_policy() -> None:
    """Four workers, more than they can serve: by work the same policy keeps short answers short."""

    def mean_wait_s(queue: str) -> float:
        requests = [SimRequest(n, n / 4, 8, 4 if n % 3 else 36, 40) for n in range(120)]
        order = QueueOrder(queue)
        outcome = simple.simulated("kvasir", requests, FULL_SHAPE, FULL_SETTINGS, workers=4, queue=order)
        records = outcome.records
        return sum(record.queue_s for record in records) / len(records)

    assert mean_wait_s("work") < 0.9 * mean_wait_s("arrival")


def test_nobody_waits_longer_than_the_share_that_may_pass_makes_first_come_first_served() -> None:
    """More than can be served: the longest wait, which is p99.9 of so few. Where nearly all may pass it is
    longer than that."""

    def longest_wait_s(policy: str, predictor: str, *options: tuple[str, float]) -> float:
        case = Case(
            Source("sharegpt"),
            policy,
            predictor,
            Machine(capacity_blocks=120),
            rate_per_s=2.0,
            requests=120,
            options=options,
        )
        return max(record.queue_s for record in run_case(case).records)

    bound_s = longest_wait_s("vllm", "none") / (1 - 0.35)
    assert longest_wait_s("kvasir", "oracle", ("passing_share", 0.35)) <= bound_s
    assert longest_wait_s("kvasir", "oracle", ("passing_share", 0.95)) > bound_s


def test_requests_whose_wait_would_be_too_long_are_refused_and_more_of_the_others_are_in_time() -> None:
    case = Case(Source("sharegpt"), "kvasir", "oracle", Machine(capacity_blocks=120), requests=120)
    calm = run_case(case.at(0.05))
    assert calm.refused == 0 and run_case(replace(case, refuse_wait_s=20.0).at(0.05)).records == calm.records
    every, some = (run_case(replace(case, refuse_wait_s=most_s).at(2.0)) for most_s in (0.0, 20.0))
    assert every.refused == 0 and some.refused > 0 and len(some.records) + some.refused == 120
    kept = [summarize(each, measure_level(calm)) for each in (every, some)]
    assert kept[0]["slo"] < kept[1]["slo"] <= len(some.records) / 120


COST = LinearCost("linear", 0.02, 0.0002, 0.0003, 0.000001)
"""A fit can find it exactly, so that what is compared are decisions."""


_TOLD_SETTINGS = ("chunked_prefill", "max_batch_sequences", "token_budget", "max_steps", "start_tokens")


class RecordedLoop(LiveLoop):
    """Notes what the live services note, on the loop's clock."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.scheduler = Recorder("scheduler", "scheduler-0", 1, clock=lambda: self.now_s)
        self.recorders: dict[str, Recorder] = defaultdict(
            lambda: Recorder("worker", "", 1, clock=lambda: self.now_s)
        )
        self._term = TermReport(self.scheduler)
        self._steps: dict[str, StepRecord] = {}
        super().__init__(*arguments, **options)

    def _submit(self, request: SimRequest) -> None:
        self._term.submitted(self._spec_of(request), known=False, queued=1)
        super()._submit(request)

    def _predict(self, ref: SequenceRef, told: LengthPrediction) -> None:
        self._term.predicted(ref, told)
        super()._predict(ref, told)

    def _end_step(self, worker: LiveWorker) -> None:
        assert worker.work is not None
        name = worker.process.name
        record = self._steps.setdefault(name, StepRecord(self.recorders[name]))
        record.ran(worker.work, self.now_s - worker.step_s, worker.step_s, StepEffects())
        super()._end_step(worker)

    def _carry_out(self, effects: list[Effect], now_s: float) -> None:
        for effect in effects:
            self._term.note(effect)
        super()._carry_out(effects, now_s)


def recorded(policy: str, seed: int, monkeypatch: MonkeyPatch) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The lines of a recording."""
    engines = [EngineOnClock(lambda let_pass: engine(let_pass, COST)) for _ in range(WORKERS)]
    loop = RecordedLoop(
        find_policy(policy),
        SHAPE,
        SETTINGS,
        find_predictor("sigma0.5", seed=seed),
        engines=engines,
        router=find_router("least_work"),
        spec_of=asked,
        prediction_delay_s=PREDICTION_S,
    )
    monkeypatch.setattr("services.scheduler.reporting.monotonic_s", lambda: loop.now_s)
    loop.run(crowd(seed))
    events = []
    for name, recorder in (("scheduler-0", loop.scheduler), *loop.recorders.items()):
        since_seq = 0
        while (told := recorder.recorded(TellRecorded(since_seq=since_seq))).events:
            events += written(name, told.events, 0.0)
            since_seq = told.next_seq
    setup = {
        "rules": {"policy": policy, "policy_options": {}, "queue": "", "outstanding_steps": 2, "ahead_s": 0.0}
        | {name: getattr(SETTINGS, name) for name in _TOLD_SETTINGS},
        "placement": "worst_fit",
        "workers": [
            {"worker": f"{at:05d}", "block_tokens": SHAPE.block_tokens, "total_blocks": SHAPE.capacity_blocks}
            for at in range(WORKERS)
        ],
    }
    lines = json.dumps([{"format": FORMAT, "setup": setup}, sorted(events, key=lambda e: e["unix_s"])])
    head, told_events = json.loads(lines)
    return head, told_events


def batches_of(worker: str, events: Sequence[dict[str, Any]]) -> list[frozenset[str]]:
    return [
        frozenset(name for name, *_ in (*event["own"], *event["chunks"]))
        for event in events
        if event["kind"] == "step" and event["instance"] == worker
    ]


@pytest.mark.parametrize("policy", ["kvasir", "ecoserve"])
def test_a_recorded_run_is_decided_the_same_way_again(policy: str, monkeypatch: MonkeyPatch) -> None:
    head, events = recorded(policy, 0, monkeypatch)
    monkeypatch.setattr(FleetQueue, "on_measured", lambda *_: None)
    monkeypatch.setattr(WorkerMeter, "tell", lambda *_: None)  # the loop measures nothing either
    run = recorded_run(head["setup"], events)
    assert len(run.requests) == 60
    replay = Replay(run)
    outcome = replay.as_it_was()
    agreed = replay.agreement(outcome)
    assert (agreed.requests, agreed.same_worker, agreed.same_order) == (60, 1.0, 1.0)
    for request, record in zip(run.requests, outcome.records, strict=True):
        assert request.ended_s is not None
        assert record.end_s == pytest.approx(request.ended_s - run.requests[0].arrival_s, abs=1e-6)
        assert record.worker == int(request.worker)
    for worker in run.workers:
        assert [set(batch) for batch in run.batches[worker]] == [
            {(name, 0) for name in batch} for batch in batches_of(worker, events)
        ]


def test_more_workers_end_requests_earlier_and_the_same_ones_as_recorded(monkeypatch: MonkeyPatch) -> None:
    head, events = recorded("vllm", 0, monkeypatch)
    run = recorded_run(head["setup"], events)
    replay = Replay(run)
    slow = max(run.requests, key=lambda request: (request.ended_s or 0.0) - request.arrival_s)
    assert replay.what_if(slow.name[0]).later_s == 0.0
    more = replay.what_if(slow.name[0], more_workers=3)
    assert (more.policy, more.workers) == ("vllm", WORKERS + 3) and more.later_s < -0.1
    other = replay.what_if(slow.name[0], policy="orca")
    assert (other.policy, other.workers) == ("orca", WORKERS) and other.later_s != 0.0
    with pytest.raises(ConfigError, match="no whole request req_none"):
        replay.what_if("req_none")


def test_a_file_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    for text in ("", "nonsense\n", '{"format": "kvasir-recording-1"}\n', "[1]\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="services record"):
            read_recording(path)
    assert main([str(path)]) == 2 and "services record" in capsys.readouterr().err
