"""The live part of `bench dgfm`: workloads, with all sides in turn on the same requests.

Each side has its own stack; the first one alternates. The figure is the ratio of all tokens of a side to
those of the side without settlements. The ratio of each workload shows the variation.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from random import Random
from statistics import fmean

from bench.kit.context import Context
from bench.kit.models import TINY_CHAT, checkpoint, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.provenance import ROOT
from bench.live.dgfm.live import (
    KV_BLOCKS,
    LOADS,
    WORKERS,
    LiveRun,
    Load,
    bodies,
    draw_figure_10,
    measure,
    settings,
)
from shared.errors import ConfigError

SIDES = {"off": (False, False), "cycles": (True, False), "recalls": (False, True), "on": (True, True)}
"""(settles, recalls) by side."""
_SIDES_OF = {"circle": ("off", "cycles", "on"), "light": ("off", "recalls", "on"), "mixed": ("off", "on")}
_DURATION_S, _QUICK_S = 14.0, 7.0
_WORKLOADS, _QUICK_WORKLOADS = 3, 1
_WARM_SHARE = 0.2
"""Share at the start of a run that does not count."""
_MOST_REQUESTS = 20_000

Runs = Mapping[str, Sequence[LiveRun]]
"""One run per workload, by side."""


def run_live(context: Context) -> Outcome:
    """Run the live part. Raises ConfigError for less than 5 s per side, or no workload."""
    flags = context.arguments
    duration_s = flags.duration_s or (_QUICK_S if context.quick else _DURATION_S)
    seeds = flags.seeds or (_QUICK_WORKLOADS if context.quick else _WORKLOADS)
    if duration_s < 5 or seeds < 1:
        raise ConfigError("dgfm --live needs 5 s a side and one workload at least", param="duration_s")
    load = LOADS[flags.load]
    results = _measure(context, load, seeds, duration_s)
    draw_figure_10(context.picture(f"figure10-live-{flags.load}"), results, duration_s, "live")
    first_s = _WARM_SHARE * duration_s
    figures = figures_of(results, first_s)
    return Outcome(
        figures=figures,
        failures=sum(len(one.errors) for runs in results.values() for one in runs),
        tables=[table_of(results, first_s)],
        notes=_notes(load, seeds, duration_s),
        headline=list(figures),
    )


def _measure(context: Context, load: Load, seeds: int, duration_s: float) -> dict[str, list[LiveRun]]:
    flags = context.arguments
    model = checkpoint(flags.model or str(TINY_CHAT), ROOT / "runs" / "bench" / "checkpoints")
    sides = _SIDES_OF[flags.load]
    results: dict[str, list[LiveRun]] = {side: [] for side in sides}
    with context.progress("live sides", seeds * len(sides)) as bar:
        for seed in range(context.seed, context.seed + seeds):
            turn = seed % len(sides)
            for side in sides[turn:] + sides[:turn]:
                settles, recalls = SIDES[side]
                requests = bodies(Random(f"dgfm/{seed}"), vocabulary(model), load.documents)
                folder = context.run_dir.resolve() / f"stack-{side}-{seed}"
                more = settings(settles=settles, recalls=recalls)
                one = measure(model, folder, islice(requests, _MOST_REQUESTS), duration_s, load, more)
                results[side].append(one)
                row = {"side": side, "seed": seed, "tok_s": one.tok_s(), "remote": one.remote_share()}
                context.record(row | {"errors": one.errors, **one.counts}, "live.jsonl")
                bar.advance(now=f"{side}, workload {seed}")
    return results


def figures_of(results: Runs, first_s: float) -> dict[str, float]:
    """Return the figures. `throughput_vs_off` is the last side's; those of other sides have their name."""
    rates = {side: [one.tok_s(first_s) for one in runs] for side, runs in results.items()}
    last = list(results)[-1]
    figures: dict[str, float] = {}
    for side in [side for side in reversed(list(results)) if side != "off"]:
        label = "" if side == last else f"_{side}"
        ratios = [on / off for on, off in zip(rates[side], rates["off"], strict=True)]
        figures[f"throughput_vs_off{label}"] = sum(rates[side]) / sum(rates["off"])
        figures[f"throughput_vs_off{label}_worst"] = min(ratios)
        figures[f"throughput_vs_off{label}_best"] = max(ratios)
    for side, runs in results.items():
        figures[f"tok_s_{side}"] = fmean(rates[side])
        figures[f"remote_share_{side}"] = fmean(one.remote_share(first_s) for one in runs)
        figures[f"remote_steps_{side}"] = fmean(one.remote_steps(first_s) for one in runs)
    every = [one for runs in results.values() for one in runs]
    for kind, is_remote in (("local", False), ("remote", True)):
        times_s = [one.step_s(first_s, is_remote=is_remote) for one in every]
        figures[f"step_ms_{kind}"] = 1e3 * fmean([each for each in times_s if each] or [0.0])
    for side, runs in results.items():
        if side != "off":
            for name in runs[0].counts:
                figures[f"{name}_{side}"] = fmean(one.counts[name] for one in runs)
    return figures


def table_of(results: Runs, first_s: float) -> Table:
    rows = [
        (side, at, one.tok_s(first_s), one.remote_share(first_s), one.finished, *one.counts.values())
        for side, runs in results.items()
        for at, one in enumerate(runs)
    ]
    counted = ("settlements", "aborted", "settled", "recalled")
    columns = ("side", "workload", "tok/s", "remote share", "finished", *counted)
    return Table("with and without DGFM, live", columns, rows)


def _notes(load: Load, seeds: int, duration_s: float) -> list[str]:
    asked = "chats" if not load.documents else f"chats, {load.documents:.0%} documents of 500 to 1,400 tokens"
    notes = [
        f"{WORKERS} workers of {KV_BLOCKS} KV blocks, {load.clients} clients without a pause, {asked}; "
        f"{seeds} workloads, {duration_s:.0f} s a side, of which the first {_WARM_SHARE:.0%} do not count",
        "cycles: cycles are settled; recalls: free memory takes blocks back; on: both; off: neither",
        "throughput_vs_off: all tokens of a side by all of off; worst and best: of one workload",
        "settlements and blocks: per run",
    ]
    if load.wanted_blocks:
        wanted = f"at the start each worker borrows {load.wanted_blocks} blocks for {load.wanted_s:.0f} s"
        notes.append(f"{wanted}: debts run in circles")
    return notes
