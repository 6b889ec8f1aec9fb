"""`bench fleet-scale`: two small fleets, the checks of answers, and the simulation."""

from pathlib import Path

import pytest
from pytest import MonkeyPatch

from bench.kit.load import Answer
from bench.live import fleet_scale
from bench.live.fleet_scale import Spent, carried_steps_s, changed_answers, expected_text, growth
from bench.registry import find
from shared.errors import ConfigError
from sim import rooms
from sim.case import Case, run_case
from sim.summary import summarize
from sim.workloads import find_source
from tests.bench.rig import context_of


def test_growth_is_an_exponent_and_small_costs_have_none() -> None:
    costs = {
        "square": {10.0: 1.0, 100.0: 100.0},
        "linear": {10.0: 2.0, 100.0: 20.0},
        "none": {10.0: 0.01, 100.0: 0.05},
    }
    assert growth(costs) == {"square": pytest.approx(2.0), "linear": pytest.approx(1.0)}


def test_what_a_scheduler_carries_is_extrapolated_to_a_whole_core() -> None:
    idle, busy = Spent({}, 10.0, busiest_s=1.0), Spent({}, 20.0, steps=1000, busiest_s=6.0)
    assert carried_steps_s(idle, busy) == pytest.approx(0.9 / (0.2 / 50))


def test_an_answer_is_the_simulated_engines_or_has_changed() -> None:
    right, other, failed = (Answer(0.0, pieces=[expected_text(seed, 5)]) for seed in (0, 2, 1))
    failed.error = "refused"
    assert changed_answers([right, other, failed], 5) == 1, "the second is another seed's; a lost one is none"


@pytest.mark.stack
@pytest.mark.slow
def test_two_fleets_are_measured_by_process(tmp_path: Path) -> None:
    words = ("--workers", "2", "4", "--step-s", "0.2", "--tokens", "4", "--seconds", "2")
    how = (*words, "--schedulers", "2", "--settings", "scheduler.max_batch_sequences=32")
    outcome = find("fleet-scale").load().run(context_of("fleet-scale", tmp_path, *how))
    figures = outcome.figures
    assert (figures["lost"], figures["changed"], outcome.failures) == (0, 0, 0)
    told = ("scheduler_us_per_step_w4", "control_us_per_token_w4", "two_schedulers")
    assert all(figures[name] > 0 for name in told)
    assert [row[0] for row in outcome.tables[0].rows] == list(fleet_scale.KINDS)


def test_a_large_simulated_fleet_serves_as_if_all_its_rooms_were_compared(monkeypatch: MonkeyPatch) -> None:
    found = []
    for many in (16, 1000):
        monkeypatch.setattr(rooms, "MANY_WORKERS", many)
        case = Case(find_source("sharegpt", None), "kvasir", workers=20, requests=300, rate_per_s=60.0,
                    placement="prefix_aware")  # fmt: skip
        found.append(summarize(run_case(case)))
    del found[0]["plan_ms"], found[1]["plan_ms"], found[0]["planning_share"], found[1]["planning_share"]
    assert found[0] == found[1]


def test_a_size_is_simulated_and_another_form_is_refused(tmp_path: Path) -> None:
    run = find("fleet-scale").load().run
    outcome = run(context_of("fleet-scale", tmp_path, "--simulate", "20x1000"))
    assert outcome.figures["simulate_20x1k_min"] > 0 and outcome.simulated
    with pytest.raises(ConfigError, match="WORKERSxREQUESTS"):
        run(context_of("fleet-scale", tmp_path, "--simulate", "20"))
