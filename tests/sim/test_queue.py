"""Who is next while memory is full: the batching policy says so, live and simulated, and not placement."""

from collections.abc import Callable, Sequence

import pytest

from services.scheduler.policy import find_policy
from services.scheduler.policy.contract import PASSING_SHARE, PolicySettings, QueueOrder, WorkerShape
from sim.case import Case, Machine, run_case
from sim.predictors import find_predictor
from sim.requests import SimRequest
from sim.setup import Setup
from sim.simulation import Simulation
from sim.workloads import Source
from tests.sim.live_loop import LiveLoop
from tests.sim.simple import OneSecond

SHAPE = WorkerShape(block_tokens=4, capacity_blocks=24)
SETTINGS = PolicySettings(max_batch_sequences=6, token_budget=64, max_steps=1, start_tokens=1 << 20)


def full_memory() -> list[SimRequest]:
    """One that fills the memory; then eight long ones, more than a worker is fed with, and six short ones."""
    filling = SimRequest(0, 0.5, 76, 20, 20)
    long = [SimRequest(1 + n, 1.5 + n / 100, 40, 30, 36) for n in range(8)]
    return [filling, *long, *(SimRequest(9 + n, 2.5 + n / 100, 3, 4, 36) for n in range(6))]


def live_order(policy: str, requests: Sequence[SimRequest]) -> list[int]:
    loop = LiveLoop(find_policy(policy), SHAPE, SETTINGS, find_predictor("oracle"))
    loop.run(requests)
    return [int(key[0]) for key in loop.ended]


def simulated_order(policy: str, requests: Sequence[SimRequest]) -> list[int]:
    setup = Setup(policy, SHAPE, SETTINGS, OneSecond(), find_predictor("oracle"))
    records = Simulation(setup, requests).run().records
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
        setup = Setup(
            "kvasir",
            SHAPE,
            SETTINGS,
            OneSecond(),
            find_predictor("oracle"),
            workers=4,
            queue=QueueOrder(queue),
        )
        records = Simulation(setup, requests).run().records
        return sum(record.queue_s for record in records) / len(records)

    assert mean_wait_s("work") < 0.9 * mean_wait_s("arrival")


@pytest.mark.parametrize("seed", [0, 1])
def test_nobody_waits_longer_than_the_share_that_may_pass_makes_first_come_first_served(seed: int) -> None:
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
            seed=seed,
            options=options,
        )
        return max(record.queue_s for record in run_case(case).records)

    bound_s = longest_wait_s("vllm", "none") / (1 - PASSING_SHARE)
    assert longest_wait_s("kvasir", "oracle") <= bound_s
    assert longest_wait_s("kvasir", "oracle", ("passing_share", 0.95)) > bound_s
