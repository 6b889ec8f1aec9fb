"""The `--routes` half of `bench fleet`: placement of prompts that share prefixes.

Mooncake's conversations, in order and with their block names, on workers with prefix caches. It compares the
cost of the prefix in seconds (`prefix_aware`), round robin and the least loaded worker.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import uvloop

from bench.kit.context import Context
from bench.kit.datasets import find
from bench.kit.load import full_answer, serve_all
from bench.kit.outcome import Outcome, Table, joined
from bench.kit.stacks import start_stack
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
from sim.traces import BLOCK_TOKENS, read_trace
from sim.workloads import Source, poisson_times

MOONCAKE = "mooncake/conversation_trace.jsonl"
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
LIVE_WORKERS = 4
_BEGINNINGS, _BEGINNING_TOKENS, _OWN_TOKENS, _ANSWER_TOKENS = 40, 512, 64, 24
_VOCABULARY = range(300, 2000)
_ROOMY_BLOCKS, _TIGHT_BLOCKS = 960, 192
"""Blocks of 16 tokens per live worker: room for all prefixes in every cache, or for half of them."""
_CALM_S = 1.0
"""Pause before the status is read, for the last heartbeats."""


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
    times_s = poisson_times(Random(f"{route.seed}/arrivals"), route.rate)
    made: list[SimRequest] = []
    for index, row in enumerate(read_trace(route.file)[: route.requests]):
        names, answer = row.names, min(row.output_tokens, _MAX_TOKENS)
        if not route.is_shared:
            own = range(index << 32, (index << 32) + len(names))
            names = tuple(name.to_bytes(HASH_BYTES, "big") for name in own)
        made.append(SimRequest(index, next(times_s), row.prompt_tokens, answer, _MAX_TOKENS, names=names))
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
    figures = {
        "hit_share": sum(record.cached_tokens for record in records) / tokens,
        "hit_error": errors / tokens,
        "end_s": outcome.end_s,
        "requests_per_s": len(records) / outcome.end_s,
    }
    for name, values_s in (("ttft", ttft_s), ("latency", jct_s)):
        figures |= {f"{name}_p{share}_s": float(np.percentile(values_s, share)) for share in (50, 99)}
    return figures


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
        replace(blank, router=router, rate=flags.load * capacity, is_shared=is_shared)
        for is_shared in (True, False)
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


def _figures(found: dict[tuple[bool, str], dict[str, float]]) -> dict[str, float]:
    """Return ratios of our router to the least loaded worker; for times lower is better."""
    ours, turns = found[True, ROUTERS[0]], found[True, "round_robin"]
    figures = {
        "hit_share": ours["hit_share"],
        "hit_share_ratio": ours["hit_share"] / turns["hit_share"],
        "hit_error": ours["hit_error"],
    }
    for is_shared, end in ((True, ""), (False, "_unshared")):
        own, least = found[is_shared, ROUTERS[0]], found[is_shared, "least_work"]
        for name in ("ttft_p50", "ttft_p99", "latency_p50", "latency_p99"):
            figures[f"route_{name}_ratio{end}"] = own[f"{name}_s"] / least[f"{name}_s"]
        figures[f"route_throughput_ratio{end}"] = least["end_s"] / own["end_s"]
    return figures


def _live(context: Context) -> Outcome:
    """Measure our policy and the least loaded worker on a stack, and ours where blocks are evicted."""
    sides = {"prefix_aware": False, "worst_fit": False, "prefix_aware, evicting": True}
    found = {name: _measured(context, name, is_tight) for name, is_tight in sides.items()}
    ours, theirs, tight = found.values()
    figures = {
        "live_hit_share": ours["hit_share"],
        "live_hit_share_ratio": ours["hit_share"] / max(1e-9, theirs["hit_share"]),
        "live_hit_error": ours["hit_error"],
        "live_hit_share_evicting": tight["hit_share"],
        "live_hit_error_evicting": tight["hit_error"],
        "live_ttft_p50_ratio": ours["ttft_p50_s"] / theirs["ttft_p50_s"],
    }
    rows = [(name, *(f"{value:.3g}" for value in answer.values())) for name, answer in found.items()]
    title = f"{LIVE_WORKERS} live workers, engine `simulated`, {context.arguments.live_rate:g} requests/s"
    failures = int(sum(answer["failures"] for answer in found.values()))
    return Outcome(figures, failures, [Table(title, ("policy", *ours), rows)])


def _measured(context: Context, name: str, is_tight: bool) -> dict[str, float]:
    """Measure one placement policy on a new stack. With `is_tight`, blocks are evicted all the time."""
    settings: dict[str, object] = {
        "worker.engine": "simulated",
        "worker.kv_blocks": _TIGHT_BLOCKS if is_tight else _ROOMY_BLOCKS,
        "placement.policy": name.partition(",")[0],
        **({"worker.host_memory.blocks": 1, "worker.host_memory.cache_share": 1} if is_tight else {}),
    }
    count, drawn = 60 if context.quick else 400, Random(f"{context.seed}/routes")
    due_s = list(islice(poisson_times(drawn, context.arguments.live_rate), count))
    bodies = [_body(drawn, f"{context.seed}/{number}") for number in range(count)]
    context.say(f"live: {name}")
    with start_stack(context.run_dir / name.replace(", ", "-"), settings, workers=LIVE_WORKERS) as stack:
        load = uvloop.run(serve_all(stack.target, bodies, count, due_s=due_s))
        time.sleep(_CALM_S)
        told = stack.details("hits_expected_tokens")
    first_s = [answer.first_s for answer in load.answers if answer.ok]
    return {
        "hit_share": load.cached_share,
        "hit_error": told["hits_error_tokens"] / max(1, told["placed_prompt_tokens"]),
        "ttft_p50_s": float(np.percentile(first_s, 50)),
        "ttft_p99_s": float(np.percentile(first_s, 99)),
        "failures": float(load.failures),
    }


def _body(drawn: Random, name: str) -> dict[str, Any]:
    family = f"beginning {min(int(drawn.paretovariate(0.8)), _BEGINNINGS)}"
    parts = ((family, _BEGINNING_TOKENS), (name, _OWN_TOKENS))
    prompt = [token for part, size in parts for token in Random(part).choices(_VOCABULARY, k=size)]
    return full_answer(prompt, _ANSWER_TOKENS)
