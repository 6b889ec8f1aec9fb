"""A recording of the live core on a virtual clock, replayed: every decision is the same.

What the scheduler's and the workers' recorders hold is written down as `services record` writes it, read
again, and replayed by the simulator.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.scheduler.core.effects import Effect
from services.scheduler.policy import find_policy
from services.scheduler.policy.fleet_queue import FleetQueue
from services.scheduler.reporting import TermReport
from services.stack.record import FORMAT, written
from services.worker.core.costs.linear import LinearCost
from services.worker.core.steps import StepEffects
from services.worker.engine.step_record import StepRecord
from shared.errors import ConfigError
from shared.messages.commands import LengthPrediction
from shared.messages.recordings import TellRecorded
from shared.messages.sequence import SequenceRef
from shared.recorder import Recorder
from sim.meters import WorkerMeter
from sim.predictors import find_predictor
from sim.replay import Replay, main, read_recording, recorded_run
from sim.requests import SimRequest
from sim.routers import find_router
from tests.sim.live_loop import EngineOnClock, LiveLoop, LiveWorker
from tests.sim.test_live_fleet import PREDICTION_S, SETTINGS, SHAPE, WORKERS, asked, crowd, engine

COST = LinearCost("linear", 0.02, 0.0002, 0.0003, 0.000001)
"""A fit can find it exactly, so that what is compared are decisions."""


_TOLD_SETTINGS = ("chunked_prefill", "max_batch_sequences", "token_budget", "max_steps", "start_tokens")


class RecordedLoop(LiveLoop):
    """Notes what the live services note, on the loop's clock."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.scheduler = Recorder("scheduler", "scheduler-0", 1, clock=lambda: self.now_s)
        self.recorders: dict[str, Recorder] = defaultdict(
            lambda: Recorder("worker", "", 1, clock=lambda: self.now_s)
        )
        self._term = TermReport(self.scheduler)
        self._steps: dict[str, StepRecord] = {}
        super().__init__(*arguments, **options)

    def _submit(self, request: SimRequest) -> None:
        self._term.submitted(self._spec_of(request), known=False, queued=1)
        super()._submit(request)

    def _predict(self, ref: SequenceRef, told: LengthPrediction) -> None:
        self._term.predicted(ref, told)
        super()._predict(ref, told)

    def _end_step(self, worker: LiveWorker) -> None:
        assert worker.work is not None
        name = worker.process.name
        record = self._steps.setdefault(name, StepRecord(self.recorders[name]))
        record.ran(worker.work, self.now_s - worker.step_s, worker.step_s, StepEffects())
        super()._end_step(worker)

    def _carry_out(self, effects: list[Effect], now_s: float) -> None:
        for effect in effects:
            self._term.note(effect)
        super()._carry_out(effects, now_s)


def recorded(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The lines of a recording."""
    engines = [EngineOnClock(lambda let_pass: engine(let_pass, COST)) for _ in range(WORKERS)]
    loop = RecordedLoop(
        find_policy(policy),
        SHAPE,
        SETTINGS,
        find_predictor("sigma0.5", seed=seed),
        engines=engines,
        router=find_router("least_work"),
        spec_of=asked,
        prediction_delay_s=PREDICTION_S,
    )
    monkeypatch.setattr("services.scheduler.reporting.monotonic_s", lambda: loop.now_s)
    loop.run(crowd(seed))
    events = []
    for name, recorder in (("scheduler-0", loop.scheduler), *loop.recorders.items()):
        since_seq = 0
        while (told := recorder.recorded(TellRecorded(since_seq=since_seq))).events:
            events += written(name, told.events, 0.0)
            since_seq = told.next_seq
    setup = {
        "rules": {"policy": policy, "policy_options": {}, "queue": "", "outstanding_steps": 2, "ahead_s": 0.0}
        | {name: getattr(SETTINGS, name) for name in _TOLD_SETTINGS},
        "placement": "worst_fit",
        "workers": [
            {"worker": f"{at:05d}", "block_tokens": SHAPE.block_tokens, "total_blocks": SHAPE.capacity_blocks}
            for at in range(WORKERS)
        ],
    }
    lines = json.dumps(
        [{"format": FORMAT, "setup": setup}, sorted(events, key=lambda event: event["unix_s"])]
    )
    head, told_events = json.loads(lines)
    return head, told_events


def batches_of(worker: str, events: Sequence[dict[str, Any]]) -> list[frozenset[str]]:
    return [
        frozenset(name for name, *_ in (*event["own"], *event["chunks"]))
        for event in events
        if event["kind"] == "step" and event["instance"] == worker
    ]


@pytest.mark.parametrize("policy", ["kvasir", "vllm", "ecoserve", "orca"])
def test_a_recorded_run_is_decided_the_same_way_again(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, events = recorded(policy, 0, monkeypatch)
    monkeypatch.setattr(FleetQueue, "on_measured", lambda *_: None)
    monkeypatch.setattr(WorkerMeter, "tell", lambda *_: None)  # the loop measures nothing either
    run = recorded_run(head["setup"], events)
    assert len(run.requests) == 60
    replay = Replay(run)
    outcome = replay.as_it_was()
    agreed = replay.agreement(outcome)
    assert (agreed.requests, agreed.same_worker, agreed.same_order) == (60, 1.0, 1.0)
    for request, record in zip(run.requests, outcome.records, strict=True):
        assert request.ended_s is not None
        assert record.end_s == pytest.approx(request.ended_s - run.requests[0].arrival_s, abs=1e-6), (
            request.name
        )
        assert record.worker == int(request.worker)
    for worker in run.workers:
        assert [set(batch) for batch in run.batches[worker]] == [
            {(name, 0) for name in batch} for batch in batches_of(worker, events)
        ]


def test_more_workers_end_requests_earlier_and_the_same_setting_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, events = recorded("vllm", 0, monkeypatch)
    run = recorded_run(head["setup"], events)
    replay = Replay(run)
    slow = max(run.requests, key=lambda request: (request.ended_s or 0.0) - request.arrival_s)
    assert replay.what_if(slow.name[0]).later_s == 0.0
    more = replay.what_if(slow.name[0], more_workers=3)
    assert (more.policy, more.workers) == ("vllm", WORKERS + 3)
    assert more.later_s < -0.1
    other = replay.what_if(slow.name[0], policy="orca")
    assert (other.policy, other.workers) == ("orca", WORKERS)
    assert other.later_s != 0.0
    with pytest.raises(ConfigError, match="no whole request req_none"):
        replay.what_if("req_none")


def test_a_file_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    for text in ("", "nonsense\n", '{"format": "kvasir-recording-1"}\n', "[1]\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="services record"):
            read_recording(path)
    assert main([str(path)]) == 2
    assert "services record" in capsys.readouterr().err
