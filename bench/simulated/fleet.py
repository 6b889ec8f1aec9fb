"""`python -m bench fleet`: several workers behind one queue, simulated.

`--queue` compares the fleet's queue by work with first come, first served and placement only into free
memory. Policy, predictions and requests are the same, at 1.2 times the rate per worker that one worker under
`vllm` sustains. `--live` adds a real stack, see `bench/simulated/queue_live.py`. `--routes`: see
`bench/simulated/routes.py`. `--roles`: see `bench/simulated/roles.py`.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from bench.kit.context import Context
from bench.kit.datasets import data_folder
from bench.kit.outcome import Outcome, Table, joined
from bench.simulated import queue_live, roles, routes
from bench.simulated.ecoserve.measures import (
    KneeQuestion,
    RateQuestion,
    Reference,
    answer_knee,
    answer_rate,
    measure_reference,
)
from bench.simulated.queue_live import PAST_KNEE, SIDES
from sim.case import Case
from sim.predictors import PREDICTORS
from sim.sweep import sweep
from sim.workloads import Source, find_source

_SHOWN = {
    "SLO": "slo",
    "s/token": "normalized_s",
    "mean wait s": "queue_s",
    "p99": "wait_s_p99",
    "p99.9": "wait_s_p999",
    "tokens/s": "tokens_per_s",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One side with a number of workers."""

    side: str
    workers: int
    source: Source
    predictor: str


def add_arguments(parser: ArgumentParser) -> None:
    """Add the bench's flags."""
    parser.add_argument("--queue", action="store_true", help="the queue by work against first come (default)")
    parser.add_argument("--routes", action="store_true", help="which worker, where prompts begin alike")
    parser.add_argument("--roles", action="store_true", help="prompts and answers on workers of their own")
    parser.add_argument(
        "--live", nargs="?", const="too", choices=("too", "only"), help="a real stack as well"
    )
    parser.add_argument(
        "--live-speed", type=float, default=1.0, help="queue, live: of the model's clock [%(default)s]"
    )
    parser.add_argument("--kills", type=int, help="roles, live: of each kind [20, quick: 2]")
    parser.add_argument("--live-rate", type=float, default=12.0, help="requests per second [%(default)s]")
    parser.add_argument("--requests", type=int, help="routes: of the trace [3000, quick: 400]")
    parser.add_argument("--load", type=float, default=0.8, help="routes: of capacity [%(default)s]")
    parser.add_argument(
        "--cache-blocks", type=int, default=2000, help="routes: of 512 tokens, at each worker [%(default)s]"
    )
    parser.add_argument("--trace", default="sharegpt", help="a workload by name [%(default)s]")
    parser.add_argument("--workers", type=int, nargs="+", help="[4 8 16, quick: 4; queue, live: 2 4]")
    parser.add_argument("--predictor", default="histogram", choices=sorted(PREDICTORS), help="[%(default)s]")
    parser.add_argument("--duration", type=float, help="of arrivals, in s [300, quick: 60]")
    parser.add_argument("--seeds", type=int, help="runs of each [3, quick: 1]")
    parser.add_argument("--processes", type=int, help="[one per core]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for an unknown trace."""
    flags = context.arguments
    if flags.routes:
        return routes.run(context)
    if flags.roles:
        return roles.run(context)
    parts = [] if flags.live == "only" else [_simulated(context)]
    return joined([*parts, *([_live(context)] if flags.live else [])])


def _live(context: Context) -> Outcome:
    flags = context.arguments
    counts = flags.workers if flags.workers and flags.live == "only" else [2] if context.quick else [2, 4]
    return queue_live.run(context, counts, flags.duration or (20.0 if context.quick else 120.0))


def _simulated(context: Context) -> Outcome:
    flags = context.arguments
    duration_s = flags.duration or (60.0 if context.quick else 300.0)
    seeds = tuple(range(context.seed, context.seed + (flags.seeds or (1 if context.quick else 3))))
    counts = flags.workers or ([4] if context.quick else [4, 8, 16])
    source = find_source(flags.trace, data_folder())
    context.say("what one worker sustains under vllm")
    reference, knee = _peer(source, 500 if context.quick else 1000)
    cells = [Cell(side, count, source, flags.predictor) for count in counts for side in SIDES]
    questions = [_question(cell, knee, duration_s, reference, seeds) for cell in cells]
    with context.progress("fleets", len(cells)) as bar:
        answers = sweep(
            answer_rate,
            questions,
            processes=flags.processes,
            on_result=lambda done, _: bar.advance(now=done.label),
        )
    found = dict(zip(cells, answers, strict=True))
    for cell, answer in found.items():
        context.record({"side": cell.side, "workers": cell.workers, **answer}, "cells.jsonl")
    rows = [(c.workers, c.side, *(f"{found[c][name]:.3g}" for name in _SHOWN.values())) for c in cells]
    title = f"{source.name}, {PAST_KNEE} x {knee:.2f} requests/s for each worker (simulated)"
    notes = [f"policy kvasir, predictor {flags.predictor}, seeds {list(seeds)}, {duration_s:g} s of arrivals"]
    table = Table(title, ("workers", "queue", *_SHOWN), rows)
    return Outcome(_figures(found, counts), 0, [table], notes, simulated=True)


def _peer(source: Source, requests: int) -> tuple[Reference, float]:
    """Return the reference, and the rate that one worker sustains under `vllm`."""
    case = Case(source, "vllm", "none", requests=requests)
    reference = measure_reference(case)
    question = KneeQuestion("vllm", case, reference.limit_s, reference.capacity_per_s, (0,))
    return reference, answer_knee(question)


def _question(
    cell: Cell, knee: float, duration_s: float, reference: Reference, seeds: tuple[int, ...]
) -> RateQuestion:
    order, places = SIDES[cell.side]
    rate = PAST_KNEE * knee * cell.workers
    case = Case(cell.source, "kvasir", cell.predictor, workers=cell.workers, queue=order, places=places)
    case = replace(case, placement="worst_fit", requests=round(rate * duration_s))
    return RateQuestion(f"{cell.workers} {cell.side}", case, rate, reference.level, seeds)


def _figures(found: dict[Cell, dict[str, float]], counts: Sequence[int]) -> dict[str, float]:
    """Return ratios of the queue by work to first come, per number of workers and as their mean."""
    figures: dict[str, float] = {}
    answers = {(cell.side, cell.workers): answer for cell, answer in found.items()}
    names = {"queue_slo_ratio": "slo", "queue_wait_ratio": "queue_s", "queue_wait_p999_ratio": "wait_s_p999"}
    for figure, name in names.items():
        ratios = []
        for count in counts:
            ours, theirs = (answers[side, count][name] for side in SIDES)
            ratios.append(ours / max(theirs, 1e-9))
            figures[f"{figure}_w{count}"] = ratios[-1]
        figures[figure] = fmean(ratios)
    return figures
