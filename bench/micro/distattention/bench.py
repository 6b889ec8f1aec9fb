"""`python -m bench distattention`: exactness, overhead, shipping against fetching, longest context.

Creditors are processes on another core, reached over bulk TCP on the loopback device. Source: Infinite-LLM
§6.1, §6.5, figures 11 and 12 (papers/001).
"""

from argparse import ArgumentParser
from pathlib import Path

import torch

from bench.kit.context import Context
from bench.kit.cores import Cores
from bench.kit.models import TINY_CHAT
from bench.kit.outcome import Outcome, Table
from bench.kit.plots import Chart, draw_lines
from bench.micro.distattention.attention import LAYER, Q_HEADS, LayerTimes, measure_cells, measure_error
from bench.micro.distattention.steps import RemoteStep, measure_steps
from services.worker.peers.attention.core.cost import ShipMode

_COLUMNS = ("rows", "context", "undivided ms", "shipped ms", "fetched ms", "overhead", "half here", "chosen")

_STEP_COLUMNS = "batch,remote ms,local ms,begin ms,send ms,wait ms,ratio,low,high,of the core".split(",")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--chunks", nargs="+", type=int, default=[1, 64, 512], help="rows; 1 is a decode")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--model", default=str(TINY_CHAT), help="for whole steps [%(default)s]")


def run(context: Context) -> Outcome:
    """Run the bench. Raises ConfigError if there is only one core."""
    flags = context.arguments
    cores = Cores.choose()
    torch.set_num_threads(1)
    contexts, chunks, turns, cases = flags.contexts, flags.chunks, flags.turns, 40
    if context.quick:
        contexts, chunks, turns, cases = [1024, 4096], [1, 64], 3, 6
    with cores.client():
        context.say("exactness: random partitions over four workers")
        error = measure_error(cores.engine, cases)
        with context.progress("layers", len(contexts) * len(chunks)) as progress:
            cells = measure_cells(cores.engine, contexts, chunks, turns, progress.advance)
        context.say("steps of a whole model, a quarter of the keys at another worker")
        steps = measure_steps(
            Path(flags.model), cores.engine, batches=[1, 8], context=1024, away=0.25, turns=10 * turns
        )
    draw(context.picture("query-shipping-and-fetching"), cells)
    figures = {"max_abs_error": error, **_figures(cells), **_step_figures(steps)}
    heads, dim, _ = LAYER
    return Outcome(
        figures,
        failures=0,
        tables=[
            Table("one layer, all keys at one creditor", _COLUMNS, [_row(cell) for cell in cells]),
            Table(
                "a step at 1,024 tokens, a quarter at one creditor", _STEP_COLUMNS, [*map(_step_row, steps)]
            ),
        ],
        notes=[
            f"one layer of {Q_HEADS} query and {heads} KV heads of {dim}, fp32; a thread and a core a worker"
        ],
        headline=(
            "max_abs_error",
            "remote_overhead",
            "query_vs_fetch_speedup",
            "choice_regret",
            "remote_step_ratio",
            "remote_step_ratio_low",
            "remote_step_ratio_high",
        ),
    )


def draw(file: Path, cells: list[LayerTimes]) -> None:
    """Draw the paper's Figure 12: latency of shipping queries and of fetching keys, over the context."""
    shown = [cell for cell in cells if cell.rows == 1]
    curves = {
        "keys come here": [(cell.context_tokens, cell.fetch_s * 1e3) for cell in shown],
        "the query goes there": [(cell.context_tokens, cell.ship_s * 1e3) for cell in shown],
        "all keys are here": [(cell.context_tokens, cell.whole_s * 1e3) for cell in shown],
    }
    draw_lines(file, Chart(curves, "", "context, tokens", "ms, one layer, one token", log_x=2, log_y=True))


def _figures(cells: list[LayerTimes]) -> dict[str, float]:
    """Return figures; those without a suffix are of the longest decode."""
    found: dict[str, float] = {}
    decodes = [cell for cell in cells if cell.rows == 1]
    for cell in decodes:
        found[f"remote_overhead_c{cell.context_tokens}"] = cell.overhead
        found[f"remote_overhead_us_c{cell.context_tokens}"] = cell.overhead_us
        found[f"undivided_us_c{cell.context_tokens}"] = cell.whole_s * 1e6
        found[f"query_vs_fetch_speedup_c{cell.context_tokens}"] = cell.fetch_ratio
    last = decodes[-1]
    found["remote_overhead"] = last.overhead
    found["query_vs_fetch_speedup"] = last.fetch_ratio
    found["half_remote_ratio"] = last.half_ratio
    regrets = [_regret(cell) for cell in cells]
    found["choice_regret"] = max(regrets)
    return found


def _step_figures(steps: list[RemoteStep]) -> dict[str, float]:
    """Return figures of steps; those without a suffix are of a single sequence."""
    found: dict[str, float] = {}
    for step in steps:
        name = "remote_step" + ("" if step.batch == 1 else f"_b{step.batch}")
        found |= {f"{name}_ratio": step.ratio, f"{name}_ratio_low": step.low, f"{name}_ratio_high": step.high}
        found |= {f"{name}_cpu_ratio": step.cpu_ratio, f"{name}_ms": 1e3 * step.remote_s}
    return found


def _step_row(step: RemoteStep) -> tuple[object, ...]:
    times = (step.remote_s, step.local_s, step.begin_s, step.send_s, step.wait_s)
    ratios = (step.ratio, step.low, step.high, step.cpu_ratio)
    return (step.batch, *(round(1e3 * each, 3) for each in times), *(round(each, 2) for each in ratios))


def _regret(cell: LayerTimes) -> float:
    """Return how much slower the chosen mode is than the faster one."""
    chosen = cell.ship_s if cell.chosen is ShipMode.SHIP else cell.fetch_s
    return chosen / min(cell.ship_s, cell.fetch_s) - 1


def _row(cell: LayerTimes) -> tuple[object, ...]:
    times_ms = [round(each * 1e3, 3) for each in (cell.whole_s, cell.ship_s, cell.fetch_s)]
    ratios = (round(cell.overhead, 3), round(cell.half_ratio, 3))
    return (cell.rows, cell.context_tokens, *times_ms, *ratios, str(cell.chosen))
