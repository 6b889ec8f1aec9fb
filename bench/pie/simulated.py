"""The simulated part of `python -m bench pie`: Pie at its paper's settings, and its figure 4.

The live swap and expansion controllers run in simulated time (`sim/pie`) under the `vllm` policy, on
GH200's measured bandwidth and H100 kernel costs. Baseline: the same policy with recomputation on the same
device bytes.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace

from bench.context import Context, Progressing
from bench.outcome import Outcome, Table
from bench.pie.cells import ENOUGH_GB, MODELS, Answer, Question, answer, fixed_lengths, memory_saving
from bench.pie.figure4 import figure4
from bench.simulated.folder import data_folder
from services.worker.pie.sizes import expansion
from shared.errors import ConfigError
from sim.sweep import sweep
from sim.workloads import find_source

SIZES_GB = (3.0, 5.0, 7.0, 9.0, 12.0)
LARGER_GB = (15.0, 20.0, 30.0)
"""For `vllm` alone: what it would need."""
PAPER = {
    ("opt-30b", "sharegpt"): "1.86 (up to 1.9)",
    ("opt-30b", "alpaca"): "1.58 (up to 1.5)",
    ("opt-13b", "sharegpt"): "1.54",
    ("llama-13b", "alpaca"): "1.27",
}
"""Best gain stated in papers/004 §5.2 (over expansion 1) and §5.3 (over vLLM)."""
Grid = dict[tuple[str, str, float], dict[str, Answer]]
"""(model, trace, GB) → side → answer."""


def add_arguments(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("of the simulated part")
    group.add_argument("--models", nargs="+", metavar="NAME", help=f"[{' '.join(MODELS)}, quick: opt-13b]")
    group.add_argument("--traces", nargs="+", metavar="NAME", help="[sharegpt alpaca, quick: sharegpt]")
    group.add_argument(
        "--gb", nargs="+", type=float, metavar="N", help="of KV on the device [3 5 7 9 12, quick: 3 7]"
    )
    group.add_argument("--requests", type=int, help="of a run [1000; alpaca 4 times; quick: 200]")
    group.add_argument("--processes", type=int, help="[one per core]")


def run(context: Context) -> Outcome:
    """Raises ConfigError for models that there are not."""
    flags = context.arguments
    models = flags.models or (["opt-13b"] if context.quick else list(MODELS))
    if unknown := set(models) - set(MODELS):
        raise ConfigError(
            f"no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}", param="models"
        )
    traces = flags.traces or (["sharegpt"] if context.quick else ["sharegpt", "alpaca"])
    sizes = tuple(flags.gb or ((3.0, 7.0) if context.quick else SIZES_GB))
    requests = flags.requests or (200 if context.quick else 1000)
    cells = [(model, trace) for model in models for trace in traces]
    with context.progress("simulating", _runs(cells, sizes)) as bar:
        grids = [
            _cell(context, bar, model, trace, sizes, requests, flags.processes) for model, trace in cells
        ]
    found = {key: sides for grid in grids for key, sides in grid.items()}
    _record(context, found)
    figures = figure4() | _figures(found, cells, sizes)
    return Outcome(figures, 0, _tables(found, cells, sizes), _notes(requests), simulated=True)


def _runs(cells: Sequence[tuple[str, str]], sizes: Sequence[float]) -> int:
    runs = sum(
        1 + len(LARGER_GB) + len(sizes) * (2 + len(fixed_lengths(MODELS[model]))) for model, _ in cells
    )
    return runs


def _cell(
    context: Context,
    bar: Progressing,
    model: str,
    trace: str,
    sizes: Sequence[float],
    requests: int,
    processes: int | None,
) -> Grid:
    """One model on one data set: first the rate, then everything at that rate."""
    count = requests * (4 if trace == "alpaca" else 1)
    source = find_source(trace, data_folder())
    peer = Question(model, source, ENOUGH_GB, 1e6, 0, count, context.seed)
    rate = answer(peer).requests_per_s
    bar.advance(now=f"{model} {trace}")
    at_rate = replace(peer, rate_per_s=rate)
    sides: list[int | None] = [0, *fixed_lengths(MODELS[model]), None]
    questions = [replace(at_rate, device_gb=gb, fifo_layers=side) for gb in sizes for side in sides]
    questions += [replace(at_rate, device_gb=gb) for gb in LARGER_GB]
    answers = sweep(answer, questions, processes=processes, on_result=lambda *_: bar.advance())
    grid: Grid = {}
    for question, found in zip(questions, answers, strict=True):
        sides_of = grid.setdefault((model, trace, question.device_gb), {})
        sides_of[_label(question.fifo_layers)] = found
    return grid


def _label(fifo_layers: int | None) -> str:
    return "pie" if fifo_layers is None else "vllm" if fifo_layers == 0 else f"q={fifo_layers}"


def _best_fixed(sides: dict[str, Answer]) -> tuple[str, Answer]:
    fixed = {label: found for label, found in sides.items() if label != "pie"}
    return max(fixed.items(), key=lambda item: item[1].tokens_per_s)


def _figures(found: Grid, cells: Sequence[tuple[str, str]], sizes: Sequence[float]) -> dict[str, float]:
    figures: dict[str, float] = {}
    ratios, stalls, savings, gains = [], [], [], []
    for model, trace in cells:
        rows = [found[model, trace, gb] for gb in sizes]
        name = f"{model}_{trace}".replace("-", "_")
        gain = max(row["pie"].tokens_per_s / row["vllm"].tokens_per_s for row in rows)
        least = min(row["pie"].tokens_per_s / row["vllm"].tokens_per_s for row in rows)
        saving = memory_saving(_curve(found, model, trace, "vllm"), _curve(found, model, trace, "pie"))
        figures |= {f"sim_gain_{name}": gain, f"sim_least_{name}": least, f"sim_memory_saving_{name}": saving}
        ratios += [row["pie"].tokens_per_s / _best_fixed(row)[1].tokens_per_s for row in rows]
        stalls += [row["pie"].stall_share for row in rows]
        savings.append(saving)
        gains.append(gain)
    return figures | {
        "sim_throughput_vs_vllm": max(gains),
        "sim_memory_saving": max(savings),
        "sim_vs_best_fixed": sum(ratios) / len(ratios),
        "sim_vs_best_fixed_worst": min(ratios),
        "sim_stall_share": max(stalls),
    }


def _curve(found: Grid, model: str, trace: str, side: str) -> dict[float, float]:
    return {
        gb: sides[side].tokens_per_s
        for (*cell, gb), sides in found.items()
        if cell == [model, trace] and side in sides
    }


def _tables(found: Grid, cells: Sequence[tuple[str, str]], sizes: Sequence[float]) -> list[Table]:
    tables = []
    columns = (
        "GB",
        "vllm tok/s",
        "pie tok/s",
        "/vllm",
        "best fixed",
        "expansion",
        "pie/best",
        "stall",
        "s/token /vllm",
    )
    for model, trace in cells:
        rows = []
        for gb in sizes:
            sides = found[model, trace, gb]
            peer, pie, (label, best) = sides["vllm"], sides["pie"], _best_fixed(sides)
            rows.append(
                (
                    gb,
                    f"{peer.tokens_per_s:.0f}",
                    f"{pie.tokens_per_s:.0f}",
                    f"{pie.tokens_per_s / peer.tokens_per_s:.2f}",
                    label,
                    f"{expansion(MODELS[model].layers, best.fifo_layers):.2f}",
                    f"{pie.tokens_per_s / best.tokens_per_s:.3f}",
                    f"{pie.stall_share:.4f}",
                    f"{pie.normalized_s / peer.normalized_s:.2f}",
                )
            )
        stated = PAPER.get((model, trace), "not stated")
        tables.append(Table(f"{model}, {trace} (simulated); paper's best gain: {stated}", columns, rows))
    return tables


def _record(context: Context, found: Grid) -> None:
    for (model, trace, gb), sides in found.items():
        for side, one in sides.items():
            row = {
                "model": model,
                "trace": trace,
                "device_gb": gb,
                "side": side,
                "tokens_per_s": one.tokens_per_s,
            }
            row |= {
                "stall_share": one.stall_share,
                "evictions": one.evictions,
                "normalized_s": one.normalized_s,
            }
            context.record(row | {"most_fifo_layers": one.fifo_layers}, "cells.jsonl")


def _notes(requests: int) -> list[str]:
    return [
        f"{requests} requests a run (alpaca: four times), warm-up and drain included; pie begins at 1",
        "vllm is our policy of that name with recomputation; H100 kernel costs, OPT-30B's scaled from 13B's",
        "paper: up to 1.9 x vLLM's throughput, 1.67 x less device memory, < 2 % below the best expansion",
    ]
