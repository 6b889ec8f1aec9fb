"""`bench pie --simulated` on little."""

import json
from pathlib import Path

from bench.cli import main
from bench.simulated.pie import Question, answer
from sim.workloads import Source


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
    assert figures["fig4_stalls_six_slots"] > 0 == figures["fig4_blocks_stalls"]
    assert figures["fig4_blocks_layers_in"] < 4 <= figures["fig4_layers_in"]
    assert figures["sim_blocks_stall_share"] <= 0.02 and figures["sim_blocks_vs_layers"] > 0.9
    assert 0.9 < figures["sim_throughput_vs_vllm"] < 3
    assert figures["sim_stall_share"] <= 0.02
    rows = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert {"vllm", "pie", "q=25", "blocks"} <= {row["side"] for row in rows}


def question(path: Path, fifo_layers: int | None) -> Question:
    rows = [f"{20 + 7 * (i % 30)},{30 + 11 * (i % 20)}" for i in range(80)] + ["1500,10"]
    trace = path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    return Question("opt-13b", Source(path=trace), 2.0, 50.0, fifo_layers, 80, 0)


def test_pie_serves_more_on_the_same_bytes(tmp_path: Path) -> None:
    plain, fixed, adaptive = (answer(question(tmp_path, q)) for q in (0, 20, None))
    assert fixed.tokens_per_s > 1.1 * plain.tokens_per_s
    assert adaptive.tokens_per_s > plain.tokens_per_s
    assert adaptive.fifo_layers >= 3
