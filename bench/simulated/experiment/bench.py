"""`python -m bench experiment FILE.yaml`: a grid over policies, predictors, placements, evictions, traces,
rates, seeds.

Writes a directory per cell (resolved cell, figures, one JSONL row per request), a summary as CSV and
Markdown, and pictures of latency against rate. Finished cells are skipped, so an interrupted experiment
resumes. The default directory is `runs/experiment/NAME`.
"""

import csv
import json
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any

from bench.kit.context import Context
from bench.kit.outcome import Outcome, Table
from bench.kit.plots import draw_knees
from bench.kit.provenance import ROOT, git_state, machine, versions
from bench.kit.stats import order_of
from bench.simulated.experiment.cells import (
    CellAnswer,
    CellQuestion,
    answer_live,
    answer_simulated,
    over_turns,
)
from bench.simulated.experiment.grid import AXES, Experiment, GridCell, read_experiment, write_cited
from bench.simulated.experiment.report import LIMIT, closing, reports, tables
from shared.plugins import label
from sim.sweep import sweep

_SUMMARY = {
    "failed": "failures",
    "tok/s": "tokens_per_s",
    "s/token": "normalized_s",
    "TTFT s": "ttft_s_p50",
    "JCT s": "jct_s",
    "SLO": "slo",
    "alloc fail": "alloc_failures",
}
_MEASURED = {"plan_ms", "planning_share"}
"""Time of the planner on this machine, in a simulation too."""
Figures = dict[str, float]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.yaml", help="what to run; see docs/experiments.md")
    parser.add_argument(
        "--dry-run", action="store_true", help="only say which cells there are and which are done"
    )
    parser.add_argument("--into", type=Path, metavar="DIR", help="of all cells [runs/experiment/NAME]")
    parser.add_argument("--processes", type=int, help="simulated cells at a time [one per core]")


def run(context: Context) -> Outcome:
    """Run the grid; `--quick` cuts every cell to 60 requests. Raises ConfigError for an invalid file."""
    experiment = read_experiment(context.arguments.file)
    if context.quick:
        experiment = _shortened(experiment, 60)
    again = "-again" if experiment.figures else ""
    folder: Path = context.arguments.into or ROOT / "runs" / "experiment" / (experiment.name + again)
    done = {cell: figures for cell in experiment.cells if (figures := _read(folder, experiment, cell))}
    todo = [cell for cell in experiment.cells if cell not in done]
    if context.arguments.dry_run:
        return _plan(experiment, done)
    context.say(f"{len(experiment.cells)} cells, {len(done)} of them there already, in {_shown(folder)}/")
    with context.progress(experiment.mode, len(todo) * experiment.turns) as bar:
        done |= _run_cells(experiment, todo, folder, context.arguments.processes, bar.advance)
    results = [(cell, done[cell]) for cell in experiment.cells]
    _summarize(folder, results)
    _draw(folder, results)
    failures = int(sum(figures.get("failures", 0.0) for _, figures in results))
    notes = [f"all cells, as summary.csv and summary.md, and pictures are in {_shown(folder)}/"]
    figures = {"cells": float(len(results)), "cells_run": float(len(todo))}
    by_folder = {experiment.folder(cell): found for cell, found in results}
    if experiment.figures:
        same = sum(_text(by_folder.get(name)) == _text(cited) for name, cited in experiment.figures.items())
        figures["cells_same"] = float(same)
        failures += len(experiment.figures) - same if experiment.mode == "simulator" else 0
        notes.append(
            "cells_same: their figures are those of the cited run to the digit, but for the planner's time"
        )
    else:
        made = git_state() | {"versions": versions(), "machine": machine()}
        ran = replace(experiment, figures=by_folder)
        write_cited(folder / "cited.json", context.arguments.file, ran, made)
        notes.append(f"to cite, and to run again: {_shown(folder / 'cited.json')}")
    return Outcome(
        figures,
        failures,
        tables(results),
        notes,
        simulated=experiment.mode == "simulator",
        closing=closing(results),
    )


def _text(figures: Mapping[str, float] | None) -> str:
    """Return all but what was measured here, as text."""
    return json.dumps({k: v for k, v in (figures or {}).items() if k not in _MEASURED}, sort_keys=True)


