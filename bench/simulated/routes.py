"""The `--routes` half of `bench fleet`: placement of prompts that share prefixes.

Mooncake's conversations, in order and with their block names, on workers with prefix caches. It compares the
cost of the prefix in seconds (`prefix_aware`), round robin and the least loaded worker. A second run gives
every block a unique name, so that nothing is shared.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from random import Random

import numpy as np

from bench.kit.context import Context
from bench.kit.datasets import find
from bench.kit.outcome import Outcome, Table, joined
from bench.simulated import routes_live
from services.worker.core.costs import find_cost
from shared.blocks import HASH_BYTES
from shared.errors import ConfigError
from sim.case import Case, Machine
from sim.predictors import find_predictor
from sim.requests import SimRequest
from sim.routers import find_router
from sim.setup import Setup
from sim.simulation import Simulation
from sim.sweep import sweep
from sim.workloads import Source

MOONCAKE = "mooncake/conversation_trace.jsonl"
BLOCK_TOKENS = 512
MACHINE = Machine(capacity_blocks=5120)
"""Large enough for prompts of up to 126,195 tokens."""
ROUTERS = ("prefix_aware", "round_robin", "least_work")
_MAX_TOKENS = 2048
_SHOWN = {
    "blocks found": "hit_share",
    "error": "hit_error",
    "first token p50 s": "ttft_p50_s",
    "p99": "ttft_p99_s",
    "latency p50 s": "latency_p50_s",
    "p99 ": "latency_p99_s",
    "all takes s": "end_s",
}


@dataclass(frozen=True, slots=True)
class Route:
    """Settings of one run."""

    router: str
    file: Path
    workers: int
    requests: int
    rate: float
    """Requests per second over all workers."""
    cache_blocks: int
    is_shared: bool
    seed: int


def read_requests(route: Route) -> list[SimRequest]:
    """Return requests in the trace's order, at Poisson times. Raises ConfigError for an invalid file."""
    random = Random(f"{route.seed}/arrivals")
    made: list[SimRequest] = []
    at_s = 0.0
    try:
        with route.file.open() as lines:
            for index, line in zip(range(route.requests), lines, strict=False):
                row = json.loads(line)
                at_s += random.expovariate(1.0) / route.rate
                names = [block if route.is_shared else (index << 32) + block for block in row["hash_ids"]]
                whole = int(row["input_length"]) // BLOCK_TOKENS
                made.append(
                    SimRequest(
                        index,
                        at_s,
                        int(row["input_length"]),
                        max(1, min(int(row["output_length"]), _MAX_TOKENS)),
                        _MAX_TOKENS,
                        names=tuple(name.to_bytes(HASH_BYTES, "big") for name in names[:whole]),
                    )
                )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{route.file} cannot be read as such a trace: {error!r}", param="routes"
        ) from error
    return made


def serve(route: Route) -> dict[str, float]:
    """Run one simulation and return its figures."""
    setup = Setup(
        policy="kvasir",
        shape=MACHINE.shape,
        settings=Case(Source("mooncake"), machine=MACHINE).settings,
        cost=find_cost(MACHINE.cost),
        predictor=find_predictor("histogram_online", seed=route.seed, train=[]),
        workers=route.workers,
        router=find_router(route.router),
        cache_blocks=route.cache_blocks,
        cache_block_tokens=BLOCK_TOKENS,
    )
    outcome = Simulation(setup, read_requests(route)).run()
    records = outcome.records
    ttft_s = [record.first_token_s - record.request.arrival_s for record in records]
    jct_s = [record.jct_s for record in records]
    tokens = sum(len(record.request.names) for record in records) * BLOCK_TOKENS
    errors = sum(abs(record.expected_tokens - record.cached_tokens) for record in records)
    return {
        "hit_share": sum(record.cached_tokens for record in records) / tokens,
        "hit_error": errors / tokens,
        "ttft_p50_s": float(np.percentile(ttft_s, 50)),
        "ttft_p99_s": float(np.percentile(ttft_s, 99)),
        "latency_p50_s": float(np.percentile(jct_s, 50)),
        "latency_p99_s": float(np.percentile(jct_s, 99)),
        "end_s": outcome.end_s,
        "requests_per_s": len(records) / outcome.end_s,
    }


def run(context: Context) -> Outcome:
    """Run the bench: simulated, live, or both. Raises ConfigError if the trace is missing."""
    live = context.arguments.live
    parts = [] if live == "only" else [_simulated(context)]
    return joined([*parts, *([_live(context)] if live else [])])


