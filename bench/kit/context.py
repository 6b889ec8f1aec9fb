"""The context of a bench: flags, run directory, progress bar, a log of requests, cells of resumable runs."""

import json
import random
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.kit.provenance import ROOT
from shared.errors import ConfigError

CELLS_FILE = "cells.jsonl"


@dataclass(frozen=True)
class Context:
    """Context of one run."""

    name: str
    quick: bool
    """Whether to end within a minute, as CI does."""
    seed: int
    run_dir: Path
    """`runs/bench/NAME-TIME/`, for configuration, requests, figures and pictures."""
    arguments: Namespace
    """The bench's own flags."""
    console: Console = field(default_factory=lambda: Console(stderr=True))
    """Standard error, so that `--json -` can use standard output."""

    def random(self, purpose: str = "") -> random.Random:
        """Return a generator that depends only on the run's seed and on `purpose`."""
        return random.Random(f"{self.seed}/{self.name}/{purpose}")

    def say(self, text: str) -> None:
        """Print one line of progress."""
        self.console.print(text, markup=False, highlight=False)

    def record(self, row: Mapping[str, Any], file: str = "requests.jsonl") -> None:
        """Append one request, step or cell to a JSONL file of the run directory."""
        with (self.run_dir / file).open("a") as out:
            out.write(json.dumps(row, default=str) + "\n")

    def picture(self, name: str) -> Path:
        """Return the path of the PNG called `name`."""
        return self.run_dir / f"{name}.png"

    def resolved(self) -> dict[str, Any]:
        """Return the configuration of this run, with paths relative to the repository."""
        flags = {key: _plain(value) for key, value in vars(self.arguments).items()}
        return {"quick": self.quick, "seed": self.seed, **flags}

    @contextmanager
    def progress(self, label: str, total: int) -> "Iterator[Progressing]":
        """Show a progress bar on a terminal, or one line at the start elsewhere."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        if bar.disable:
            self.say(f"{label}: {total}")
        with bar:
            yield Progressing(bar, bar.add_task(label, total=total), label)


class Progressing:
    """A running progress bar."""

    def __init__(self, bar: Progress, task: Any, label: str) -> None:
        self._bar = bar
        self._task = task
        self._label = label

    def advance(self, count: int = 1, now: str = "") -> None:
        """Advance by `count`; `now` names the next item."""
        self._bar.update(self._task, advance=count, description=f"{self._label} {now}".strip())


def read_cells(run_dir: Path) -> list[dict[str, Any]]:
    """Return the cells measured so far, one row per cell."""
    file = run_dir / CELLS_FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def check_resumable(context: Context, identity: Mapping[str, Any]) -> None:
    """Check that the run in the directory has the same identity, and record it.

    Raises ConfigError if it differs, or if a run exists and --resume was not given.
    """
    file = context.run_dir / "workload.json"
    there = json.loads(file.read_text()) if file.exists() else None
    if (context.run_dir / CELLS_FILE).exists() and not context.arguments.resume:
        raise ConfigError(f"{context.run_dir} has a run: --resume goes on with it, --out names another")
    if there is not None and there != identity:
        raise ConfigError(f"the run in {context.run_dir} was of another workload: {json.dumps(there)}")
    file.write_text(json.dumps(identity))


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        resolved = value.resolve()
        return str(resolved.relative_to(ROOT)) if resolved.is_relative_to(ROOT) else value.name
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
