"""`bench dgfm` on little: the figures it names, the picture it draws."""

import json
from pathlib import Path

from bench.cli import main


def test_a_short_run(tmp_path: Path) -> None:
    words = ["dgfm", "--quick", "--duration-s", "60", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*words, "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures = result["figures"]
    assert result["simulated"] is True
    assert 0.5 < figures["throughput_vs_off"] < 2
    assert 0 <= figures["remote_share_on"] <= figures["remote_share_off"] + 0.05
    assert 0 < figures["settle_10k_s"] < 5
    assert (tmp_path / "figure10.png").stat().st_size > 1000
    sides = [json.loads(line)["side"] for line in (tmp_path / "sides.jsonl").read_text().splitlines()]
    assert sides == ["off", "cycles", "on"]


def test_flags_that_leave_nothing_are_wrong(tmp_path: Path) -> None:
    assert main(["dgfm", "--workers", "1", "--out", str(tmp_path)]) == 2
