"""The core against fake workers in virtual time: the protocol's single cases, one by one."""

from collections.abc import Callable
from typing import Any, ClassVar

from msgspec import structs
from pytest import MonkeyPatch

from services.scheduler.core.core import LEAST_TERM_S, SchedulerCore
from services.scheduler.core.effects import AskPlacement, Effect
from services.scheduler.core.roster import Roster
from services.scheduler.core.rules import Rules
from services.scheduler.core.worker_pipeline import WorkerPipeline
from services.scheduler.policy import find_policy
from services.scheduler.policy.first_come import VllmPolicy
from shared.messages.commands import LengthPrediction
from shared.messages.lengths import LengthsRevised, RevisedLength
from shared.messages.sequence import SequenceKey
from tests.services.scheduler.world import small_world
from tests.shared.messages.builders import predicted, worker_report
from tests.stack.world import World


def core_that_awaits(*starts: tuple[str, int]) -> SchedulerCore:
    return SchedulerCore(Rules(round_s=0.6), find_policy("kvasir"), 3, 0.0, awaited=starts)


def test_a_term_commands_once_all_that_were_there_have_been_heard() -> None:
    core = core_that_awaits(("worker-0", 4), ("worker-1", 7), ("worker-2", 1))
    core.on_worker_reported(worker_report("worker-0", incarnation=4, epoch=5), 0.05)
    core.on_worker_reported(worker_report("worker-1", incarnation=8), 0.1)  # It has been started anew.
    core.on_tick(0.12)
    assert not core.is_commanding, "worker-2 may obey a later epoch"
    core.on_worker_gone(("worker-2", 1), 0.15)
    core.on_tick(0.16)
    assert (core.is_commanding, core.epoch) == (True, 6)


def test_who_is_not_heard_again_is_waited_for_no_longer_than_a_round() -> None:
    core = core_that_awaits(("worker-0", 4))
    core.on_worker_reported(worker_report("worker-0", incarnation=3), 0.1)  # Of an earlier start.
    core.on_tick(0.59)
    assert not core.is_commanding
    core.on_tick(0.61)
    assert core.is_commanding


def test_who_has_heard_nobody_listens_for_a_whole_round() -> None:
    core = core_that_awaits()
    core.on_worker_reported(worker_report("worker-0"), 0.1)
    core.on_tick(0.5)
    assert not core.is_commanding


class Learning(VllmPolicy):
    """Notes how long it is told that answers became."""

    told: ClassVar[dict[str, int | None]] = {}

    def on_ended(self, key: SequenceKey, now_s: float, answer_tokens: int | None = None) -> None:
        self.told[key[0]] = answer_tokens
        super().on_ended(key, now_s, answer_tokens)


def test_a_policy_hears_how_long_answers_became_not_how_long_they_were_planned() -> None:
    Learning.told.clear()
    world = small_world(workers=1, policy=Learning)
    stopped = world.ask_for("stopped", prompt_tokens=5, answer_tokens=7, max_tokens=50)
    limited = world.ask_for("limited", prompt_tokens=5, answer_tokens=90, max_tokens=12)
    cancelled = world.ask_for("cancelled", prompt_tokens=5, answer_tokens=60, max_tokens=60)
    world.until(lambda: stopped.over and limited.over, limit_s=2.0)
    world.cancel(cancelled)
    world.run_for(0.5)
    assert Learning.told == {"stopped": 7, "limited": 12, "cancelled": None}


def test_equal_histories_make_equal_plans() -> None:
    logs = []
    for _ in range(2):
        world = small_world(7, kv_blocks=32)
        for number in range(12):
            world.ask_for(f"r{number}", 5 + number, 30, 40)
        world.until(lambda world=world: not world.unfinished(), limit_s=30.0)  # type: ignore[misc]
        logs.append(world.lines("SendPlan"))
    assert logs[0] == logs[1]


def test_a_higher_epoch_in_a_heartbeat_is_outbid_at_start_and_obeyed_later() -> None:
    world = small_world(workers=1)
    world.workers["worker-0"].says["epoch"] = 41
    request = world.ask_for("a", 4, 5, 5)
    world.until(lambda: request.over, limit_s=3.0)
    assert world.core.epoch == 42 and world.lines("StepDown") == []
    world.run_for(LEAST_TERM_S)
    world.workers["worker-0"].says["epoch"] = 50
    world.until(lambda: world.core.epoch == 51, limit_s=3.0)
    assert len(world.lines("StepDown")) == 1
    after = world.ask_for("b", 4, 5, 5)
    world.until(lambda: after.over, limit_s=3.0)


def test_an_epoch_that_no_scheduler_can_have_had_is_nobodys() -> None:
    """Keeps one heartbeat with an epoch of 2^62 from making every later scheduler refused."""
    world = small_world(workers=2)
    world.workers["worker-0"].says["epoch"] = 2**62
    request = world.ask_for("a", 4, 5, 5)
    world.until(lambda: request.over, limit_s=3.0)
    assert world.core.epoch < 2**32
    world.run_for(LEAST_TERM_S)
    assert world.lines("StepDown") == []


