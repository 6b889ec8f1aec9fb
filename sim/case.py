"""One case of a sweep, as plain data: every process that runs it gets the same result."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from services.scheduler.policy.contract import PolicySettings, QueueOrder, WorkerShape
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES
from services.worker.core.costs import find_cost
from services.worker.core.costs.fitted import DecodePart, FittedCost
from shared.errors import ConfigError
from sim.predictors import UNTRAINED, find_predictor
from sim.requests import ServedRecord, SimRequest
from sim.routers import find_router
from sim.setup import Outcome, Setup
from sim.simulation import Simulation
from sim.workloads import Source, poisson_requests, trace_requests, training_requests

TRAINING_REQUESTS = 3000


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of worker. Defaults: OPT-13B on an A100 with 12 GB for KV, as in papers/003. That is 15,360
    tokens in blocks of 32. Forwards of 1024 tokens reach 90 % of peak there (DistServe)."""

    cost: str = "opt-13b-a100"
    block_tokens: int = 32
    capacity_blocks: int = 480
    token_budget: int = 1024
    max_batch_sequences: int = 256
    max_steps: int = 8
    scheduling_share: float = 0.0
    """Share of time in which the device waits for the scheduler."""
    cache_blocks: int = 0
    """Prompt blocks in each worker's prefix cache, of the trace's block size; 0 for no cache."""

    @property
    def shape(self) -> WorkerShape:
        return WorkerShape(self.block_tokens, self.capacity_blocks)


@dataclass(frozen=True, slots=True)
class Case:
    """A policy on a machine, with a predictor, under a workload."""

    source: Source
    policy: str = "vllm"
    predictor: str = "histogram"
    machine: Machine = field(default_factory=Machine)
    rate_per_s: float | None = 1.0
    """Poisson rate; infinity makes all requests arrive at once, None uses the trace's arrivals."""
    requests: int = 1000
    seed: int = 0
    chunked_prefill: bool = True
    batch_sequences: int | None = None
    """Overrides the machine's batch size, as papers/003 does for orca and fastserve (8)."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the policy."""
    workers: int = 1
    placement: str = "least_work"
    eviction: str = "frequent"
    """Eviction order of the prefix cache, if the machine has one."""
    queue: QueueOrder | None = None
    """Overrides the policy's queue order."""
    places: int = FEED_SEQUENCES
    outstanding_steps: int = 2
    refuse_wait_s: float = 0.0
    """Longest expected wait of an accepted request; 0 to accept all."""
    prediction_delay_s: float = 0.0

    @property
    def settings(self) -> PolicySettings:
        return PolicySettings(
            chunked_prefill=self.chunked_prefill,
            max_batch_sequences=self.batch_sequences or self.machine.max_batch_sequences,
            token_budget=self.machine.token_budget,
            max_steps=self.machine.max_steps,
            start_tokens=1 << 30,
            options=dict(self.options),
        )

    def at(self, rate_per_s: float) -> "Case":
        return replace(self, rate_per_s=rate_per_s)


def requests_of(case: Case) -> list[SimRequest]:
    if case.rate_per_s is None:
        return trace_requests(case.source, count=case.requests)
    return poisson_requests(case.source, count=case.requests, rate_per_s=case.rate_per_s, seed=case.seed)


def slowed(cost: FittedCost, factor: float) -> FittedCost:
    """Return the cost model of steps that take `factor` times as long."""
    small, large = (
        DecodePart(factor * part.fixed_ms, factor * part.context_ms, factor * part.sequence_ms)
        for part in (cost.small, cost.large)
    )
    first, token, square = (factor * part for part in cost.prefill_ms)
    return replace(cost, prefill_ms=(first, token, square), small=small, large=large)


class OverLimitError(Exception):
    """The run is certain to exceed its latency limit."""


def run_case(
    case: Case, *, is_checked: bool = False, on_end: Callable[[ServedRecord], None] | None = None
) -> Outcome:
    """Run one case. Raises ConfigError for unknown names and for requests larger than a worker, PlanError
    and WedgeError for faults of the policy."""
    requests = requests_of(case)
    _check_sizes(requests, case.machine)
    is_trained = case.predictor not in UNTRAINED
    train = training_requests(case.source, count=TRAINING_REQUESTS, seed=case.seed) if is_trained else []
    setup = Setup(
        policy=case.policy,
        shape=case.machine.shape,
        settings=case.settings,
        cost=slowed(find_cost(case.machine.cost), 1 / (1 - case.machine.scheduling_share)),
        predictor=find_predictor(case.predictor, seed=case.seed, train=train),
        workers=case.workers,
        router=find_router(case.placement),
        queue=case.queue,
        places=case.places,
        outstanding_steps=case.outstanding_steps,
        refuse_wait_s=case.refuse_wait_s,
        prediction_delay_s=case.prediction_delay_s,
        cache_blocks=case.machine.cache_blocks,
        eviction=case.eviction,
        is_checked=is_checked,
    )
    return Simulation(setup, requests, on_end).run()


def _check_sizes(requests: list[SimRequest], machine: Machine) -> None:
    capacity_tokens = machine.block_tokens * machine.capacity_blocks
    longest = max(requests, key=lambda request: request.prompt_tokens + request.output_tokens)
    tokens = longest.prompt_tokens + longest.output_tokens
    if tokens > capacity_tokens:
        raise ConfigError(
            f"request {longest.index} has {longest.prompt_tokens} + {longest.output_tokens} tokens, "
            f"a worker's KV holds {capacity_tokens}: take a trace of shorter requests or a larger machine"
        )


def latency_within_s(case: Case, limit_s: float, longest_drain_s: float = math.inf) -> float:
    """Return the run's normalized latency, or infinity once it is certain to exceed `limit_s`. Also
    infinity if a request ends more than `longest_drain_s` after the last arrival."""
    bound_s, total_s = limit_s * case.requests, 0.0
    last_s = max(request.arrival_s for request in requests_of(case))

    def add(record: ServedRecord) -> None:
        nonlocal total_s
        total_s += record.normalized_s
        if total_s > bound_s or record.end_s > last_s + longest_drain_s:
            raise OverLimitError

    try:
        outcome = run_case(case, on_end=add)
    except OverLimitError:
        return math.inf
    return total_s / len(outcome.records)
