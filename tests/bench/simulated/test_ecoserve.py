"""`bench sim-ecoserve` on little: the figures it names, the pictures it draws, the better of two peers."""

import json
from pathlib import Path

from bench.cli import main
from bench.simulated.ecoserve.comparison import Comparison
from bench.simulated.ecoserve.measures import Reference
from sim.summary import ServiceLevel
from sim.workloads import Source


def test_a_small_comparison(tmp_path: Path) -> None:
    words = ["sim-ecoserve", "--quick", "--traces", "alpaca", "--requests", "40", "--processes", "1"]
    words += ["--policies", "vllm", "ecoserve", "--out", str(tmp_path), "--json", str(tmp_path / "r.json")]
    assert main(words) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures = result["figures"]
    assert result["simulated"] is True
    assert 0.2 < figures["rate_vs_vllm_alpaca"] < 5
    assert {"slo_vs_vllm_alpaca", "oracle_gap", "kvc_utilization", "alloc_failures"} <= figures.keys()
    sides = [json.loads(line) for line in (tmp_path / "sides.jsonl").read_text().splitlines()]
    assert {side["side"] for side in sides} == {"vllm", "vllm whole prompts", "ecoserve", "ecoserve oracle"}
    assert all(0 <= side["slo"] <= 1 for side in sides)


def test_the_peer_is_the_better_of_its_settings() -> None:
    reference = Reference(2.0, 0.1, ServiceLevel(0.1, 0.02), 10.0)
    knees = {"vllm": 2.0, "vllm whole prompts": 2.5, "ecoserve": 5.0, "orca": 0.0}
    past_knee = {"vllm whole prompts": {"slo": 0.25}, "ecoserve": {"slo": 1.0}}
    one = Comparison(Source("alpaca"), reference, knees, 10, past_knee=past_knee)
    assert one.peer == "vllm whole prompts"
    assert one.rate_ratio("ecoserve", "vllm") == 2.0
    assert one.rate_ratio("ecoserve", "orca") is None
    assert one.stable_ratio("ecoserve", "vllm") is None
    assert one.slo_ratio("ecoserve") == 4.0


def test_an_unknown_policy_is_a_wrong_flag(tmp_path: Path) -> None:
    words = ["sim-ecoserve", "--quick", "--policies", "nobody", "--out", str(tmp_path)]
    assert main(words) == 2


def test_pictures_and_sensitivities(tmp_path: Path) -> None:
    words = [
        "sim-ecoserve",
        "--traces",
        "alpaca",
        "--requests",
        "30",
        "--seeds",
        "1",
        "--duration",
        "1",
        "--processes",
        "1",
    ]
    words += ["--policies", "ecoserve", "--sensitivities", "--out", str(tmp_path)]
    assert main(words) == 0
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    assert {"latency_alpaca", "jct_alpaca", "ablation_alpaca", "sensitivity_pad"} <= drawn
