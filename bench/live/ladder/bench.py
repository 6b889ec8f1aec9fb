"""`python -m bench ladder`: each rung of the relief ladder switched off in turn, live, by workload.

Each workload has a stack of two workers per variant; they take turns while the others are stopped. A rung's
value is the loss without it within a turn: tokens per second, time to the end, unserved requests. Of equal
stacks, the one started first is slower (by 14 % in one measurement, cause unknown). So half of the turns use
the other start order.
"""

import asyncio
import statistics
import time
from argparse import ArgumentParser
from contextlib import ExitStack
from typing import Any

from bench.kit.context import Context
from bench.kit.load import complete_all, full_answer
from bench.kit.models import checkpoint, vocabulary
from bench.kit.outcome import Outcome, Table
from bench.kit.provenance import ROOT
from bench.kit.stacks import PLAIN, Stack, start_stack
from bench.kit.stats import interval, median_of_ratios
from bench.kit.turns import order_of
from bench.live.ladder.workloads import BLOCK_TOKENS, VARIANTS, WORKLOADS, Variant, Workload
from shared.errors import InternalError

WORKERS = 2
MAX_SEQUENCES = 32
_DEADLINE_S = 60.0
_AWAKE_S = 1.5
"""Pause after a resume, for heartbeats, lost leases and links."""
_CHECKPOINTS = ROOT / "runs" / "bench" / "checkpoints"
Row = dict[str, float]


def add_arguments(parser: ArgumentParser) -> None:
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--turns", type=int, help="of all variants [6; --quick 1]")
    variants = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="+", choices=variants, default=variants, help="only these")


