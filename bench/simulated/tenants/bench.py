"""`python -m bench tenants`: effect of a flooding tenant on two others.

Simulated: the others' p99 with the flood over that without it, with tenants told apart, not told apart, and
first come, first served. Also total throughput, and the others guaranteed with a sheddable flood. `--live`
repeats it on a real stack and adds the share of the others' prompts found in the prefix cache.
"""

from argparse import ArgumentParser
from statistics import fmean

from bench.kit.context import Context
from bench.kit.datasets import data_folder
from bench.kit.outcome import Outcome, Table, joined
from bench.simulated.tenants import live
from bench.simulated.tenants.simulation import FLOOD_RATE, SIDES, Mix, measure_capacity, serve
from sim.workloads import find_source

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
    parser.add_argument("--live", action="store_true", help="a real stack as well")
    parser.add_argument("--trace", default="sharegpt", help="what the others send [%(default)s]")
    parser.add_argument("--documents", default="arxiv", help="what the flood is of [%(default)s]")
    parser.add_argument("--workers", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--share", type=float, default=0.2, help="of capacity, for each other [%(default)s]")
    parser.add_argument("--duration", type=float, help="of the others' arrivals, in s [300, quick: 60]")
    parser.add_argument("--seeds", type=int, help="runs of each side [3, quick: 1]")
    parser.add_argument("--rate", type=float, default=0.5, help="live: of each other, per s [%(default)s]")
    parser.add_argument("--live-duration", type=float, default=60.0, help="in s, twice [%(default)s]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError for an unknown trace, InternalError if a stack does not start."""
    parts = [_simulated(context)]
    if context.arguments.live:
        parts.append(_live(context))
    return joined(parts)


def _simulated(context: Context) -> Outcome:
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


def _live(context: Context) -> Outcome:
    flags = context.arguments
    duration_s = 15.0 if context.quick else flags.live_duration
    found = live.measure(context.run_dir / "stack", live.Load(flags.rate, duration_s, context.seed))
    figures = live.figures(found)
    for row in found.status["tenants"]:
        context.record(row, "tenants.jsonl")
    failures = sum(not answer.ok for answer in (*found.alone, *found.flooded))
    rows = [(name, value) for name, value in figures.items()]
    made = {
        "live_flood_p99_ratio": figures["flooded_latency_p99_s"] / figures["alone_latency_p99_s"],
        "live_flood_ttft_p99_ratio": figures["flooded_ttft_p99_s"] / figures["alone_ttft_p99_s"],
        "live_cached_alone": figures["alone_cached"],
        "live_cached_flooded": figures["flooded_cached"],
    }
    title = f"{live.WORKERS} live workers, engine `simulated`, {flags.rate:g} requests/s of each other"
    return Outcome(made, failures, [Table(title, ("figure", "value"), rows)])
