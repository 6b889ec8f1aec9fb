"""Whole runs: all ends under every policy, latencies add up, equal inputs replay, wedges are told; cores."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.placement.core.roles import FleetRoles, Role
from services.scheduler.policy import BUILT_IN, policy_names
from services.scheduler.policy.contract import (
    PlannedBatch,
    PlannedQuestion,
    PolicySettings,
    Task,
    WorkerShape,
)
from services.worker.core.costs import find_cost
from services.worker.core.costs.fitted import OPT_13B_A100
from shared.errors import ConfigError
from sim.books import Held, PlanError
from sim.case import Case, Machine, latency_within_s, run_case
from sim.cores import CoreCosts, SharedCores
from sim.events import EventPriority, EventQueue
from sim.handover import HandoverTransfers, Transfer, Wire
from sim.linear_cost import LinearCost
from sim.meters import gap_quantile_s
from sim.predictors import NoPredictor
from sim.requests import ServedRecord, SimRequest
from sim.routers import find_router
from sim.setup import Outcome
from sim.simulation import WedgeError
from sim.workloads import Source, find_source
from tests.sim.simple import Scripted, decode, prefill, request, simulated

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
    settings = PolicySettings(chunked, max_batch_sequences=16, token_budget=128, start_tokens=1 << 20)
    kinds: dict[str, Any] = {"cost": OPT_13B_A100, "predictor": predictor, "is_checked": True}
    kinds |= {"workers": workers, "outstanding_steps": ahead, "router": find_router("least_work")}
    return simulated(policy, requests, shape, settings, **kinds)


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


@pytest.mark.parametrize("policy", [name for name in policy_names() if name.startswith("ecoserve")])
def test_decoupled_queues_keep_their_throughput_under_overload(policy: str) -> None:
    case = Case(find_source("alpaca", None), policy, "oracle", Machine(), rate_per_s=100, requests=700)
    outcome = run_case(case)
    assert len(outcome.records) / outcome.end_s > 20, "waiting KV fills the memory"


sizes = st.tuples(st.integers(1, 150), st.integers(1, 100), st.floats(0, 3))


@settings(max_examples=40)
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
    simulated("scripted", [request(output=3)], prediction_delay_s=delay_s)
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
    assert len(first.records) == 60 and first.records == second.records


def test_a_queue_that_is_left_over_breaks_the_run_off() -> None:
    crowd = CASE.at(200.0)
    assert latency_within_s(crowd, 1e9) < math.inf
    assert latency_within_s(crowd, 1e9, longest_drain_s=1.0) == math.inf


def test_a_request_that_no_worker_holds_is_told_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"a worker's KV holds 64"):
        run_case(replace(CASE, machine=Machine(block_tokens=32, capacity_blocks=2)))


STEP_S = 0.004
COST = LinearCost("test", STEP_S, 0.0, 0.0)


def test_a_step_beside_a_free_core_takes_its_own_time() -> None:
    cores = SharedCores(CoreCosts(2, 0.001, 0.0001, lanes=1.0), workers=1)
    cores.arrive(0.0)
    assert cores.ends_s(0, [STEP_S, STEP_S], 0.0) == pytest.approx([STEP_S, 2 * STEP_S])


@given(
    st.integers(1, 3),
    st.floats(0.5, 4.0),
    st.lists(st.tuples(st.floats(0.0, 0.01), st.integers(0, 9)), max_size=30),
)
def test_nothing_of_the_rest_is_lost(cores: int, lanes: float, sent: list[tuple[float, int]]) -> None:
    """Behind all that was sent nothing is ready before so much work can be done at full speed."""
    shared, now_s, tokens = SharedCores(CoreCosts(cores, 0.0, 0.001, lanes), 1), 0.0, 0
    for gap_s, count in sent:
        now_s += gap_s
        tokens += count
        late_s = shared.emit([now_s], count, now_s)
        assert now_s + late_s >= 0.001 * tokens / min(lanes, cores) - 1e-9
        assert late_s <= 0.001 * tokens / min(lanes, cores) + 1e-9


def serve(cores: CoreCosts | None, workers: int) -> Outcome:
    requests = [SimRequest(index, 0.01 * index, 16, 20, 64) for index in range(40)]
    settings = PolicySettings(max_batch_sequences=8, token_budget=64)
    kinds: dict[str, Any] = {"cost": COST, "predictor": NoPredictor(), "workers": workers, "cores": cores}
    return simulated("vllm", requests, WorkerShape(16, 200), settings, **kinds)


def step_s(outcome: Outcome) -> float:
    """In the mean."""
    return sum(meter.busy_s for meter in outcome.meters) / sum(meter.steps for meter in outcome.meters)


def test_with_cores_enough_and_nothing_else_to_do_it_is_the_simulator_as_it_was() -> None:
    plain, shared = serve(None, 2), serve(CoreCosts(64, 0.0, 0.0), 2)
    for one, other in zip(plain.records, shared.records, strict=True):
        assert (one.first_token_s, one.end_s) == pytest.approx((other.first_token_s, other.end_s))
    assert not any(one.first_late_s or one.end_late_s for one in shared.records)


PREFILL, DECODE = Role.PREFILL, Role.DECODE


def requests(count: int, per_s: float, *, prompt: int = 2048, answer: int = 24) -> list[SimRequest]:
    return [SimRequest(at, at / per_s, prompt + 7 * (at % 5), answer + at % 7, 64) for at in range(count)]


def serve_split(
    sent: list[SimRequest],
    roles: FleetRoles | None,
    *,
    workers: int = 4,
    blocks: int = 1000,
    policy: str = "kvasir",
) -> Outcome:
    settings = PolicySettings(max_batch_sequences=128, token_budget=1024, start_tokens=1 << 30)
    kinds: dict[str, Any] = {"cost": find_cost("opt-13b-a100"), "router": find_router("prefix_aware")}
    kinds |= {"workers": workers, "roles": roles, "is_checked": True}
    return simulated(policy, sent, WorkerShape(32, blocks), settings, **kinds)


@pytest.mark.parametrize("policy", ["kvasir", "vllm", "ecoserve"])
def test_each_answer_goes_on_at_a_worker_that_writes_answers(policy: str) -> None:
    outcome = serve_split(requests(60, 6.0), FleetRoles((PREFILL, PREFILL, PREFILL, DECODE)), policy=policy)
    assert all(record.end_s > record.first_token_s > 0 for record in outcome.records)
    handed_over = [record for record in outcome.records if record.handovers]
    assert len(handed_over) > 50 and {record.worker for record in handed_over} == {3}
    for record in outcome.records:
        parts = record.queue_s + record.prefill_s + record.gt_wait_s + record.decode_s + record.preempted_s
        assert parts == pytest.approx(record.jct_s)
    gaps = sum(meter.gaps.total() for meter in outcome.meters)
    assert gaps == sum(r.request.output_tokens - 1 for r in outcome.records), "no token twice, none lost"


def test_tokens_come_more_evenly_where_no_prompts_are_computed() -> None:
    sent = requests(80, 6.5)
    split = serve_split(sent, FleetRoles((PREFILL, PREFILL, PREFILL, DECODE)))
    both = serve_split(sent, None)
    assert gap_quantile_s(split.meters, 0.99) < 0.7 * gap_quantile_s(both.meters, 0.99)


def test_where_nobody_has_room_answers_stay() -> None:
    outcome = serve_split(requests(40, 8.0, answer=40), FleetRoles((PREFILL, DECODE)), workers=2, blocks=160)
    assert any(record.handovers == 0 for record in outcome.records)
    assert any(record.handovers == 1 for record in outcome.records)


def test_adaptive_roles_change_while_serving_and_equal_runs_are_equal() -> None:
    sent = requests(400, 7.0)
    runs = [serve_split(sent, roles) for roles in (FleetRoles(None), FleetRoles(None))]
    assert [record.end_s for record in runs[0].records] == [record.end_s for record in runs[1].records]
    late = runs[0].records[250:]
    assert sum(record.handovers for record in late) > 0.8 * len(late)


def transfer(target: int = 1) -> Transfer:
    request = SimRequest(0, 0.0, 1000, 10, 16)
    return Transfer(Held(ServedRecord(request)), Task(request.key, 1000, 16, 0.0), 0, target)


def test_a_chunk_is_sent_while_it_is_computed() -> None:
    wire = Wire(token_bytes=1000, layers=10, bytes_per_s=1e6)
    fast = HandoverTransfers(wire).send(transfer(), 100, 0.0, 1.0)
    assert fast == pytest.approx(1.0 + 0.01), "all but the last layer went meanwhile"
    assert HandoverTransfers(wire).send(transfer(), 10_000, 0.0, 1.0) == pytest.approx(0.1 + 10.0)
    transfers = HandoverTransfers(wire)
    transfers.send(transfer(1), 10_000, 0.0, 1.0)
    assert transfers.send(transfer(2), 100, 0.0, 1.0) > 10.0, "the source sends one after the other"
    assert transfers.wait_s(3, 1, 1.0) == pytest.approx(9.1) and transfers.wait_s(3, 4, 1.0) == 0.0