def _simulated(context: Context) -> Outcome:
    flags = context.arguments
    file = find(MOONCAKE)
    if file is None:
        text = f"{MOONCAKE} is not there: `python -m bench data` downloads it"
        raise ConfigError(text, param="routes")
    workers = (flags.workers or [8])[-1]
    requests = flags.requests or (400 if context.quick else 3000)
    blank = Route("least_work", file, workers, requests, inf, flags.cache_blocks, True, context.seed)
    context.say("what the workers can do with nothing shared")
    capacity = serve(replace(blank, is_shared=False))["requests_per_s"]
    routes = [
        replace(blank, router=router, rate=load * capacity, is_shared=is_shared)
        for is_shared, load in ((True, flags.load), (False, flags.load))
        for router in ROUTERS
    ]
    with context.progress("routes", len(routes)) as bar:
        answers = sweep(
            serve, routes, processes=flags.processes, on_result=lambda done, _: bar.advance(now=done.router)
        )
    rows: list[Sequence[object]] = []
    for route, answer in zip(routes, answers, strict=True):
        kind = "mooncake" if route.is_shared else "nothing shared"
        rows.append((kind, route.router, *(f"{answer[name]:.3g}" for name in _SHOWN.values())))
        context.record({"router": route.router, "shared": route.is_shared, **answer}, "routes.jsonl")
    found = {(route.is_shared, route.router): answer for route, answer in zip(routes, answers, strict=True)}
    title = f"{workers} workers, {flags.load:g} x {capacity:.3g} requests/s (simulated)"
    notes = [
        f"policy kvasir, histogram; {requests} requests of Mooncake in their order; each worker keeps "
        f"{flags.cache_blocks} blocks of {BLOCK_TOKENS} tokens"
    ]
    table = Table(title, ("load", "route", *_SHOWN), rows)
    return Outcome(_figures(found), 0, [table], notes, simulated=True)


def _live(context: Context) -> Outcome:
    """Measure our policy and the least loaded worker on a stack."""
    requests, rate = (60 if context.quick else 400), context.arguments.live_rate
    found = {
        policy: routes_live.measure(
            context.run_dir / policy, policy, requests=requests, rate=rate, seed=context.seed
        )
        for policy in ("prefix_aware", "worst_fit")
    }
    context.say("the same where blocks are evicted")
    tight = routes_live.measure(
        context.run_dir / "tight",
        "prefix_aware",
        requests=requests,
        rate=rate,
        seed=context.seed,
        is_tight=True,
    )
    ours, theirs = found.values()
    found["prefix_aware, evicting"] = tight
    figures = {
        "live_hit_share": ours["hit_share"],
        "live_hit_share_ratio": ours["hit_share"] / max(1e-9, theirs["hit_share"]),
        "live_hit_error": ours["hit_error"],
        "live_hit_share_evicting": tight["hit_share"],
        "live_hit_error_evicting": tight["hit_error"],
        "live_ttft_p50_ratio": ours["ttft_p50_s"] / theirs["ttft_p50_s"],
    }
    rows = [(policy, *(f"{value:.3g}" for value in answer.values())) for policy, answer in found.items()]
    title = f"{routes_live.WORKERS} live workers, engine `simulated`, {rate:g} requests/s"
    failures = int(sum(answer["failures"] for answer in found.values()))
    return Outcome(figures, failures, [Table(title, ("policy", *ours), rows)])


def _figures(found: dict[tuple[bool, str], dict[str, float]]) -> dict[str, float]:
    """Return ratios of our router to the others; for times lower is better."""
    ours, turns, least = (found[True, router] for router in ROUTERS)
    apart, _, least_apart = (found[False, router] for router in ROUTERS)
    return {
        "hit_share": ours["hit_share"],
        "hit_share_ratio": ours["hit_share"] / turns["hit_share"],
        "hit_error": ours["hit_error"],
        "route_ttft_p50_ratio": ours["ttft_p50_s"] / least["ttft_p50_s"],
        "route_ttft_p99_ratio": ours["ttft_p99_s"] / least["ttft_p99_s"],
        "route_latency_p50_ratio": ours["latency_p50_s"] / least["latency_p50_s"],
        "route_latency_p99_ratio": ours["latency_p99_s"] / least["latency_p99_s"],
        "route_throughput_ratio": least["end_s"] / ours["end_s"],
        "route_ttft_p99_ratio_unshared": apart["ttft_p99_s"] / least_apart["ttft_p99_s"],
        "route_ttft_p50_ratio_unshared": apart["ttft_p50_s"] / least_apart["ttft_p50_s"],
        "route_latency_p50_ratio_unshared": apart["latency_p50_s"] / least_apart["latency_p50_s"],
        "route_latency_p99_ratio_unshared": apart["latency_p99_s"] / least_apart["latency_p99_s"],
        "route_throughput_ratio_unshared": least_apart["end_s"] / apart["end_s"],
    }
