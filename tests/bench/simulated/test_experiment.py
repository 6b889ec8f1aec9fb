"""`bench experiment` in the simulator: dry run, run, going on where it was; and one cell on a live stack."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main

SIMULATED = """
name: small
grid:
  policy: [vllm, fastgen]
  predictor: [oracle]
  placement: [round_robin]
  trace: [alpaca]
  rate: [4, 8]
requests: 40
workers: 2
"""
LIVE = """
mode: live
grid: {policy: [vllm], predictor: [histogram], placement: [best_fit], rate: [4]}
requests: 4
max_tokens: 24
settings: {worker.kv_blocks: 256}
"""


def experiment(folder: Path, text: str, *flags: str) -> dict[str, Any]:
    file = folder / "e.yaml"
    file.write_text(text)
    words = ["experiment", str(file), "--into", str(folder / "cells"), "--out", str(folder / "run")]
    assert main([*words, "--json", str(folder / "r.json"), "--processes", "1", *flags]) == 0
    content: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return content


def test_a_dry_run_runs_nothing_and_a_second_run_only_what_is_missing(tmp_path: Path) -> None:
    cells = tmp_path / "cells"
    assert experiment(tmp_path, SIMULATED, "--dry-run")["figures"] == {"cells": 4, "cells_to_run": 4}
    assert not cells.exists()
    result = experiment(tmp_path, SIMULATED)
    assert result["figures"] == {"cells": 4, "cells_run": 4}
    assert result["simulated"] is True
    lost = next(cells.glob("fastgen-*-4-*"))
    (lost / "figures.json").unlink()
    assert experiment(tmp_path, SIMULATED)["figures"]["cells_run"] == 1
    assert experiment(tmp_path, SIMULATED, "--dry-run")["figures"]["cells_to_run"] == 0
    rows = list(csv.DictReader((cells / "summary.csv").read_text().splitlines()))
    assert {(row["policy"], row["rate"]) for row in rows} == {
        (p, r) for p in ("vllm", "fastgen") for r in "48"
    }
    assert all(float(row["normalized_s"]) > 0 and row["requests"] == "40.0" for row in rows)
    assert (cells / "latency_alpaca.png").read_bytes().startswith(b"\x89PNG")
    assert (cells / "summary.md").read_text().count("\n") == 6
    assert len((lost / "requests.jsonl").read_text().splitlines()) == 40


@pytest.mark.stack
def test_a_live_cell_starts_a_stack_of_its_own(tmp_path: Path) -> None:
    result = experiment(tmp_path, LIVE)
    assert result["failures"] == 0
    row = next(csv.DictReader((tmp_path / "cells" / "summary.csv").read_text().splitlines()))
    assert float(row["tokens_per_s"]) > 0
    assert float(row["requests"]) == 4
    assert row["policy"] == "vllm"


def test_a_file_that_is_wrong_is_a_wrong_flag(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text("grid: {policy: [nobody]}")
    assert main(["experiment", str(file), "--out", str(tmp_path / "run")]) == 2
