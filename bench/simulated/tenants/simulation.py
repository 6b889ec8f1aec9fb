"""The simulated half of `bench tenants`: one workload with or without tenants and flood.

Two tenants send chats at a steady rate. The third sends, at 100 times the rate of either, enough long prompts
to fill the workers until the others end. Every side serves all requests, so total times give the throughput.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from services.scheduler.policy.contract import QueueOrder
from services.worker.core.costs import find_cost
from shared.messages.sequence import NOBODY, ServiceClass, Tenant
from sim.case import Case, run_case
from sim.predictors import find_predictor
from sim.requests import ServedRecord, SimRequest
from sim.routers import find_router
from sim.setup import Outcome, Setup
from sim.simulation import Simulation
from sim.summary import ServiceLevel, attainment, measure_level
from sim.workloads import Source, poisson_requests, training_requests

FLOOD_RATE = 100.0
"""Multiple of each other tenant's rate."""
FLOODER = "flood"
FLOOD_BEGINS_S = 10.0
OTHERS = ("a", "b")
TRAINING_REQUESTS = 3000


@dataclass(frozen=True, slots=True)
class Mix:
    """Workload and number of workers."""

    chats: Source
    documents: Source
    workers: int
    share: float
    """Share of the workers' capacity that each of the two requests."""
    duration_s: float
    seed: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of one worker in requests per second, and the service level of a chat."""

    chats_per_s: float
    documents_per_s: float
    level: ServiceLevel


@dataclass(frozen=True, slots=True)
class Side:
    """Settings of one side."""

    name: str
    has_flood: bool = True
    are_told_apart: bool = True
    others: ServiceClass = ServiceClass.STANDARD
    flooder: ServiceClass = ServiceClass.STANDARD
    order: QueueOrder = QueueOrder.WORK


SIDES = (
    Side("alone", has_flood=False),
    Side("told apart"),
    Side("not told apart", are_told_apart=False),
    Side("first come", are_told_apart=False, order=QueueOrder.ARRIVAL),
    Side("guaranteed, sheddable", others=ServiceClass.GUARANTEED, flooder=ServiceClass.SHEDDABLE),
)


def measure_capacity(chats: Source, documents: Source) -> Capacity:
    """Measure capacity under `kvasir`, with all requests at once."""
    per_s = []
    for source in (chats, documents):
        outcome = run_case(Case(source, "kvasir", "histogram", rate_per_s=inf, requests=300))
        per_s.append(len(outcome.records) / outcome.end_s)
    calm = run_case(Case(chats, "kvasir", "histogram", rate_per_s=0.1 * per_s[0], requests=300))
    return Capacity(per_s[0], per_s[1], measure_level(calm))


def requests_of(mix: Mix, capacity: Capacity, side: Side) -> list[SimRequest]:
    """Return the requests of a side; sides differ only in the flood and in tenants."""
    rate = mix.share * capacity.chats_per_s * mix.workers
    parts = [
        (name, poisson_requests(mix.chats, count=round(rate * mix.duration_s), rate_per_s=rate, seed=seed))
        for seed, name in enumerate(OTHERS, start=2 * mix.seed)
    ]
    if side.has_flood:
        left = (1 - len(OTHERS) * mix.share) * capacity.documents_per_s * mix.workers * mix.duration_s
        flood = poisson_requests(
            mix.documents, count=round(left), rate_per_s=FLOOD_RATE * rate, seed=mix.seed
        )
        flood = [replace(one, arrival_s=one.arrival_s + FLOOD_BEGINS_S) for one in flood]
        parts.append((FLOODER, flood))
    made: list[SimRequest] = []
    for name, requests in parts:
        service_class = side.flooder if name == FLOODER else side.others
        tenant = Tenant(name=name, service_class=service_class) if side.are_told_apart else NOBODY
        made += [replace(one, index=len(made) + at, tenant=tenant) for at, one in enumerate(requests)]
    return made


def serve(mix: Mix, capacity: Capacity, side: Side) -> dict[str, float]:
    """Return figures of the two tenants, and of the machine."""
    requests = requests_of(mix, capacity, side)
    case = Case(mix.chats, "kvasir")
    train = [
        request
        for source in (mix.chats, mix.documents)
        for request in training_requests(source, count=TRAINING_REQUESTS, seed=mix.seed)
    ]
    setup = Setup(
        policy="kvasir",
        shape=case.machine.shape,
        settings=case.settings,
        cost=find_cost(case.machine.cost),
        predictor=find_predictor("histogram", seed=mix.seed, train=train),
        workers=mix.workers,
        router=find_router("worst_fit"),
        queue=side.order,
    )
    outcome = Simulation(setup, requests).run()
    chats = len(requests) if not side.has_flood else _first_of_flood(requests, mix, capacity)
    others = sorted(outcome.records, key=lambda record: record.request.index)[:chats]
    return _figures(outcome, others, capacity.level, mix.duration_s)


def _first_of_flood(requests: Sequence[SimRequest], mix: Mix, capacity: Capacity) -> int:
    return len(OTHERS) * round(mix.share * capacity.chats_per_s * mix.workers * mix.duration_s)


def _figures(
    outcome: Outcome, others: Sequence[ServedRecord], level: ServiceLevel, duration_s: float
) -> dict[str, float]:
    jct_s = np.array([record.jct_s for record in others])
    ttft_s = np.array([record.first_token_s - record.request.arrival_s for record in others])
    blocks = outcome.shape.capacity_blocks * sum(meter.busy_s for meter in outcome.meters)
    return {
        "latency_p50_s": float(np.percentile(jct_s, 50)),
        "latency_p99_s": float(np.percentile(jct_s, 99)),
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "slo": attainment(others, level),
        "end_s": outcome.end_s,
        "kv_used": sum(meter.allocated_block_s for meter in outcome.meters) / blocks,
        "evictions": float(sum(record.evictions for record in outcome.records)),
    }
