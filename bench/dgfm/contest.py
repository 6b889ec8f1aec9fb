"""The live part of `bench dgfm`: each side a stack of its own, one after the other, on the same requests."""

from collections.abc import Mapping
from itertools import islice

from bench.context import Context
from bench.dgfm.live import CLIENTS, KV_BLOCKS, WORKERS, LiveRun, bodies, measure, settings
from bench.dgfm.pictures import draw_figure_10
from bench.engine.checkpoint import TINY_CHAT, checkpoint, vocabulary
from bench.outcome import Outcome, Table
from bench.provenance import ROOT
from shared.errors import ConfigError

_DURATION_S, _QUICK_S = 50.0, 10.0
_WARM_SHARE = 0.2
"""Of a run, at its start, that does not count: nobody owes anybody yet."""
_MOST_REQUESTS = 20_000


def run_live(context: Context, sides: Mapping[str, tuple[bool, bool]]) -> Outcome:
    """`sides`: whether it settles, whether it recalls. Raises ConfigError for a duration below 5 s."""
    flags = context.arguments
    duration_s = flags.duration_s or (_QUICK_S if context.quick else _DURATION_S)
    if duration_s < 5:
        raise ConfigError("dgfm --live needs 5 s a side at least", param="duration_s")
    model = checkpoint(flags.model or str(TINY_CHAT), ROOT / "runs" / "bench" / "checkpoints")
    results: dict[str, LiveRun] = {}
    with context.progress("live sides", len(sides)) as bar:
        for side, (settles, recalls) in sides.items():
            requests = islice(bodies(context.random("requests"), vocabulary(model)), _MOST_REQUESTS)
            folder = context.run_dir.resolve() / f"stack-{side}"
            more = settings(settles=settles, recalls=recalls)
            results[side] = one = measure(model, folder, requests, duration_s, more)
            row = {"side": side, "tok_s": one.tok_s(), "remote": one.remote_share(), "errors": one.errors}
            context.record(row, "live.jsonl")
            bar.advance(now=side)
    draw_figure_10(context.picture("figure10-live"), {k: [v] for k, v in results.items()}, duration_s, "live")
    figures = _figures(results, _WARM_SHARE * duration_s)
    return Outcome(
        figures=figures,
        failures=sum(len(one.errors) for one in results.values()),
        tables=[_table(results, _WARM_SHARE * duration_s)],
        notes=[
            f"{WORKERS} workers of {KV_BLOCKS} KV blocks, {CLIENTS} clients without a pause, {model.name};"
            f" {duration_s:.0f} s a side, of which the first {_WARM_SHARE:.0%} do not count",
            "6 % of requests are documents of 500 to 1,400 tokens; the rest are chats",
            "on: cycles are settled and free memory takes blocks back; cycles: the former alone",
        ],
        headline=list(figures),
    )


def _figures(results: Mapping[str, LiveRun], first_s: float) -> dict[str, float]:
    off = results["off"].tok_s(first_s)
    figures = {
        "throughput_vs_off": results["on"].tok_s(first_s) / off,
        "throughput_vs_off_cycles": results["cycles"].tok_s(first_s) / off,
    }
    for side, one in results.items():
        figures[f"remote_share_{side}"] = one.remote_share(first_s)
    for side, one in results.items():
        figures[f"tok_s_{side}"] = one.tok_s(first_s)
    for name, count in results["on"].counts.items():
        figures[f"{name}_on"] = count
    figures["settlements_cycles"] = results["cycles"].counts["settlements"]
    return figures


def _table(results: Mapping[str, LiveRun], first_s: float) -> Table:
    rows = [
        (side, one.tok_s(first_s), one.remote_share(first_s), one.finished, *one.counts.values())
        for side, one in results.items()
    ]
    columns = ("side", "tok/s", "remote share", "finished", "settlements", "aborted", "settled", "recalled")
    return Table("with and without DGFM, live", columns, rows)