def _shown(folder: Path) -> Path:
    """Return the path relative to the working directory if possible."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _shortened(experiment: Experiment, requests: int) -> Experiment:
    return replace(experiment, requests=min(requests, experiment.requests))


def _plan(experiment: Experiment, done: dict[GridCell, Figures]) -> Outcome:
    rows = [
        (*cell.choices().values(), "done" if cell in done else "to run", experiment.folder(cell))
        for cell in experiment.cells
    ]
    table = Table(f"{experiment.name}: {experiment.mode}", (*AXES, "state", "folder"), rows)
    figures = {"cells": float(len(rows)), "cells_to_run": float(len(rows) - len(done))}
    return Outcome(figures, 0, [table], simulated=experiment.mode == "simulator")


def _run_cells(
    experiment: Experiment, todo: Sequence[GridCell], folder: Path, processes: int | None, advance: Any
) -> dict[GridCell, Figures]:
    if experiment.mode == "live":
        return _run_live(experiment, todo, folder, advance)
    questions = [CellQuestion(experiment, cell) for cell in todo]
    done: dict[GridCell, Figures] = {}

    def keep(question: CellQuestion, answer: CellAnswer) -> None:
        done[question.cell] = _write(folder, experiment, question.cell, answer)
        advance(1)

    sweep(answer_simulated, questions, processes=processes, on_result=keep)
    return done


def _run_live(
    experiment: Experiment, todo: Sequence[GridCell], folder: Path, advance: Any
) -> dict[GridCell, Figures]:
    """Run all cells in turn, `experiment.turns` times, skipping finished turns."""
    found: dict[GridCell, list[CellAnswer]] = {cell: [] for cell in todo}
    for turn in range(experiment.turns):
        for at in order_of(turn, len(todo)):
            cell = todo[at]
            place = folder / experiment.folder(cell) / f"turn-{turn}"
            found[cell].append(_turn(experiment, cell, place))
            advance(1)
    done = {}
    for cell, answers in found.items():
        rows = [{"turn": turn, **row} for turn, answer in enumerate(answers) for row in answer.rows]
        whole = CellAnswer(over_turns([answer.figures for answer in answers]), rows)
        done[cell] = _write(folder, experiment, cell, whole)
    return done


def _turn(experiment: Experiment, cell: GridCell, place: Path) -> CellAnswer:
    file = place / "turn.json"
    if file.exists():
        return CellAnswer(**json.loads(file.read_text()))
    place.mkdir(parents=True, exist_ok=True)
    answer = answer_live(experiment, cell, place)
    file.write_text(json.dumps(asdict(answer)))
    return answer


def _write(folder: Path, experiment: Experiment, cell: GridCell, answer: CellAnswer) -> Figures:
    """Write a cell's files. `figures.json` comes last and marks the cell as finished."""
    place = folder / experiment.folder(cell)
    place.mkdir(parents=True, exist_ok=True)
    resolved = asdict(experiment) | {"cells": None, "figures": None, "cell": cell.choices()}
    (place / "config.json").write_text(json.dumps(resolved, indent=2, default=str) + "\n")
    (place / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answer.rows))
    (place / "figures.json").write_text(json.dumps(answer.figures, indent=2) + "\n")
    return answer.figures


def _read(folder: Path, experiment: Experiment, cell: GridCell) -> Figures | None:
    try:
        content = json.loads((folder / experiment.folder(cell) / "figures.json").read_text())
    except (OSError, ValueError):
        return None
    return {str(name): float(value) for name, value in content.items()}


def _table(results: Sequence[tuple[GridCell, Figures]]) -> Table:
    """Return a table with only the axes along which cells differ."""
    shown = [axis for axis in AXES if len({getattr(cell, axis) for cell, _ in results}) > 1] or ["policy"]
    rows = [
        (
            *(getattr(cell, axis) for axis in shown),
            *(_cell_text(figures.get(name)) for name in _SUMMARY.values()),
        )
        for cell, figures in results
    ]
    return Table("cells", (*shown, *_SUMMARY), rows)


def _cell_text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _summarize(folder: Path, results: Sequence[tuple[GridCell, Figures]]) -> None:
    names = sorted({name for _, figures in results for name in figures})
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "summary.csv").open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow([*AXES, *names])
        for cell, figures in results:
            writer.writerow([*cell.choices().values(), *(figures.get(name, "") for name in names)])
    table = _table(results)
    lines = [f"| {' | '.join(table.columns)} |", "|" + "---|" * len(table.columns)]
    lines += [f"| {' | '.join(str(value) for value in row)} |" for row in table.rows]
    (folder / "summary.md").write_text("\n".join(lines) + "\n")


def _draw(folder: Path, results: Sequence[tuple[GridCell, Figures]]) -> None:
    """Draw one picture per trace with several rates, with means over seeds."""
    for report in reports(results):
        if len(report.rates) == 1:
            continue
        names = {side: report.short_name(side) for side in report.ranked()}
        curves = {(names[side], label(side[1])): report.curve(side) for side in names}
        knees: dict[str, tuple[str, float]] = {}
        for side, name in names.items():
            knee = report.knee(side)
            if knee is not None and isfinite(knee):
                knees.setdefault(name, (f"{name} {knee:.2g}/s", knee))
        name = Path(report.trace).stem
        draw_knees(
            folder / f"latency_{name}.png",
            f"{name}: mean latency of a token, and the rate at which it is too long",
            ("requests / s", "normalized latency, s / token"),
            curves,
            (f"limit: {LIMIT:g} × the least, {report.limit_s:.2g} s", report.limit_s),
            knees,
        )
