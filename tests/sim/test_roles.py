"""Prompts and answers on simulated workers of their own: what is handed over, when, what it gains."""

import pytest

from services.placement.core.roles import FleetRoles, Role
from services.scheduler.policy.contract import PolicySettings, Task, WorkerShape
from services.worker.core.costs import find_cost
from sim.books import Held
from sim.handover import HandoverTransfers, Transfer, Wire
from sim.meters import gap_quantile_s
from sim.predictors import find_predictor
from sim.requests import ServedRecord, SimRequest
from sim.routers import find_router
from sim.setup import Outcome, Setup
from sim.simulation import Simulation

PREFILL, DECODE = Role.PREFILL, Role.DECODE


def requests(count: int, per_s: float, *, prompt: int = 2048, answer: int = 24) -> list[SimRequest]:
    return [SimRequest(at, at / per_s, prompt + 7 * (at % 5), answer + at % 7, 64) for at in range(count)]


def serve(
    sent: list[SimRequest],
    roles: FleetRoles | None,
    *,
    workers: int = 4,
    blocks: int = 1000,
    policy: str = "kvasir",
) -> Outcome:
    setup = Setup(
        policy=policy,
        shape=WorkerShape(32, blocks),
        settings=PolicySettings(max_batch_sequences=128, token_budget=1024, start_tokens=1 << 30),
        cost=find_cost("opt-13b-a100"),
        predictor=find_predictor("oracle", seed=0, train=[]),
        workers=workers,
        router=find_router("prefix_aware"),
        roles=roles,
        is_checked=True,
    )
    return Simulation(setup, sent).run()


@pytest.mark.parametrize("policy", ["kvasir", "vllm", "ecoserve"])
def test_each_answer_goes_on_at_a_worker_that_writes_answers(policy: str) -> None:
    outcome = serve(requests(60, 6.0), FleetRoles((PREFILL, PREFILL, PREFILL, DECODE)), policy=policy)
    assert all(record.end_s > record.first_token_s > 0 for record in outcome.records)
    handed_over = [record for record in outcome.records if record.handovers]
    assert len(handed_over) > 50
    assert {record.worker for record in handed_over} == {3}
    for record in outcome.records:
        parts = record.queue_s + record.prefill_s + record.gt_wait_s + record.decode_s + record.preempted_s
        assert parts == pytest.approx(record.jct_s)
    gaps = sum(meter.gaps.total() for meter in outcome.meters)
    assert gaps == sum(record.request.output_tokens - 1 for record in outcome.records), (
        "no token twice, none lost"
    )


def test_tokens_come_more_evenly_where_no_prompts_are_computed() -> None:
    sent = requests(80, 6.5)
    split = serve(sent, FleetRoles((PREFILL, PREFILL, PREFILL, DECODE)))
    both = serve(sent, None)
    assert gap_quantile_s(split.meters, 0.99) < 0.7 * gap_quantile_s(both.meters, 0.99)


def test_where_nobody_has_room_answers_stay() -> None:
    outcome = serve(requests(40, 8.0, answer=40), FleetRoles((PREFILL, DECODE)), workers=2, blocks=160)
    assert any(record.handovers == 0 for record in outcome.records)
    assert any(record.handovers == 1 for record in outcome.records)


def test_adaptive_roles_change_while_serving_and_equal_runs_are_equal() -> None:
    sent = requests(400, 7.0)
    runs = [serve(sent, roles) for roles in (FleetRoles(None), FleetRoles(None))]
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
    assert HandoverTransfers(wire).send(transfer(), 10_000, 0.0, 1.0) == pytest.approx(0.1 + 10.0), (
        "the link is slower"
    )
    transfers = HandoverTransfers(wire)
    transfers.send(transfer(1), 10_000, 0.0, 1.0)
    assert transfers.send(transfer(2), 100, 0.0, 1.0) > 10.0, "the source sends one after the other"
    assert transfers.wait_s(3, 1, 1.0) == pytest.approx(9.1)
    assert transfers.wait_s(3, 4, 1.0) == 0.0
