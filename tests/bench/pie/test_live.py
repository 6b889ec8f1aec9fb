"""The live parts of `bench pie`, on little."""

import json
from pathlib import Path

import pytest

from bench.cli import main
from bench.pie import live


def test_the_live_parts_on_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "QUICK", live.Pace(1, 0.4, 0.2, 0.4, 1.0))
    words = ["pie", "--quick", "--part", "room", "narrow", "reaction", "--out", str(tmp_path)]
    assert main([*words, "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures = result["figures"]
    assert result["simulated"] is False and result["failures"] == 0
    assert figures["fig4_expansion"] == 1.286
    assert figures["same_text_share"] == 1.0
    for name in ("throughput_vs_none", "vs_best_fixed", "narrow_vs_none", "reaction_tok_s_under"):
        assert figures[name] > 0
    rows = [json.loads(line) for line in (tmp_path / "slices.jsonl").read_text().splitlines()]
    assert {"recompute", "swap", "auto"} <= {row["side"] for row in rows}
    assert (tmp_path / "reaction.png").stat().st_size > 1000
