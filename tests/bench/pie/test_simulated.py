"""`bench pie --simulated` on little."""

import json
from pathlib import Path

from bench.cli import main


def test_a_small_run(tmp_path: Path) -> None:
    words = ["pie", "--simulated", "--quick", "--gb", "2", "--requests", "40", "--processes", "1"]
    words += ["--out", str(tmp_path), "--json", str(tmp_path / "r.json")]
    assert main(words) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures = result["figures"]
    assert result["simulated"] is True
    assert (figures["fig4_expansion"], figures["fig4_stalls"], figures["fig4_fifo_layer_times"]) == (
        1.286,
        0,
        8,
    )
    assert figures["fig4_stalls_six_slots"] > 0
    assert 0.9 < figures["sim_throughput_vs_vllm"] < 3
    assert figures["sim_stall_share"] <= 0.02
    rows = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert {"vllm", "pie", "q=25"} <= {row["side"] for row in rows}
