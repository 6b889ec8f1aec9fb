"""The simulated part of `python -m bench pie`: Pie at its paper's settings, and its figure 4.

The live swap and expansion controllers run in simulated time (`sim/pie`) under the `vllm` policy, with
GH200's measured bandwidth and H100 kernel costs.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, pairwise

from bench.kit.context import Context, Progressing
from bench.kit.datasets import data_folder
from bench.kit.outcome import Outcome, Table
from services.worker.pie.core.sizes import expansion
from shared.errors import ConfigError
from sim.pie.cost import GH200, Form, Interconnect, PieModel
from sim.pie.run import PieCase, PieSimulation
from sim.pie.swap import SwapController
from sim.pie.timeline import Pace, Timeline, block_stalls, outside_share
from sim.requests import SimRequest
from sim.summary import summarize
from sim.sweep import sweep
from sim.workloads import Source, find_source, poisson_requests

_LAYERS, _PACE, _TOKENS = 9, Pace(compute=1, swap_in=2, swap_out=2), 20


def figure4() -> dict[str, float]:
    """Return figure 4: seven slots, and six, which stall. Also the blocks form with the same device bytes,
    and the layers copied in per token in both forms."""
    seven, six = (Timeline(SwapController(_LAYERS, fifo_layers), _PACE) for fifo_layers in (4, 5))
    seven.run(_TOKENS)
    six.run(_TOKENS)
    return {
        "fig4_expansion": round(expansion(_LAYERS, 4), 3),
        "fig4_stalls": float(sum(seven.stalls)),
        "fig4_fifo_layer_times": sum(seven.fifo_ticks) / len(seven.fifo_ticks),
        "fig4_stalls_six_slots": sum(six.stalls) / _TOKENS,
        "fig4_layers_in": float(seven.controller.swap_ins) / _TOKENS,
        "fig4_blocks_stalls": float(
            sum(block_stalls(_LAYERS, _PACE, outside_share(_LAYERS, 4), _TOKENS)[1:])
        ),
        "fig4_blocks_stalls_six_slots": float(
            sum(block_stalls(_LAYERS, _PACE, outside_share(_LAYERS, 5), _TOKENS)[1:]) / _TOKENS
        ),
        "fig4_blocks_layers_in": float(_LAYERS * outside_share(_LAYERS, 4)),
    }


MODELS = {
    model.name: model
    for model in (
        PieModel("opt-13b", "opt-13b-h100", 40, 2 * 5120 * 2),
        PieModel("opt-30b", "opt-30b-h100", 48, 2 * 7168 * 2),
        PieModel("llama-13b", "llama2-13b-h100", 40, 2 * 5120 * 2),
    )
}
GIGABYTE = 1e9
ENOUGH_GB = 12.0
LONGEST_PROMPT_TOKENS = 1024
FIXED_EXPANSIONS = (1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4)


@dataclass(frozen=True)
class Question:
    """One run, picklable. With `fifo_layers` None, the queue is adaptive."""

    model: str
    source: Source
    device_gb: float
    rate_per_s: float
    fifo_layers: int | None
    requests: int
    seed: int
    policy: str = "vllm"
    form: Form = "layers"
    link: Interconnect = GH200


@dataclass(frozen=True)
class Answer:
    tokens_per_s: float
    requests_per_s: float
    normalized_s: float
    evictions: float
    stall_share: float
    fifo_layers: int
    """Longest queue of the run."""


def requests_of(question: Question) -> list[SimRequest]:
    drawn = poisson_requests(question.source, count=2 * question.requests, rate_per_s=1.0, seed=question.seed)
    kept = [request for request in drawn if request.prompt_tokens <= LONGEST_PROMPT_TOKENS][
        : question.requests
    ]
    first_s, span_s = kept[0].arrival_s, kept[-1].arrival_s - kept[0].arrival_s
    scale = (len(kept) - 1) / span_s / question.rate_per_s
    return [replace(one, index=i, arrival_s=(one.arrival_s - first_s) * scale) for i, one in enumerate(kept)]


def answer(question: Question) -> Answer:
    """Run one question to the end."""
    case = PieCase(
        MODELS[question.model],
        question.device_gb * GIGABYTE,
        question.fifo_layers,
        form=question.form,
        policy=question.policy,
        link=question.link,
    )
    found = PieSimulation(case, requests_of(question)).finish()
    summary = summarize(found.outcome)
    return Answer(
        summary["tokens_per_s"],
        summary["requests_per_s"],
        summary["normalized_s"],
        summary["evictions"],
        found.stall_share,
        max(length for _, length in found.lengths),
    )


def fixed_lengths(model: PieModel) -> list[int]:
    """Return the queue lengths nearest to the expansions of the paper's figure 6."""
    lengths = [round(model.layers + 2 - model.layers / wanted) for wanted in FIXED_EXPANSIONS]
    return [length for length, _ in groupby(sorted(length for length in lengths if length >= 3))]


