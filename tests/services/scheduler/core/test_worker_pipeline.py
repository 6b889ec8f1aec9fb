"""A pipeline: plans made ahead, cut short for arrivals, in step with a fake worker."""

import msgspec

from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import HELD, Phase
from services.scheduler.policy.contract import PolicySettings
from tests.services.scheduler.world import small_world


def test_a_worker_always_has_the_next_step_queued() -> None:
    world = small_world(workers=1)
    request = world.ask_for("a", prompt_tokens=4, answer_tokens=60, max_tokens=60)
    world.until(lambda: len(request.tokens) == 1, limit_s=2.0)
    idle = 0
    while len(request.tokens) < 55:
        world.run_for(0.005)
        idle += not world.workers["worker-0"].core.has_plans
    assert idle == 0


def test_of_a_long_plan_two_steps_are_reported() -> None:
    world = small_world(workers=1)
    request = world.ask_for("a", prompt_tokens=4, answer_tokens=60, max_tokens=60)
    world.until(lambda: len(request.tokens) == 50, limit_s=5.0)
    worker = world.workers["worker-0"]
    assert len(worker.step_tokens) >= 50
    assert worker.core.report(world.now_s).stepped_seq <= 2 + 2 * -(-len(worker.step_tokens) // 8)


def test_short_steps_have_more_of_them_ahead() -> None:
    world = small_world(workers=1)
    request = world.ask_for("a", prompt_tokens=4, answer_tokens=60, max_tokens=60)
    world.until(lambda: len(request.tokens) == 1, limit_s=2.0)
    core = world.core
    pipeline = core._roster.pipelines["worker-0"]
    for step_s, ahead in ((0.0, 2), (0.014, 2), (0.003, 3), (0.0014, 6), (0.0001, 8)):
        pipeline.take_report(msgspec.structs.replace(pipeline.report, decode_step_s=step_s))
        assert pipeline.most_steps_ahead == ahead


def test_an_arrival_cuts_a_long_plan_short() -> None:
    world = small_world(workers=1, step_s=0.05)
    running = world.ask_for("a", prompt_tokens=4, answer_tokens=50, max_tokens=50)
    world.until(lambda: len(running.tokens) >= 10, limit_s=5.0)
    world.run_for(0.1)
    arrival = world.ask_for("b", prompt_tokens=4, answer_tokens=5, max_tokens=5)
    asked_s = world.now_s
    world.until(lambda: len(arrival.tokens) >= 1, limit_s=5.0)
    assert world.now_s - asked_s < 4 * 0.05
    assert any("supersedes=True" in plan for plan in world.lines("SendPlan"))
    world.until(lambda: running.over and arrival.over, limit_s=10.0)
    assert (running.tokens, arrival.tokens) == (running.expected, arrival.expected)
    assert len(world.lines("AskSnapshot")) == 1


def test_a_start_is_confirmed_by_the_first_step_of_its_plan() -> None:
    world = small_world(workers=1)
    request = world.ask_for("a", prompt_tokens=4, answer_tokens=20, max_tokens=20)
    world.until(lambda: bool(world.lines("SendPlan")), limit_s=2.0)
    core = world.core
    sequence = core._roster.sequences[request.key]
    assert not sequence.confirmed and sequence.phase in HELD
    world.until(lambda: len(request.tokens) == 1, limit_s=2.0)
    world.run_for(0.002)
    assert sequence.confirmed


def test_what_runs_smoothly_for_a_while_is_blamed_for_nothing_any_more() -> None:
    """Who causes a few resyncs in a row is given up: not one that caused a few in an hour."""
    world = small_world(workers=1)
    request = world.ask_for("a", prompt_tokens=4, answer_tokens=200, max_tokens=200)
    world.until(lambda: len(request.tokens) == 1, limit_s=2.0)
    roster = world.core._roster
    sequence, pipeline = roster.sequences[request.key], roster.pipelines["worker-0"]
    sequence.faults = 1
    while pipeline._smooth_reports < 16:
        assert sequence.faults == 1
        world.run_for(0.001)
    assert sequence.faults == 0 and not request.over


def test_drops_travel_alone_when_there_is_nothing_else_to_say() -> None:
    world = small_world(workers=1)
    request = world.ask_for("a", prompt_tokens=4, answer_tokens=20, max_tokens=20)
    world.until(lambda: len(request.tokens) > 2, limit_s=2.0)
    core = world.core
    core._roster.leave(core._roster.sequences[request.key], Phase.REPLACED, world.now_s)
    world.run_for(1.0)
    assert world.workers["worker-0"].held == {}
    assert core._roster.pipelines["worker-0"].outstanding_steps == 0
    assert len(world.lines("AskSnapshot")) == 1


def test_several_starts_share_a_plan_only_while_their_text_fits() -> None:
    rules = Rules(
        settings=PolicySettings(token_budget=64, max_batch_sequences=8, start_tokens=20), round_s=0.3
    )
    world = small_world(workers=1, rules=rules)
    requests = [world.ask_for(f"r{number}", 12, 5, 5) for number in range(3)]
    world.until(lambda: not world.unfinished(), limit_s=3.0)
    assert all(request.tokens == request.expected for request in requests)
    assert all(plan.count("SequenceSpec(") <= 1 for plan in world.lines("SendPlan"))
