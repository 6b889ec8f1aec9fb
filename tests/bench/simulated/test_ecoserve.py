"""`bench sim-ecoserve` on little: the figures it names, the pictures it draws, the better of two peers."""

import json
from pathlib import Path

from bench.cli import main
from bench.simulated.ecoserve import sides
from bench.simulated.ecoserve.comparison import CURVE, Comparison, Effort, add_curves, compare
from bench.simulated.ecoserve.measures import (
    Reference,
)
from bench.simulated.ecoserve.sides import RIVALS, PolicySide, case_of
from sim.case import Case, Machine
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


def test_sides_are_compared_on_the_same_requests() -> None:
    sides = [
        PolicySide("vllm", "vllm", "none"),
        PolicySide("twin", "vllm", "none"),
        PolicySide("orca", "orca", "none"),
    ]
    effort, told = Effort(requests=40, duration_s=1.0, seeds=(0,), processes=1), list[str]()
    (one,) = compare([Source("alpaca")], sides, Machine(), effort, told.append)
    assert one.requests == 40
    assert one.knees["vllm"] == one.knees["twin"] > one.knees["orca"]
    assert all(one.stable[label] <= rate for label, rate in one.knees.items())
    assert one.past_knee["vllm"]["jct_s"] == one.past_knee["twin"]["jct_s"] < one.past_knee["orca"]["jct_s"]
    assert one.peer == "vllm"
    assert one.rate_ratio("twin", "vllm") == 1.0
    assert len(told) == 3 * len(sides)
    add_curves([one], sides[:1], Machine(), effort, told.append)
    assert len(one.curves["vllm"]) == len(CURVE)
    assert one.curves["vllm"][0][1] <= one.curves["vllm"][-1][1]


PEER = Case(Source("alpaca"), "vllm", "none", requests=150)


def test_each_side_has_the_settings_of_the_paper() -> None:
    made = {
        side.label: case_of(side, Source("books"), Machine(), requests=9, seed=1)
        for side in (*RIVALS, PolicySide("ecoserve", "ecoserve"))
    }
    assert made["orca"].settings.max_batch_sequences == 8
    assert made["vllm"].settings.max_batch_sequences == 256
    assert dict(made["ecoserve"].options) == sides.SETTINGS["books"]
    assert made["vllm"].options == ()
    assert made["vllm"].chunked_prefill
    assert not made["vllm whole prompts"].chunked_prefill
