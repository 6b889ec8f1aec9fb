"""`bench scheduler` on a small scale: the same calls for every policy, and figures under the agreed names."""

from pathlib import Path

import pytest

from bench.micro import scheduler
from bench.micro.lanes import RUNNING, BusyFleet
from services.scheduler.core.effects import Effect
from services.scheduler.core.worker_pipeline import WorkerPipeline
from tests.bench.rig import context_of


def test_figures_have_the_agreed_names(tmp_path: Path) -> None:
    words = (
        "--policies",
        "kvasir,vllm",
        "--queued",
        "5",
        "50",
        "--calls",
        "20",
        "--replays",
        "1",
        "--lanes",
        "3",
    )
    outcome = scheduler.run(context_of("scheduler", tmp_path, *words, seed=7))
    names = {"plan_ms_p50_q5", "plan_ms_p99_q5", "plan_ms_p50_q50", "plan_ms_p99_q50", "growth"}
    events = {"event_ms_p50_lanes3", "event_ms_p99_lanes3"}
    assert set(outcome.figures) == names | events | {f"vllm_{name}" for name in names}
    assert all(outcome.figures[name] > 0 for name in names - {"growth"})
    assert len(outcome.tables[0].rows) == 4


def test_one_event_visits_only_workers_to_which_something_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = BusyFleet("vllm", 40, 1)
    assert fleet._core.running == 40 * RUNNING and fleet._core.queued == 0
    planned: list[str] = []
    plain = WorkerPipeline.next_plans

    def counted(self: WorkerPipeline, now_s: float) -> list[Effect]:
        planned.append(self.worker_id)
        return plain(self, now_s)

    monkeypatch.setattr(WorkerPipeline, "next_plans", counted)
    for on_event, most in ((fleet.turn, 8), (fleet.heartbeat, 1), (fleet.tick, 16)):
        for _ in range(20):
            planned.clear()
            on_event()
            assert len(set(planned)) <= most
