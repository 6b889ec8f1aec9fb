"""`bench sim-check` against a real stack: it measures, fits, replays; how near depends on the machine."""

import json
from pathlib import Path

import pytest

from bench.cli import main


@pytest.mark.slow
@pytest.mark.stack
def test_a_live_run_is_replayed(tmp_path: Path) -> None:
    words = ["sim-check", "--quick", "--requests", "24", "--max-tokens", "48"]
    assert main([*words, "--out", str(tmp_path), "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures = result["figures"]
    assert result["failures"] == 0
    assert figures["step_fixed_ms"] > 0
    assert abs(figures["throughput_error_50"]) < 0.9
    assert {"ttft_p99_error_50", "latency_p50_error_50"} <= figures.keys()
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    assert all(0 < row["live_ttft_s"] <= row["live_jct_s"] for row in rows)
    assert all(row["simulated_jct_s"] > 0 for row in rows)
