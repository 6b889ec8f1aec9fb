"""`python -m bench serve --quick`: two real stacks, our policies against each other, and on with the run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.kit.provenance import ROOT


def serve(run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: a bench binds itself to a core."""
    argv = [sys.executable, "-m", "bench", "serve", "--quick", "--out", str(run_dir), *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)


def result(run_dir: Path) -> dict[str, Any]:
    return dict(json.loads((run_dir / "result.json").read_text()))


@pytest.mark.stack
@pytest.mark.timeout(900)
def test_a_short_run_and_on_with_it(tmp_path: Path) -> None:
    first = serve(tmp_path, "--budget-s", "0.5")
    assert first.returncode == 0, first.stderr
    assert result(tmp_path)["incomplete"]
    other = serve(tmp_path, "--resume", "--requests", "9")
    assert other.returncode == 2
    assert "another workload" in other.stderr
    done = serve(tmp_path, "--resume", "--requests", "24", "--tolerance", "0.5", "--budget-s", "300")
    assert done.returncode == 0, done.stderr
    made = result(tmp_path)
    assert (made["incomplete"], made["failures"]) == (False, 0)
    figures = made["figures"]
    ratio = figures["sustained_kvasir"] / figures["sustained_ours_vllm"]
    assert figures["policy_factor"] == pytest.approx(ratio)
    assert 0 <= figures["slo_kvasir"] <= 1
    assert figures["same_length_share_min"] > 0.9
    cells = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert {(cell["kind"], cell["side"]) for cell in cells} >= {
        ("burst", "kvasir"), ("low", "ours_vllm"), ("search", "kvasir"), ("beyond", "ours_vllm"),
    }  # fmt: skip
    requests = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert len(requests) == sum(cell["requests"] for cell in cells)
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    again = serve(tmp_path)
    assert again.returncode == 2
    assert "--resume" in again.stderr
