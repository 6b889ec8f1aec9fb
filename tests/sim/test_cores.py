"""Engines and the rest on the same cores: who finds one free does not wait, and no work is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.contract import PolicySettings, WorkerShape
from services.worker.core.costs.linear import LinearCost
from sim.cores import CoreCosts, SharedCores
from sim.predictors import NoPredictor
from sim.requests import SimRequest
from sim.setup import Outcome, Setup
from sim.simulation import Simulation

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
    setup = Setup(
        "vllm",
        WorkerShape(16, 200),
        PolicySettings(max_batch_sequences=8, token_budget=64),
        COST,
        NoPredictor(),
        workers=workers,
        cores=cores,
    )
    return Simulation(setup, requests).run()


def step_s(outcome: Outcome) -> float:
    """In the mean."""
    return sum(meter.busy_s for meter in outcome.meters) / sum(meter.steps for meter in outcome.meters)


def test_with_cores_enough_and_nothing_else_to_do_it_is_the_simulator_as_it_was() -> None:
    plain, shared = serve(None, 2), serve(CoreCosts(64, 0.0, 0.0), 2)
    for one, other in zip(plain.records, shared.records, strict=True):
        assert (one.first_token_s, one.end_s) == pytest.approx((other.first_token_s, other.end_s))
    assert not any(one.first_late_s or one.end_late_s for one in shared.records)
