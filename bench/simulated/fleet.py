"""`python -m bench fleet`: several workers behind one queue, simulated.

`--queue` compares the fleet's queue by work with first come, first served and placement only into free
memory.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from statistics import fmean

from bench.kit.context import Context
from bench.kit.datasets import data_folder
from bench.kit.outcome import Outcome, Table
from bench.simulated import roles, routes
from bench.simulated.ecoserve.comparison import PAST_KNEE
from bench.simulated.ecoserve.measures import RateQuestion, answer_rate, peer_knee
from services.scheduler.policy.contract import QueueOrder
from services.scheduler.policy.fleet_queue import FEED_SEQUENCES
from sim.case import Case, Machine
from sim.predictors import PREDICTORS
from sim.sweep import sweep
from sim.workloads import find_source

SIDES = {"by work": (QueueOrder.WORK, FEED_SEQUENCES), "first come": (QueueOrder.ARRIVAL, 0)}
"""(queue order, sequences that may wait at a worker) by side."""
_SHOWN = {
    "SLO": "slo",
    "s/token": "normalized_s",
    "mean wait s": "queue_s",
    "p99": "wait_s_p99",
    "p99.9": "wait_s_p999",
    "tokens/s": "tokens_per_s",
}
Cell = tuple[int, str]
"""(workers, side)"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the bench's flags."""
    add = parser.add_argument
    add("--queue", action="store_true", help="the queue by work against first come (default)")
    add("--routes", action="store_true", help="which worker, where prompts begin alike")
    add("--roles", action="store_true", help="prompts and answers on workers of their own")
    add("--live", nargs="?", const="too", choices=("too", "only"), help="routes, roles: a real stack as well")
    add("--live-rate", type=float, default=12.0, help="requests per second [%(default)s]")
    add("--requests", type=int, help="routes: of the trace [3000, quick: 400]")
    add("--load", type=float, default=0.8, help="routes: of capacity [%(default)s]")
    add("--cache-blocks", type=int, default=2000, help="routes: of 512 tokens, at each worker [%(default)s]")
    add("--trace", default="sharegpt", help="a workload by name [%(default)s]")
    add("--workers", type=int, nargs="+", help="[4 8 16, quick: 4]")
    add("--predictor", default="histogram", choices=sorted(PREDICTORS), help="[%(default)s]")
    add("--duration", type=float, help="of arrivals, in s [300, quick: 60]")
    add("--seeds", type=int, help="runs of each [3, quick: 1]")
    add("--processes", type=int, help="[one per core]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for an unknown trace."""
    flags = context.arguments
    if flags.routes:
        return routes.run(context)
    if flags.roles:
        return roles.run(context)
    duration_s = flags.duration or (60.0 if context.quick else 300.0)
    seeds = tuple(range(context.seed, context.seed + (flags.seeds or (1 if context.quick else 3))))
    counts = flags.workers or ([4] if context.quick else [4, 8, 16])
    source = find_source(flags.trace, data_folder())
    context.say("what one worker sustains under vllm")
    reference, knee = peer_knee(source, Machine(), 500 if context.quick else 1000)

    def question(workers: int, side: str) -> RateQuestion:
        order, places = SIDES[side]
        rate = PAST_KNEE * knee * workers
        case = Case(
            source,
            "kvasir",
            flags.predictor,
            workers=workers,
            queue=order,
            places=places,
            placement="worst_fit",
            requests=round(rate * duration_s),
        )
        return RateQuestion(f"{workers} {side}", case, rate, reference.level, seeds)

    cells = [(count, side) for count in counts for side in SIDES]
    with context.progress("fleets", len(cells)) as bar:
        answers = sweep(
            answer_rate,
            [question(*cell) for cell in cells],
            processes=flags.processes,
            on_result=lambda done, _: bar.advance(now=done.label),
        )
    found = dict(zip(cells, answers, strict=True))
    for (workers, side), answer in found.items():
        context.record({"side": side, "workers": workers, **answer}, "cells.jsonl")
    rows = [(*cell, *(f"{found[cell][name]:.3g}" for name in _SHOWN.values())) for cell in cells]
    title = f"{source.name}, {PAST_KNEE} x {knee:.2f} requests/s for each worker (simulated)"
    notes = [f"policy kvasir, predictor {flags.predictor}, seeds {list(seeds)}, {duration_s:g} s of arrivals"]
    table = Table(title, ("workers", "queue", *_SHOWN), rows)
    return Outcome(_figures(found, counts), 0, [table], notes, simulated=True)


def _figures(found: dict[Cell, dict[str, float]], counts: Sequence[int]) -> dict[str, float]:
    """Return ratios of the queue by work to first come, per number of workers and as their mean."""
    figures: dict[str, float] = {}
    names = {"queue_slo_ratio": "slo", "queue_wait_ratio": "queue_s", "queue_wait_p999_ratio": "wait_s_p999"}
    for figure, name in names.items():
        for count in counts:
            ours, theirs = (found[count, side][name] for side in SIDES)
            figures[f"{figure}_w{count}"] = ours / max(theirs, 1e-9)
        figures[figure] = fmean(figures[f"{figure}_w{count}"] for count in counts)
    return figures
