"""`bench placement` on a small scale: replays conserve, adversaries stay in bounds, figures have names."""

from pathlib import Path

import pytest

from bench.simulated.placement import bench, replay
from bench.simulated.placement.jobs import A100, Job, Workload, make_jobs
from bench.simulated.placement.replay import (
    BEST_FIT,
    MELL,
    MELL_BY_OPERATION,
    SIDES,
)
from tests.bench.rig import context_of


def jobs(duration_s: float = 120.0, rate_per_s: float | None = 0.5) -> list[Job]:
    workload = Workload("w", "w", rate_per_s, duration_s)
    return make_jobs(workload, A100, data=None, source=None, seed=3)[0]


def test_sides_see_the_same_jobs_and_batching_saves_moves() -> None:
    conversations = jobs(500.0)
    tallies = {
        side.label: side.run(conversations, A100, 200.0) for side in (MELL, MELL_BY_OPERATION, BEST_FIT)
    }
    volumes = {round(tally.volume, 6) for tally in tallies.values()}
    assert len(volumes) == 1
    mell, single, tight = (tallies[side.label] for side in (MELL, MELL_BY_OPERATION, BEST_FIT))
    assert mell.mean_gpus() < tight.mean_gpus() and mell.recomputes == 0 < tight.recomputes
    assert mell.moves < single.moves and single.moves_max <= 10
    assert all(tally.waits == 0 for tally in tallies.values())


def test_figures_have_the_agreed_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WARM_UP_S", 60.0)
    monkeypatch.setattr(bench, "QUICK_AZURE_S", 120.0)
    outcome = bench.run(context_of("placement", tmp_path, "--duration", "120", "--gpus", "10", "40", seed=7))
    agreed = {"gpus_vs_ideal", "gpus_vs_bf", "gpus_vs_wf", "gpus_vs_lb", "utilization", "migrations_vs_lb"}
    agreed |= {"worst_ratio", "moves_max", "ops_per_s"}
    assert agreed <= set(outcome.figures) and set(bench.HEADLINE) <= set(outcome.figures)
    assert outcome.simulated and outcome.failures == 0
    assert len(outcome.tables[0].rows) == len(SIDES)


def test_with_migration_more_requests_keep_their_kv() -> None:
    """Two GPUs that two growing conversations each fill: without a move the youngest lose what they had."""
    growing = [Job(index, float(index), 1600, 4000, 8000) for index in range(8)]
    found = replay.measure(growing, A100, 2.0)
    by_policy = {one.policy: one for one in found if one.load == 1.0}
    assert by_policy["mell"].served >= max(by_policy[name].served for name in replay.WITHOUT)
    assert all(0 < one.ratio <= 1 and one.requests == 8 for one in found)
    made = replay.figures(found)
    assert made["served_gain_1"] >= 1 and {f"served_mell_{load:g}" for load in replay.LOADS} <= made.keys()