def memory_saving(vllm: dict[float, float], pie: dict[float, float]) -> float:
    """Return the highest ratio of `vllm`'s memory to Pie's at equal throughput; arguments map GB to tokens
    per second.

    Only where `vllm`'s curve, linear between points, reaches 99 % of Pie's throughput (1 % is noise).
    """
    sizes = sorted(vllm)
    best = 1.0
    for device_gb, reached in pie.items():
        wanted = 0.99 * reached
        for low, high in pairwise(sizes):
            if vllm[low] < wanted <= vllm[high]:
                needed = low + (high - low) * (wanted - vllm[low]) / (vllm[high] - vllm[low])
                best = max(best, needed / device_gb)
                break
    return best


SIZES_GB = (3.0, 5.0, 7.0, 9.0, 12.0)
LARGER_GB = (15.0, 20.0, 30.0)
"""Sizes for `vllm` alone, to find the memory that it would need."""
PAPER = {
    ("opt-30b", "sharegpt"): "1.86 (up to 1.9)",
    ("opt-30b", "alpaca"): "1.58 (up to 1.5)",
    ("opt-13b", "sharegpt"): "1.54",
    ("llama-13b", "alpaca"): "1.27",
}
"""Best gain in papers/004 §5.2 (over expansion 1) and §5.3 (over vLLM)."""
_BLOCKS = "blocks"
"""The adaptive side in the blocks form; `pie` is the layers form."""
Grid = dict[tuple[str, str, float], dict[str, Answer]]
"""Maps (model, trace, GB) to the answer of each side."""


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
    """Run the bench. Raises ConfigError for unknown models."""
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
        1 + len(LARGER_GB) + len(sizes) * (3 + len(fixed_lengths(MODELS[model]))) for model, _ in cells
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
    """Run one model on one data set: first find the rate, then run every side at it."""
    count = requests * (4 if trace == "alpaca" else 1)
    source = find_source(trace, data_folder())
    peer = Question(model, source, ENOUGH_GB, 1e6, 0, count, context.seed)
    rate = answer(peer).requests_per_s
    bar.advance(now=f"{model} {trace}")
    at_rate = replace(peer, rate_per_s=rate)
    sides: list[int | None] = [0, *fixed_lengths(MODELS[model]), None]
    questions = [replace(at_rate, device_gb=gb, fifo_layers=side) for gb in sizes for side in sides]
    questions += [replace(at_rate, device_gb=gb, fifo_layers=None, form="blocks") for gb in sizes]
    questions += [replace(at_rate, device_gb=gb) for gb in LARGER_GB]
    answers = sweep(answer, questions, processes=processes, on_result=lambda *_: bar.advance())
    grid: Grid = {}
    for question, found in zip(questions, answers, strict=True):
        sides_of = grid.setdefault((model, trace, question.device_gb), {})
        sides_of[_label(question)] = found
    return grid


def _label(question: Question) -> str:
    fifo_layers = question.fifo_layers
    if fifo_layers is None:
        return "pie" if question.form == "layers" else _BLOCKS
    return "vllm" if fifo_layers == 0 else f"q={fifo_layers}"


