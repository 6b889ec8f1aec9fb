"""Whole runs: everything ends under every policy, latencies add up, equal inputs replay, wedges are told.

Order of events, and that time does not go back.

Where requests go.

Cases: all of a run by name, and runs that are broken off.
"""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy import BUILT_IN, policy_names
from services.scheduler.policy.contract import PlannedBatch, PlannedQuestion, PolicySettings, WorkerShape
from services.worker.core.costs.fitted import OPT_13B_A100
from shared.errors import ConfigError
from sim.books import PlanError
from sim.case import Case, Machine, latency_within_s, run_case
from sim.events import EventPriority, EventQueue
from sim.predictors import find_predictor
from sim.requests import SimRequest
from sim.routers import find_router
from sim.setup import Outcome, Setup
from sim.simulation import Simulation, WedgeError
from sim.workloads import Source
from tests.sim.simple import SETTINGS, SHAPE, OneSecond, Scripted, decode, prefill, request

SMALL = WorkerShape(block_tokens=16, capacity_blocks=24)


def run(
    policy: str,
    requests: list[SimRequest],
    *,
    predictor: str = "oracle",
    shape: WorkerShape = SMALL,
    ahead: int = 2,
    workers: int = 1,
    chunked: bool = True,
) -> Outcome:
    setup = Setup(
        policy=policy,
        shape=shape,
        settings=PolicySettings(
            chunked_prefill=chunked, max_batch_sequences=16, token_budget=128, start_tokens=1 << 20
        ),
        cost=OPT_13B_A100,
        predictor=find_predictor(predictor),
        workers=workers,
        router=find_router("least_work"),
        outstanding_steps=ahead,
        is_checked=True,
    )
    return Simulation(setup, requests).run()


def crowd(count: int, prompt: int = 40, output: int = 60, gap_s: float = 0.2) -> list[SimRequest]:
    return [
        request(i, 1 + prompt * (i % 5), 1 + output * (i % 4), i * gap_s, limit=200) for i in range(count)
    ]


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("ahead", [1, 2])
def test_every_policy_drains_a_crowd(policy: str, ahead: int) -> None:
    outcome = run(policy, crowd(24), predictor="sigma0.5", ahead=ahead)
    for record in outcome.records:
        parts_s = record.queue_s + record.prefill_s + record.gt_wait_s + record.decode_s + record.preempted_s
        assert parts_s == pytest.approx(record.jct_s, abs=1e-6)
        assert record.end_s >= record.first_token_s > record.request.arrival_s


sizes = st.tuples(st.integers(1, 150), st.integers(1, 100), st.floats(0, 3))


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(policy_names()),
    drawn=st.lists(sizes, min_size=1, max_size=14),
    predictor=st.sampled_from(["oracle", "sigma1", "short", "long", "random", "none"]),
    ahead=st.integers(1, 3),
    chunked=st.booleans(),
    blocks=st.integers(16, 40),
)
def test_no_workload_wedges_or_breaks_a_law(
    policy: str, drawn: list[tuple[int, int, float]], predictor: str, ahead: int, chunked: bool, blocks: int
) -> None:
    requests = [SimRequest(i, at_s, p, o, 100) for i, (p, o, at_s) in enumerate(drawn)]
    shape = WorkerShape(16, blocks)
    outcome = run(policy, requests, predictor=predictor, shape=shape, ahead=ahead, chunked=chunked)
    assert all(record.end_s >= record.request.arrival_s for record in outcome.records)


@pytest.mark.parametrize("policy", ["vllm", "fastgen"])
def test_equal_inputs_replay_equally(policy: str) -> None:
    first, second = (run(policy, crowd(20), predictor="random") for _ in range(2))
    assert first.records == second.records


def test_several_workers_share() -> None:
    outcome = run("vllm", crowd(20), workers=3)
    assert {record.worker for record in outcome.records} == {0, 1, 2}


def test_lone_request_costs_what_the_model_says() -> None:
    outcome = run("vllm", [request(prompt=100, output=3, limit=8)], ahead=1)
    steps_s = [OPT_13B_A100.step_s([(0, 100)], 0, 0)]
    steps_s += [OPT_13B_A100.step_s([], 1, 100 + i) for i in (1, 2)]
    assert outcome.records[0].jct_s == pytest.approx(sum(steps_s))


def scripted(script: list[PlannedBatch], monkeypatch: pytest.MonkeyPatch, delay_s: float = 0.0) -> Scripted:
    policy = Scripted(script)
    monkeypatch.setitem(BUILT_IN, "scripted", lambda shape, settings: policy)
    setup = Setup(
        "scripted", SHAPE, SETTINGS, OneSecond(), find_predictor("oracle"), prediction_delay_s=delay_s
    )
    Simulation(setup, [request(output=3)]).run()
    return policy


def test_work_that_nobody_plans_is_a_wedge(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WedgeError, match="1 of 1 requests wait for ever"):
        scripted([prefill(request(), 0, 4, 1)], monkeypatch)


def test_a_plan_against_the_law_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError):
        scripted([decode(request(), 1, 1)], monkeypatch)


def test_predictions_come_late_and_again_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    one = request(output=3)
    asking = PlannedBatch(
        prefills=prefill(one, 0, 4, 1).prefills, questions=(PlannedQuestion(one.key, generated_tokens=1),)
    )
    policy = scripted([asking, decode(one, 1, 2), decode(one, 1, 2)], monkeypatch, delay_s=0.25)
    predicted = [what for kind, what in policy.heard if kind == "predicted"]
    assert predicted == [(one.key, 3, 0.25), (one.key, 3, 0.25)]


def test_time_then_priority_then_order_of_pushing() -> None:
    queue: EventQueue[str] = EventQueue()
    queue.push(2.0, EventPriority.STEP, "late")
    queue.push(1.0, EventPriority.PLAN, "plan")
    queue.push(1.0, EventPriority.ARRIVAL, "first")
    queue.push(1.0, EventPriority.ARRIVAL, "second")
    queue.push(1.0, EventPriority.STEP, "step")
    assert [queue.pop()[1] for _ in range(len(queue))] == ["step", "first", "second", "plan", "late"]
    assert queue.now_s == 2.0


CASE = Case(Source("alpaca"), requests=60, rate_per_s=3.0, predictor="oracle")


def test_a_case_runs_and_replays() -> None:
    first, second = run_case(CASE), run_case(CASE, is_checked=True)
    assert len(first.records) == 60
    assert first.records == second.records


def test_a_queue_that_is_left_over_breaks_the_run_off() -> None:
    crowd = CASE.at(200.0)
    assert latency_within_s(crowd, 1e9) < math.inf
    assert latency_within_s(crowd, 1e9, longest_drain_s=1.0) == math.inf


def test_a_request_that_no_worker_holds_is_told_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"a worker's KV holds 64"):
        run_case(replace(CASE, machine=Machine(block_tokens=32, capacity_blocks=2)))
