"""`bench sim-check` against a real stack: it measures, fits, replays; how near depends on the machine."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from bench.cli import main
from bench.live.sim_check import loads
from bench.live.sim_check.costs import Costs, figures, learn, replay, simulated
from bench.live.sim_check.loads import Load, Seen, Setting, Step
from services.worker.core.costs.linear import LinearCost
from sim.cores import CoreCosts

SETTING = Setting(workers=1, kv_blocks=256, sequences=32, policy="vllm", max_tokens=256, cores=2)
TRUE = Costs(
    LinearCost("a machine", fixed_s=0.002, prefill_token_s=5e-5, sequence_s=1e-4),
    CoreCosts(cores=2, request_s=0.0, token_s=2e-4, lanes=2.0, ratios=(0.8, 1.0, 1.0, 1.2), frame_s=5e-4),
    overhead_s=0.004,
)
"""Of a machine that is itself simulated: what it costs is known."""


def load_of(kind: str, percent: int, rate: float, seed: int, count: int = 150) -> Load:
    """As that machine would have served it."""
    dice, at_s, asked = Random(seed), 0.0, list[Seen]()
    for _ in range(count):
        at_s += dice.expovariate(rate)
        asked.append(Seen(at_s, 0.0, 0.0, dice.randint(10, 150), dice.randint(5, 90)))
    blank = Load(kind, percent, 0, at_s, 0.0, 0.0, asked, [])
    answers = replay(blank, TRUE, SETTING)
    steps = sum(meter.steps for meter in simulated(blank, TRUE, SETTING).meters)
    prompts, tokens = (sum(values) for values in zip(*_sizes(answers), strict=True))
    engine_s = steps * TRUE.step.fixed_s + prompts * TRUE.step.prefill_token_s + tokens * TRUE.step.sequence_s
    rest_s = steps * TRUE.rest.frame_s + tokens * TRUE.rest.token_s
    reports = [_step(number, dice) for number in range(1, steps + 1)]
    return Load(kind, percent, 0, at_s, engine_s, rest_s, answers, reports)


def _sizes(answers: Sequence[Seen]) -> list[tuple[int, int]]:
    return [(one.prompt_tokens, one.output_tokens) for one in answers]


def _step(number: int, dice: Random) -> Step:
    """A fifth shorter than its cost: so much is done between two steps, say."""
    prefilled, decoded = dice.choice((0, 0, 40, 120)), dice.randint(1, 20)
    took_s = 0.8 * TRUE.step.step_s([(0, prefilled)] if prefilled else [], decoded, 0)
    ratio = dice.choice(TRUE.rest.ratios)
    return Step(0.05 * number, "worker-0", number, number, 1, prefilled, decoded, 0, ratio * took_s)


def test_costs_of_a_machine_are_found_from_what_its_lessons_took() -> None:
    """Reports say a fifth too little, CPU times do not. A load that is no lesson is predicted to what errors
    of `lanes` and 150 requests leave."""
    lessons = [load_of("lesson", 35, 8.0, 1), load_of("lesson", 65, 15.0, 2)]
    costs = learn(lessons, SETTING)
    assert costs.rest.token_s == pytest.approx(TRUE.rest.token_s, rel=1e-6)
    assert costs.rest.frame_s == pytest.approx(TRUE.rest.frame_s, rel=1e-6)
    assert costs.step.fixed_s == pytest.approx(TRUE.step.fixed_s, rel=0.2)
    load = load_of("predicted", 50, 11.0, 3)
    live, made = figures(load.answers), figures(replay(load, costs, SETTING))
    assert made["throughput"] == pytest.approx(live["throughput"], rel=0.03)
    for name in ("ttft_p50", "latency_p50", "latency_p99"):
        assert made[name] == pytest.approx(live[name], rel=0.15), name


@pytest.mark.slow
@pytest.mark.stack
def test_a_live_run_is_replayed(tmp_path: Path) -> None:
    words = ["sim-check", "--quick", "--requests", "24", "--max-tokens", "48"]
    assert main([*words, "--out", str(tmp_path), "--json", str(tmp_path / "r.json")]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    figures_ = result["figures"]
    assert result["failures"] == 0
    assert figures_["step_fixed_ms"] > 0
    assert abs(figures_["throughput_error_50"]) < 0.9
    assert {"ttft_p99_error_50", "latency_p50_error_50"} <= figures_.keys()
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    assert all(0 < row["live_ttft_s"] <= row["live_jct_s"] for row in rows)
    assert all(row["simulated_jct_s"] > 0 for row in rows)
    again = ["sim-check", "--loads", str(tmp_path / loads.FILE), "--json", str(tmp_path / "again.json")]
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again.json").read_text())["figures"] == figures_