def test_a_workers_word_alone_does_not_end_a_term_that_has_just_begun() -> None:
    """Keeps a worker that claims ever later epochs from deposing the scheduler with each heartbeat."""
    world = small_world(workers=2)
    for number in range(1, 30):
        world.workers["worker-0"].says["epoch"] = 100 * number
        request = world.ask_for(f"a{number}", 4, 5, 5)
        world.until(lambda request=request: request.over, limit_s=3.0)  # type: ignore[misc]
        world.run_for(0.5)
    assert len(world.lines("StepDown")) <= world.now_s / LEAST_TERM_S + 1


def questions(world: World) -> list[bool]:
    """Of each word to placement, whether it asks."""
    return ["question=0" not in line for line in world.lines("AskPlacement")]


def test_where_there_is_one_worker_with_room_placement_is_told_and_not_waited_for() -> None:
    world = small_world(workers=1)
    world.is_lost = lambda effect: isinstance(effect, AskPlacement)
    world.run_for(1.0)
    request = world.ask_for("a", prompt_tokens=10, answer_tokens=20, max_tokens=50)
    world.run_for(0.005)
    assert len(world.lines("SendPlan")) == 2 and questions(world) == [False]
    world.until(lambda: request.over, limit_s=1.0)
    assert request.tokens == request.expected


def test_where_there_is_a_choice_placement_is_asked() -> None:
    world = small_world(workers=2)
    world.run_for(1.0)
    world.ask_for("a", prompt_tokens=10, answer_tokens=20, max_tokens=50)
    world.run_for(0.0015)
    assert world.lines("SendPlan") == [] and questions(world) == [True]


def test_where_limits_exceed_the_room_placement_is_asked() -> None:
    world = small_world(workers=1, kv_blocks=12)
    world.run_for(1.0)
    first = world.ask_for("a", prompt_tokens=10, answer_tokens=30, max_tokens=30)
    second = world.ask_for("b", prompt_tokens=10, answer_tokens=5, max_tokens=30)
    world.run_for(0.0015)
    assert questions(world) == [False, True]
    world.until(lambda: first.over and second.over, limit_s=5.0)


def test_an_event_costs_the_same_however_many_other_workers_there_are(monkeypatch: MonkeyPatch) -> None:
    """Every event asked every pipeline for plans: 15 µs with one worker, 1.7 ms with 256."""
    world = small_world(workers=64)
    world.run_for(1.0)
    request = world.ask_for("a", prompt_tokens=10, answer_tokens=40, max_tokens=50)
    world.until(lambda: len(request.tokens) > 3, limit_s=5.0)
    core = world.core
    visits: list[str] = []
    real = WorkerPipeline.next_plans

    def counting(pipeline: WorkerPipeline, now_s: float) -> list[Effect]:
        visits.append(pipeline.worker_id)
        return real(pipeline, now_s)

    monkeypatch.setattr(WorkerPipeline, "next_plans", counting)
    most = 0
    for name in ("on_stepped", "on_worker_reported", "on_gateway_reported", "on_submit", "on_placed"):
        handle = getattr(core, name)

        def counted(*event: Any, handle: Callable[..., Any] = handle) -> Any:
            nonlocal most
            visits.clear()
            answer = handle(*event)
            most = max(most, len(visits))
            return answer

        monkeypatch.setattr(core, name, counted)
    other = world.ask_for("b", prompt_tokens=10, answer_tokens=40, max_tokens=50)
    world.until(lambda: request.over and other.over, limit_s=5.0)
    assert most == 1


def test_visiting_changed_pipelines_makes_the_same_plans_as_visiting_all(monkeypatch: MonkeyPatch) -> None:
    def plans() -> list[str]:
        world = small_world(3, workers=4, kv_blocks=24, loss=0.01)
        for number in range(36):
            world.ask_for(f"r{number}", 5 + number, 10 + number, 50)
        world.until(lambda: not world.unfinished(), limit_s=60.0)
        return world.lines("SendPlan") + world.lines("AskPlacement")

    few = plans()
    monkeypatch.setattr(Roster, "changed_pipelines", lambda roster: list(roster.pipelines.values()))
    assert few == plans() and len(few) > 100


def test_revised_lengths_reach_the_policy_of_the_attempt_that_lives() -> None:
    told: list[tuple[str, int]] = []

    class Hearing(VllmPolicy):
        def on_predicted(self, key: SequenceKey, prediction: LengthPrediction, now_s: float) -> None:
            if prediction.is_calibrated:
                told.append((key[0], prediction.rl_tokens))

    world = small_world(workers=1, policy=Hearing)
    request = world.ask_for("a", prompt_tokens=10, answer_tokens=60, max_tokens=90)
    world.until(lambda: len(request.tokens) > 5, limit_s=2.0)
    known = world.core._roster.sequences[("a", 0)].ref
    stale = structs.replace(known, attempt=known.attempt + 1)
    prediction = structs.replace(predicted(44), is_calibrated=True)
    lengths = tuple(
        RevisedLength(ref=ref, generated_tokens=6, prediction=prediction)
        for ref in (stale, known, structs.replace(known, request_id="nobody"))
    )
    world.core.on_revised(LengthsRevised(predictor_id="predictor-0", lengths=lengths), world.now_s)
    assert told == [("a", 44)]
    strangers = LengthsRevised(predictor_id="predictor-0", lengths=lengths[2:])
    assert world.core.on_revised(strangers, world.now_s) == [], "another core's"