def run(context: Context) -> Outcome:
    """Run the bench. Raises InternalError if a stack does not start."""
    chosen = [workload for workload in WORKLOADS if workload.name in context.arguments.workloads]
    turns = context.arguments.turns or (1 if context.quick else 6)
    figures: Row = {}
    tables: list[Table] = []
    with context.progress("turns", len(chosen) * turns) as progress:
        for workload in chosen:
            variants = _variants(context, workload)
            progress.advance(0, now=f"{workload.name}: {len(variants)} stacks")
            rows: dict[str, list[Row]] = {variant.name: [] for variant in variants}
            for half, started in enumerate((variants, variants[::-1])):
                with ExitStack() as ending:
                    own = list(range(turns))[half::2]
                    stacks = [_start(context, workload, one, half, ending) for one in started if own]
                    for turn in own:
                        for at in order_of(turn // 2, len(stacks)):
                            name, row = started[at].name, _measure(context, workload, stacks[at], turn)
                            rows[name].append(row)
                            told = {"workload": workload.name, "variant": name, "turn": turn, **row}
                            context.record(told, file="turns.jsonl")
                        progress.advance(1, now=workload.name)
            figures |= _figures(workload, variants, rows)
            tables.append(_table(workload, variants, rows, figures))
    notes = [f"{workload.name}: {workload.about}, {workload.kv_blocks} blocks each" for workload in chosen]
    notes += [
        "speed_of: tokens a second against `all` in the same turn, the median over turns (expand_only: "
        "against recompute_only); _low and _high: 95 % interval",
        "unserved: refused because no worker can hold them, or failed",
    ]
    headline = [name for name in figures if name.startswith(("speed_of", "unserved"))]
    return Outcome(figures, 0, tables, notes, headline=headline)


def _variants(context: Context, workload: Workload) -> list[Variant]:
    wanted = set(workload.variants) & set(context.arguments.variants)
    return [variant for variant in VARIANTS if variant.name in wanted]


def _start(context: Context, workload: Workload, variant: Variant, half: int, ending: ExitStack) -> Stack:
    """Start a stack for one half of the turns (0 or 1), warm it up and stop it."""
    settings: dict[str, object] = {
        **PLAIN,
        "placement.policy": "worst_fit",
        "scheduler.max_batch_sequences": MAX_SEQUENCES,
        "worker.cores": [],
        "worker.block_tokens": BLOCK_TOKENS,
        "worker.kv_blocks": workload.kv_blocks,
        **variant.settings,
        **workload.settings,
    }
    folder = context.run_dir.resolve() / f"{workload.name}-{variant.name}-{half}"
    model = checkpoint(workload.model, _CHECKPOINTS)
    stack = ending.enter_context(start_stack(folder, settings, model=model, workers=WORKERS))
    answers = asyncio.run(complete_all(stack.target, _bodies(context, workload, "warm"), _DEADLINE_S))
    if not any(answer.ok for answer in answers):
        raise InternalError("a stack does not serve")
    stack.tree.pause()
    return stack


def _measure(context: Context, workload: Workload, stack: Stack, turn: int) -> Row:
    """Measure one turn of one stack."""
    bodies = _bodies(context, workload, str(turn))
    stack.tree.resume()
    time.sleep(_AWAKE_S)
    began_s = time.perf_counter()
    answers = asyncio.run(complete_all(stack.target, bodies, _DEADLINE_S))
    took_s = time.perf_counter() - began_s
    told = stack.details("queued")
    stack.tree.pause()
    done = [answer for answer in answers if answer.ok]
    ends_s = [answer.ended_s - answer.sent_s for answer in done]
    counted = ("relief_", "preempted_", "moved")
    return {
        "tokens_per_s": sum(answer.completion_tokens for answer in done) / took_s,
        "end_s_mean": statistics.fmean(ends_s) if ends_s else 0.0,
        "unserved": float(len(answers) - len(done)),
        **{name: float(count) for name, count in told.items() if name.startswith(counted)},
    }


def _bodies(context: Context, workload: Workload, turn: str) -> list[dict[str, Any]]:
    tokens = vocabulary(checkpoint(workload.model, _CHECKPOINTS))
    return [
        full_answer(prompt, limit)
        for prompt, limit in workload.draw(context.random(f"{workload.name}/{turn}"), tokens)
    ]


def _figures(workload: Workload, variants: list[Variant], rows: dict[str, list[Row]]) -> Row:
    figures: Row = {}
    for variant in variants:
        own = rows[variant.name]
        name = f"{workload.name}_{variant.name}"
        for key in ("tokens_per_s", "end_s_mean"):
            figures[f"{key}_{name}"] = statistics.median(row[key] for row in own)
        figures[f"unserved_{name}"] = sum(row["unserved"] for row in own)
        base = rows.get(variant.against)
        if base is None or variant.against == variant.name:
            continue
        ours, theirs = ([row["tokens_per_s"] for row in side] for side in (own, base))
        low, high = interval(ours, theirs, median_of_ratios)
        figures[f"speed_of_{name}"] = median_of_ratios(ours, theirs)
        figures[f"speed_of_{name}_low"], figures[f"speed_of_{name}_high"] = low, high
        ends = [[row["end_s_mean"] for row in side] for side in (own, base)]
        if min(*ends[0], *ends[1]) > 0:
            figures[f"end_of_{name}"] = median_of_ratios(*ends)
    return figures


def _table(workload: Workload, variants: list[Variant], rows: dict[str, list[Row]], figures: Row) -> Table:
    columns = ("variant", "tok/s", "speed", "95 %", "mean end", "unserved", "moved", "preempted", "decisions")
    lines = []
    for variant in variants:
        name, last = f"{workload.name}_{variant.name}", rows[variant.name][-1]
        speed = figures.get(f"speed_of_{name}")
        low, high = figures.get(f"speed_of_{name}_low", 0.0), figures.get(f"speed_of_{name}_high", 0.0)
        lines.append(
            (
                variant.name,
                f"{figures[f'tokens_per_s_{name}']:.0f}",
                "" if speed is None else f"{speed:.2f}",
                "" if speed is None else f"{low:.2f}-{high:.2f}",
                f"{figures[f'end_s_mean_{name}']:.2f} s",
                int(figures[f"unserved_{name}"]),
                int(last.get("moved", 0)),
                _counts(last, "preempted_"),
                _counts(last, "relief_"),
            )
        )
    return Table(f"{workload.name}: {workload.about}", columns, lines)


def _counts(row: Row, prefix: str) -> str:
    """Return the counters with a prefix, since the stack's start."""
    found = sorted(name for name in row if name.startswith(prefix))
    return ", ".join(f"{name.removeprefix(prefix)} {row[name]:.0f}" for name in found)