def _best_fixed(sides: dict[str, Answer]) -> tuple[str, Answer]:
    fixed = {label: found for label, found in sides.items() if label not in ("pie", _BLOCKS)}
    return max(fixed.items(), key=lambda item: item[1].tokens_per_s)


def _figures(found: Grid, cells: Sequence[tuple[str, str]], sizes: Sequence[float]) -> dict[str, float]:
    figures: dict[str, float] = {}
    ratios, stalls, savings, gains = [], [], [], []
    in_blocks, blocks_stalls, blocks_gains = [], [], []
    for model, trace in cells:
        rows = [found[model, trace, gb] for gb in sizes]
        name = f"{model}_{trace}".replace("-", "_")
        gain = max(row["pie"].tokens_per_s / row["vllm"].tokens_per_s for row in rows)
        least = min(row["pie"].tokens_per_s / row["vllm"].tokens_per_s for row in rows)
        saving = memory_saving(_curve(found, model, trace, "vllm"), _curve(found, model, trace, "pie"))
        figures |= {f"sim_gain_{name}": gain, f"sim_least_{name}": least, f"sim_memory_saving_{name}": saving}
        ratios += [row["pie"].tokens_per_s / _best_fixed(row)[1].tokens_per_s for row in rows]
        stalls += [row["pie"].stall_share for row in rows]
        in_blocks += [row[_BLOCKS].tokens_per_s / row["pie"].tokens_per_s for row in rows]
        blocks_stalls += [row[_BLOCKS].stall_share for row in rows]
        blocks_gains += [row[_BLOCKS].tokens_per_s / row["vllm"].tokens_per_s for row in rows]
        savings.append(saving)
        gains.append(gain)
    return figures | {
        "sim_throughput_vs_vllm": max(gains),
        "sim_memory_saving": max(savings),
        "sim_vs_best_fixed": sum(ratios) / len(ratios),
        "sim_vs_best_fixed_worst": min(ratios),
        "sim_stall_share": max(stalls),
        "sim_blocks_throughput_vs_vllm": max(blocks_gains),
        "sim_blocks_vs_layers": sum(in_blocks) / len(in_blocks),
        "sim_blocks_vs_layers_worst": min(in_blocks),
        "sim_blocks_stall_share": max(blocks_stalls),
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
        "GB", "vllm tok/s", "pie tok/s", "/vllm", "best fixed", "expansion", "pie/best", "stall",
        "blocks/pie", "stall", "s/token /vllm",
    )  # fmt: skip
    for model, trace in cells:
        rows = []
        for gb in sizes:
            sides = found[model, trace, gb]
            peer, pie, (label, best) = sides["vllm"], sides["pie"], _best_fixed(sides)
            blocks, rate = sides[_BLOCKS], pie.tokens_per_s
            gains = (peer.tokens_per_s, rate, rate / peer.tokens_per_s, label)
            of_best = (expansion(MODELS[model].layers, best.fifo_layers), rate / best.tokens_per_s)
            of_blocks = (blocks.tokens_per_s / rate, blocks.stall_share)
            slower = pie.normalized_s / peer.normalized_s
            rows.append((gb, *gains, *of_best, pie.stall_share, *of_blocks, slower))
        stated = PAPER.get((model, trace), "not stated")
        tables.append(Table(f"{model}, {trace} (simulated); paper's best gain: {stated}", columns, rows))
    return tables


def _record(context: Context, found: Grid) -> None:
    for (model, trace, gb), sides in found.items():
        for side, one in sides.items():
            row = {"model": model, "trace": trace, "device_gb": gb, "side": side}
            context.record(row | asdict(one), "cells.jsonl")


def _notes(requests: int) -> list[str]:
    return [
        f"{requests} requests a run (alpaca: four times), warm-up and drain included; pie begins at 1",
        "pie: all blocks of some layers outside, as in the paper; blocks: some blocks of all layers",
        "vllm is our policy of that name with recomputation; H100 kernel costs, OPT-30B's scaled from 13B's",
        "paper: up to 1.9 x vLLM's throughput, 1.67 x less device memory, < 2 % below the best expansion",
    ]
