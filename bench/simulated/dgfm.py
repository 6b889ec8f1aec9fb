"""`python -m bench dgfm`: four workers under a long mixed workload, with and without DGFM.

The paper's Figure 10, simulated with the live cores of lending, ledger and settlement (`sim/lending/`). With
`--live`: real processes.
"""

import random
import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.live.dgfm import LOADS, draw_figure_10, run_live
from services.ledger.core.dgfm.coordinator import settlements
from shared.errors import ConfigError
from sim.lending.run import LendingSimulation, Result, Scenario

THRESHOLD = 4


def random_debts(instances: int, creditors: int, seed: int) -> dict[tuple[str, str], int]:
    """Return random debts: each instance owes 1 to 64 blocks to some others. Lending by locality entangles
    less."""
    rng = random.Random(f"{seed}/{instances}/{creditors}")
    pairs = [(a, rng.randrange(instances)) for a in range(instances) for _ in range(creditors)]
    return {(f"w{a}", f"w{b}"): rng.randint(1, 64) for a, b in pairs if a != b}


def settle_s(debts: dict[tuple[str, str], int], repeats: int) -> tuple[float, int]:
    """Return the least CPU seconds of some runs, and the number of settlements."""
    best_s, count = float("inf"), 0
    for _ in range(repeats):
        began_s = time.process_time()
        count = len(settlements(debts, THRESHOLD))
        best_s = min(best_s, time.process_time() - began_s)
    return best_s, count


SIDES = {"off": (False, False), "cycles": (True, False), "on": (True, True)}
_QUICK_S, _QUICK_SEEDS = 240.0, 2
_REPEATS = 3


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--live", action="store_true", help="real workers instead of simulated ones")
    add(
        "--load",
        choices=sorted(LOADS),
        default="circle",
        help="live: debts in a circle and more requests than fit, the same with memory to spare, or whatever "
        "debts chats and documents lead to [%(default)s]",
    )
    add("--model", default="models/tiny_chat", help="live: folder, or random-50m [%(default)s]")
    add("--duration-s", type=float, help="of one run; simulated [1800; quick: 240], live [14; quick: 7]")
    add("--seeds", type=int, help="workloads to repeat it with [3; quick: 2, live 1]")
    add("--workers", type=int, default=4, help="[%(default)s]")
    add("--round-trip-us", type=float, default=40.0, help="of one layer's query [%(default)s]")
    add("--link-gb-s", type=float, default=20.0, help="for copies of KV [%(default)s]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for runs that are too short or too small."""
    flags = context.arguments
    if flags.live:
        return run_live(context)
    duration_s = flags.duration_s or (_QUICK_S if context.quick else 1800.0)
    seeds = flags.seeds or (_QUICK_SEEDS if context.quick else 3)
    if duration_s < 60 or seeds < 1 or flags.workers < 2:
        raise ConfigError("dgfm needs 60 simulated seconds, one seed and two workers at least")
    base = Scenario(workers=flags.workers, duration_s=duration_s)
    cost = replace(base.cost, round_trip_s=flags.round_trip_us / 1e6, link_bytes_per_s=flags.link_gb_s * 1e9)
    results = _simulate(context, replace(base, cost=cost), seeds)
    figures = _figures(results, duration_s)
    with context.progress("graphs", 3) as bar:
        for creditors in (2, 3, 6):
            took_s, count = settle_s(random_debts(10_000, creditors, context.seed), _REPEATS)
            figures[f"settle_10k_s_{creditors}_creditors"] = took_s
            figures[f"settlements_10k_{creditors}_creditors"] = count
            bar.advance()
    figures["settle_10k_s"] = max(figures[f"settle_10k_s_{creditors}_creditors"] for creditors in (2, 3, 6))
    draw_figure_10(context.picture("figure10"), results, duration_s)
    return Outcome(
        figures=figures,
        failures=0,
        tables=[_table(results)],
        notes=_notes(flags.workers, duration_s, seeds),
        simulated=True,
        headline=_headline(figures),
    )


def _simulate(context: Context, base: Scenario, seeds: int) -> dict[str, list[Result]]:
    """Return one result per seed for each side; all sides get the same requests."""
    results: dict[str, list[Result]] = {side: [] for side in SIDES}
    with context.progress("simulated runs", seeds * len(SIDES)) as bar:
        for seed in range(context.seed, context.seed + seeds):
            for side, (settles, repays) in SIDES.items():
                scenario = replace(base, seed=seed, settles=settles, repays=repays)
                result = LendingSimulation(scenario).run()
                results[side].append(result)
                row = {"side": side, "seed": seed, "tok_s": result.tok_s(), "remote": result.remote_share()}
                context.record(row, "sides.jsonl")
                bar.advance(now=f"{side}, seed {seed}")
    return results


def _figures(results: Mapping[str, Sequence[Result]], duration_s: float) -> dict[str, float]:
    off = results["off"]
    last_s = 0.75 * duration_s
    figures: dict[str, float] = {}
    for side, label in (("on", ""), ("cycles", "_cycles")):
        ratios = [one.tok_s() / other.tok_s() for one, other in zip(results[side], off, strict=True)]
        late = [
            one.tok_s(last_s) / other.tok_s(last_s) for one, other in zip(results[side], off, strict=True)
        ]
        figures[f"throughput_vs_off{label}"] = median(ratios)
        figures[f"throughput_vs_off{label}_worst"] = min(ratios)
        figures[f"throughput_vs_off{label}_last_quarter"] = median(late)
    for side, runs in results.items():
        figures[f"remote_share_{side}"] = fmean(one.remote_share() for one in runs)
        figures[f"tok_s_{side}"] = fmean(one.tok_s() for one in runs)
    figures["settlements_per_run"] = fmean(one.settlements for one in results["on"])
    figures["aborted_per_run"] = fmean(one.aborted for one in results["on"])
    figures["recalled_blocks_per_run"] = fmean(one.recalled_blocks for one in results["on"])
    return figures


def _table(results: Mapping[str, Sequence[Result]]) -> Table:
    rows = [
        (side, seed, one.tok_s(), one.remote_share(), one.finished, one.settlements, one.recalled_blocks)
        for side, runs in results.items()
        for seed, one in enumerate(runs)
    ]
    columns = ("side", "seed", "tok/s", "remote share", "finished", "settlements", "blocks recalled")
    return Table("with and without DGFM, simulated", columns, rows)


def _headline(figures: Mapping[str, float]) -> list[str]:
    return [name for name in figures if not name.startswith(("tok_s", "settlements_10k"))]


def _notes(workers: int, duration_s: float, seeds: int) -> list[str]:
    return [
        f"{workers} workers of LLaMA2-13B on two A100 each (150,016 tokens of KV, DistServe's fit halved), "
        f"{duration_s:.0f} s, {seeds} workloads, always more requests waiting than fit",
        "1 % of requests are documents of 8,000 to 200,000 tokens, log-uniform; the rest are chats",
        "on: cycles are settled and free memory takes blocks back; cycles: the former alone, as in the paper",
        "settle_10k_s is CPU time of finding all settlements among 10,000 instances, measured, the worst of "
        "random graphs with 2, 3 and 6 creditors each",
    ]
