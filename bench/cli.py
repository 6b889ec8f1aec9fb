"""The command line of the benches: runs one, prints its table and writes its JSON."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable

from bench.kit.context import Context
from bench.kit.outcome import Outcome, as_json, document
from bench.kit.provenance import ROOT
from bench.registry import BENCHES, Bench, find, names
from shared.command_line import Parser, hint
from shared.errors import ConfigError, KvasirError

_RUNS = ROOT / "runs" / "bench"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0 if measured, 1 if failed, 2 for wrong flags."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "--list"):
        print(_overview())
        return 0
    if words[0] == "data":
        from bench.kit.datasets import main as data

        return data(words[1:])
    if words[0] == "record":
        from bench.kit.record import main as record

        return record(words[1:])
    try:
        bench = find(words[0])
    except KeyError:
        known = (*names(), "data", "record")
        print(f"error: no bench {words[0]!r}{hint(words[0], known)}", file=sys.stderr)
        return 2
    return _carry_out(bench, words[1:])


def _overview() -> str:
    width = max(len(bench.name) for bench in BENCHES) + 2
    lines = [f"  {bench.name:{width}}{bench.description}" for bench in BENCHES]
    lines.append(f"  {'data':{width}}data sets: what is there and where from; downloads what is missing")
    lines.append(f"  {'record':{width}}writes figures of runs into docs/benchmarks/NAME.md")
    usage = "python -m bench NAME [--quick] [--json FILE|-] [--out DIR] [--seed N]   (NAME --help: its flags)"
    return "\n".join([usage, "", *lines])


def _carry_out(bench: Bench, words: Sequence[str]) -> int:
    try:
        module = bench.load()
        parser = _parser(bench)
        module.add_arguments(parser)
        context = _context(bench, parser.parse_args(words))
        outcome = module.run(context)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KvasirError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    _publish(context, outcome)
    return 0


def _parser(bench: Bench) -> argparse.ArgumentParser:
    parser = Parser(prog=f"python -m bench {bench.name}", description=bench.description)
    common = parser.add_argument_group("common")
    common.add_argument("--quick", action="store_true", help="end within a minute, on less data")
    common.add_argument("--json", metavar="FILE", help="write the result here; - is standard output")
    common.add_argument("--out", type=Path, metavar="DIR", help="the run directory [runs/bench/NAME-TIME]")
    common.add_argument("--seed", type=int, default=0, help="of everything random [%(default)s]")
    return parser


def _context(bench: Bench, arguments: argparse.Namespace) -> Context:
    run_dir = arguments.out or _RUNS / f"{bench.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir.mkdir(parents=True, exist_ok=True)
    context = Context(bench.name, arguments.quick, arguments.seed, run_dir, arguments)
    (run_dir / "config.json").write_text(as_json(context.resolved()))
    return context


def _publish(context: Context, outcome: Outcome) -> None:
    text = as_json(document(context.name, context.resolved(), outcome))
    (context.run_dir / "result.json").write_text(text)
    target: str | None = context.arguments.json
    show(context.name, outcome, Console(stderr=target == "-"))
    if target == "-":
        sys.stdout.write(text)
    elif target is not None:
        Path(target).write_text(text)


def show(name: str, outcome: Outcome, console: Console) -> None:
    """Print tables, figures, failures and notes."""
    for table in outcome.tables:
        _print_table(console, table.title, table.columns, table.rows)
    title = f"{name} (simulated)" if outcome.simulated else name
    _print_table(console, title, ("figure", "value"), list(outcome.figures.items()))
    console.print(f"failures: {outcome.failures}", highlight=False)
    for note in outcome.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    if outcome.closing:
        console.print(f"\n{outcome.closing}", markup=False, highlight=False)


def _print_table(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Print whole cells; on a narrow terminal drop the lines between columns, then exceed its width."""
    made = RichTable(title=title, title_justify="left")
    for column in columns:
        made.add_column(column)
    for row in rows:
        made.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    terminal, console.width = console.width, 1000
    if Measurement.get(console, console.options, made).maximum > terminal:
        made.box, made.pad_edge = None, False
    console.width = max(terminal, Measurement.get(console, console.options, made).maximum)
    console.print(made)
    console.width = terminal
