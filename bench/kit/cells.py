"""Resumable runs: every cell is written at once, and a different run is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.kit.context import Context
from shared.errors import ConfigError

CELLS_FILE = "cells.jsonl"


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
