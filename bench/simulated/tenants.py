"""`python -m bench tenants`: effect of a flooding tenant on two others, simulated.

Two tenants send chats at a steady rate. A third sends, at 100 times the rate of either, enough long prompts
to fill the workers until the others end.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean

import numpy as np

from bench.kit.context import Context
from bench.kit.datasets import data_folder
from bench.kit.outcome import Outcome, Table
from services.scheduler.policy.contract import QueueOrder
from services.worker.core.costs import find_cost
from shared.messages.sequence import NOBODY, ServiceClass, Tenant
from sim.case import TRAINING_REQUESTS, Case, run_case
from sim.predictors import find_predictor
from sim.requests import ServedRecord, SimRequest
from sim.routers import find_router
from sim.setup import Outcome as Simulated
from sim.setup import Setup
from sim.simulation import Simulation
from sim.summary import ServiceLevel, attainment, measure_level
from sim.workloads import Source, find_source, poisson_requests, training_requests

FLOOD_RATE = 100.0
"""Multiple of each other tenant's rate."""
FLOODER = "flood"
FLOOD_BEGINS_S = 10.0
OTHERS = ("a", "b")


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
    chats = len(OTHERS) * round(mix.share * capacity.chats_per_s * mix.workers * mix.duration_s)
    others = sorted(outcome.records, key=lambda record: record.request.index)[:chats]
    return _side_figures(outcome, others, capacity.level)


def _side_figures(
    outcome: Simulated, others: Sequence[ServedRecord], level: ServiceLevel
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


_SHOWN = {
    "latency p50 s": "latency_p50_s",
    "p99": "latency_p99_s",
    "first token p50 s": "ttft_p50_s",
    "p99 ": "ttft_p99_s",
    "SLO": "slo",
    "all takes s": "end_s",
    "KV allocated": "kv_used",
    "evictions": "evictions",
}


def add_arguments(parser: ArgumentParser) -> None:
    """Add the bench's flags."""
    parser.add_argument("--trace", default="sharegpt", help="what the others send [%(default)s]")
    parser.add_argument("--documents", default="arxiv", help="what the flood is of [%(default)s]")
    parser.add_argument("--workers", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--share", type=float, default=0.2, help="of capacity, for each other [%(default)s]")
    parser.add_argument("--duration", type=float, help="of the others' arrivals, in s [300, quick: 60]")
    parser.add_argument("--seeds", type=int, help="runs of each side [3, quick: 1]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for an unknown trace."""
    flags = context.arguments
    chats = find_source(flags.trace, data_folder())
    documents = find_source(flags.documents, data_folder())
    context.say("what one worker can do")
    capacity = measure_capacity(chats, documents)
    seeds = range(context.seed, context.seed + (flags.seeds or (1 if context.quick else 3)))
    duration_s = flags.duration or (60.0 if context.quick else 300.0)
    found: dict[str, dict[str, float]] = {}
    with context.progress("sides", len(SIDES) * len(seeds)) as bar:
        for side in SIDES:
            runs = []
            for seed in seeds:
                mix = Mix(chats, documents, flags.workers, flags.share, duration_s, seed)
                runs.append(serve(mix, capacity, side))
                context.record({"side": side.name, "seed": seed, **runs[-1]}, "sides.jsonl")
                bar.advance(now=side.name)
            found[side.name] = {name: fmean(each[name] for each in runs) for name in runs[0]}
    rows = [(name, *(f"{figures[key]:.3g}" for key in _SHOWN.values())) for name, figures in found.items()]
    title = f"two keys of {chats.name}, {flags.share:g} of capacity each, beside a flood (simulated)"
    alone, told, one = found["alone"], found["told apart"], found["not told apart"]
    first_come, classes = found["first come"], found["guaranteed, sheddable"]
    figures = {
        "flood_p99_ratio": told["latency_p99_s"] / alone["latency_p99_s"],
        "flood_p99_ratio_not_told_apart": one["latency_p99_s"] / alone["latency_p99_s"],
        "flood_p99_ratio_first_come": first_come["latency_p99_s"] / alone["latency_p99_s"],
        "flood_p99_ratio_guaranteed": classes["latency_p99_s"] / alone["latency_p99_s"],
        "flood_ttft_p99_s": told["ttft_p99_s"],
        "flood_ttft_p99_s_first_come": first_come["ttft_p99_s"],
        "throughput_ratio": one["end_s"] / told["end_s"],
        "throughput_ratio_guaranteed": one["end_s"] / classes["end_s"],
        "guaranteed_share": classes["slo"],
        "sheddable_kv_used": classes["kv_used"],
    }
    notes = [
        f"policy kvasir, histogram, seeds {list(seeds)}; the flood: {documents.name}, {FLOOD_RATE:g} times "
        "the rate of each other, as much as keeps the workers full"
    ]
    return Outcome(figures, 0, [Table(title, ("side", *_SHOWN), rows)], notes, simulated=True)
