"""The live parts of `bench pie`, on little: figures, slices, the picture."""

import json
from pathlib import Path

import pytest

from bench.cli import main
from bench.live.pie import arena


def test_the_live_parts_on_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "QUICK", arena.Pace(1, 0.4, 0.1, 0.2, 0.4, 1.0, 2, 2, 2, 2, 2, 2))
    words = ["pie", "--quick", "--part", "step", "room", "best", "narrow", "reaction", "--out", str(tmp_path)]
    assert main([*words, "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures = result["figures"]
    assert result["simulated"] is False and result["failures"] == 0
    assert figures["fig4_expansion"] == 1.286
    assert figures["same_text_share"] == 1.0
    wanted = "throughput_vs_none throughput_vs_none_low latency_vs_synchronous vs_best_fixed"
    assert figures["step_mb_out"] < figures["step_mb_in"]
    for name in (
        *wanted.split(),
        "step_vs_none",
        "narrow_vs_none",
        "narrow_vs_none_median",
        "reaction_tok_s_under",
    ):
        assert figures[name] > 0
    assert figures["same_work_vs_fixed"] > 0
    rows = [json.loads(line) for line in (tmp_path / "slices.jsonl").read_text().splitlines()]
    assert {"recompute", "swap", "auto"} <= {row["side"] for row in rows}
    assert (tmp_path / "reaction.png").stat().st_size > 1000
