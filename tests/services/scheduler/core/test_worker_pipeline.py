"""A pipeline: plans made ahead, cut short for arrivals, and what is outstanding at a worker."""

from typing import Any

import msgspec
import pytest

from services.scheduler.core.outstanding import OutstandingPlans, Progress, Trouble
from services.scheduler.core.rules import Rules
from services.scheduler.core.sequence import HELD, Phase
from services.scheduler.policy.contract import PlannedBatch, PlannedDecode, PlannedPrefill, PolicySettings
from shared.messages.plans import BatchPlan, SkippedItem, SkipReason, StepOutcome, WorkerStepped
from tests.services.scheduler.world import UNMEASURED, small_world, started
from tests.shared.messages.builders import ref, worker_report
from tests.stack.actors import Request
from tests.stack.world import World


def test_a_worker_always_has_the_next_step_queued() -> None:
    world, request = started(1)
    idle = 0
    while len(request.tokens) < 55:
        world.run_for(0.005)
        idle += not world.workers["worker-0"].core.has_plans
    assert idle == 0


def test_of_a_long_plan_two_steps_are_reported() -> None:
    world, _ = started(50)
    worker = world.workers["worker-0"]
    assert len(worker.step_tokens) >= 50
    assert worker.core.report(world.now_s).stepped_seq <= 2 + 2 * -(-len(worker.step_tokens) // 8)


def test_short_steps_have_more_of_them_ahead() -> None:
    world, _ = started(1)
    pipeline = world.core._roster.pipelines["worker-0"]
    for step_s, ahead in ((0.0, 2), (0.014, 2), (0.003, 3), (0.0014, 6), (0.0001, 8)):
        pipeline.take_report(msgspec.structs.replace(pipeline.report, decode_step_s=step_s))
        assert pipeline.most_steps_ahead == ahead


@pytest.mark.parametrize("step_s", [0.01, 1.0])
def test_no_plan_expires_before_a_slow_worker_can_have_run_it(step_s: float) -> None:
    world, request = started(1, step_s=step_s, says={**UNMEASURED, "decode_step_s": step_s})
    world.until(lambda: request.over, limit_s=100.0)
    lasting = f"valid_for_s={max(5.0, 9 * step_s)}"
    assert sum(lasting in plan for plan in world.lines("SendPlan")) > 3
    assert len(world.lines("AskSnapshot")) == 1


def test_an_idle_worker_is_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world, request = started(1, answer_tokens=5)
    world.until(lambda: request.over, limit_s=5.0)
    world.run_for(0.5)
    plans: list[float] = []
    monkeypatch.setattr(world.core._roster.pipelines["worker-0"].policy, "plan", plans.append)
    world.run_for(1.0)
    assert plans == []


def check_cut(world: World, *requests: Request) -> None:
    assert any("supersedes=True" in plan for plan in world.lines("SendPlan"))
    world.until(lambda: not world.unfinished(), limit_s=20.0)
    assert all(request.tokens == request.expected for request in requests)
    assert len(world.lines("AskSnapshot")) == 1


def test_an_arrival_cuts_a_long_plan_short() -> None:
    world, running = started(10, answer_tokens=50, step_s=0.05)
    world.run_for(0.1)
    arrival = world.ask_for("b", prompt_tokens=4, answer_tokens=5, max_tokens=5)
    asked_s = world.now_s
    world.until(lambda: len(arrival.tokens) >= 1, limit_s=5.0)
    assert world.now_s - asked_s < 4 * 0.05
    check_cut(world, running, arrival)


@pytest.mark.parametrize("answer_tokens", range(20, 28))
def test_an_end_cuts_a_long_plan_short_where_a_prompt_waits_for_its_room(answer_tokens: int) -> None:
    world, running = started(2, answer_tokens=150, step_s=0.05, kv_blocks=64)
    short = world.ask_for("b", prompt_tokens=190, answer_tokens=answer_tokens, max_tokens=50)
    world.until(lambda: len(short.tokens) >= 2, limit_s=5.0)
    waiting = world.ask_for("c", prompt_tokens=60, answer_tokens=5, max_tokens=5)
    world.until(lambda: short.over, limit_s=5.0)
    ended_s, begun = world.now_s, len(waiting.tokens)
    world.until(lambda: len(waiting.tokens) >= 1, limit_s=5.0)
    assert begun == 0 and world.now_s - ended_s < 4 * 0.05
    check_cut(world, running, short, waiting)


def test_a_start_is_confirmed_by_the_first_step_of_its_plan() -> None:
    world = small_world(workers=1)
    request = world.ask_for("a", prompt_tokens=4, answer_tokens=20, max_tokens=20)
    world.until(lambda: bool(world.lines("SendPlan")), limit_s=2.0)
    sequence = world.core._roster.sequences[request.key]
    assert not sequence.confirmed and sequence.phase in HELD
    world.until(lambda: len(request.tokens) == 1, limit_s=2.0)
    world.run_for(0.002)
    assert sequence.confirmed


def test_what_runs_smoothly_for_a_while_is_blamed_for_nothing_any_more() -> None:
    """Who causes a few resyncs in a row is given up: not one that caused a few in an hour."""
    world, request = started(1, answer_tokens=200)
    roster = world.core._roster
    sequence, pipeline = roster.sequences[request.key], roster.pipelines["worker-0"]
    sequence.faults = 1
    while pipeline._smooth_reports < 16:
        assert sequence.faults == 1
        world.run_for(0.001)
    assert sequence.faults == 0 and not request.over


def test_drops_travel_alone_when_there_is_nothing_else_to_say() -> None:
    world, request = started(3, answer_tokens=20)
    core = world.core
    core._roster.leave(core._roster.sequences[request.key], Phase.REPLACED, world.now_s)
    world.run_for(1.0)
    assert world.workers["worker-0"].held == {} and core._roster.pipelines["worker-0"].outstanding_steps == 0
    assert len(world.lines("AskSnapshot")) == 1


def test_several_starts_share_a_plan_only_while_their_text_fits() -> None:
    settings = PolicySettings(token_budget=64, max_batch_sequences=8, start_tokens=20)
    world = small_world(workers=1, rules=Rules(settings=settings, round_s=0.3))
    requests = [world.ask_for(f"r{number}", 12, 5, 5) for number in range(3)]
    world.until(lambda: not world.unfinished(), limit_s=3.0)
    assert all(request.tokens == request.expected for request in requests)
    assert all(plan.count("SequenceSpec(") <= 1 for plan in world.lines("SendPlan"))


RULES = Rules(outstanding_steps=2, report_grace_s=0.25, plan_grace_s=1.0, snapshot_patience_s=10.0)
REF = ref("a")
DECODES = PlannedBatch(steps=4, decodes=(PlannedDecode(("a", 0), 4, 2),))
PREFILL = PlannedBatch(prefills=(PlannedPrefill(("a", 0), 0, 4, 1),))


def outstanding(*batches: PlannedBatch, supersedes: bool = False) -> OutstandingPlans:
    plans = OutstandingPlans(RULES, 3, 10, 0.0)
    for seq, batch in enumerate(batches, start=1):
        cuts = supersedes and seq == len(batches)
        plans.add(batch, BatchPlan(epoch=3, seq=seq, steps=batch.steps, supersedes=cuts), 0.0)
        plans.check_integrity()
    return plans


def stepped(seq: int, plan_seq: int = 1, done: int = 1, over: bool = False, **also: Any) -> WorkerStepped:
    fields = {"worker_id": "worker-0", "incarnation": 1, "epoch": 3, "outcome": StepOutcome.RAN, **also}
    return WorkerStepped(seq=seq, plan_seq=plan_seq, steps_done=done, plan_over=over, **fields)


def hear(plans: OutstandingPlans, event: WorkerStepped, known_to_be_over: bool = False) -> Progress | Trouble:
    result = plans.on_stepped(event, lambda ref: known_to_be_over, 1.0)
    plans.check_integrity()
    return result


def beat(plans: OutstandingPlans, now_s: float, **counts: Any) -> Trouble | None:
    report = worker_report(epoch=3, **{"stepped_seq": 10, "plan_seq": 1, **counts})
    return plans.on_heartbeat(report, now_s)


def test_steps_count_down_and_a_finished_plan_leaves() -> None:
    plans = outstanding(DECODES)
    assert plans.steps == 4
    first = hear(plans, stepped(11, done=1))
    assert isinstance(first, Progress) and first.ran is not None and first.over == ()
    assert plans.steps == 3
    last = hear(plans, stepped(12, done=4, over=True))
    assert isinstance(last, Progress) and [sent.plan.seq for sent in last.over] == [1] and len(plans) == 0


def test_old_reports_and_those_of_other_epochs_say_nothing() -> None:
    plans = outstanding(DECODES)
    for event in (stepped(10), stepped(11, epoch=2), stepped(12, plan_seq=7, outcome=StepOutcome.EXPIRED)):
        assert hear(plans, event) == Progress()
    assert plans.steps == 4


@pytest.mark.parametrize(
    "event",
    [
        stepped(13),
        stepped(11, outcome=StepOutcome.EXPIRED, over=True),
        stepped(11, outcome=StepOutcome.STALE_EPOCH, over=True),
        stepped(11, skipped=(SkippedItem(ref=REF, reason=SkipReason.NO_BLOCKS),)),
        stepped(11, plan_seq=0, done=0, skipped=(SkippedItem(ref=REF, reason=SkipReason.NO_BLOCKS),)),
    ],
)
def test_what_was_not_foreseen_is_trouble(event: WorkerStepped) -> None:
    assert isinstance(hear(outstanding(DECODES), event), Trouble)


def test_a_skip_of_what_is_known_to_be_over_is_no_trouble() -> None:
    event = stepped(11, skipped=(SkippedItem(ref=REF, reason=SkipReason.UNKNOWN),))
    assert isinstance(hear(outstanding(DECODES), event, known_to_be_over=True), Progress)
    trouble = hear(outstanding(DECODES), event)
    assert isinstance(trouble, Trouble) and trouble.culprits == (REF,)


@pytest.mark.parametrize("reason", [SkipReason.NO_BLOCKS, SkipReason.MISALIGNED])
def test_a_skip_for_lack_of_blocks_is_told_from_others(reason: SkipReason) -> None:
    trouble = hear(outstanding(DECODES), stepped(11, skipped=(SkippedItem(ref=REF, reason=reason),)))
    assert isinstance(trouble, Trouble) and trouble.is_shortage == (reason is SkipReason.NO_BLOCKS)


def test_long_decodes_can_be_cut_and_nothing_else() -> None:
    assert outstanding(DECODES).is_pliable and not outstanding(DECODES, PREFILL).is_pliable


def test_a_cut_is_resolved_by_the_reports_about_the_plans_before_it() -> None:
    plans = outstanding(DECODES, DECODES, PREFILL, supersedes=True)
    assert plans.is_cut
    cut = hear(plans, stepped(11, 1, 3, outcome=StepOutcome.SUPERSEDED, over=True))
    assert isinstance(cut, Progress) and cut.ran is None and cut.over[0].steps_done == 3
    assert plans.is_cut
    hear(plans, stepped(12, 2, 0, outcome=StepOutcome.SUPERSEDED, over=True))
    assert not plans.is_cut


def test_a_plan_passed_over_counts_as_cut_or_is_trouble() -> None:
    passed = hear(outstanding(DECODES, DECODES), stepped(11, 2, 1))
    assert isinstance(passed, Progress) and [sent.steps_done for sent in passed.over] == [0]
    assert isinstance(hear(outstanding(PREFILL, DECODES), stepped(11, 2, 1)), Trouble)


def test_a_heartbeat_ahead_of_the_reports_is_given_a_moment() -> None:
    plans = outstanding(DECODES)
    assert beat(plans, 0.1, stepped_seq=11) is None
    hear(plans, stepped(11))
    assert beat(plans, 0.5, stepped_seq=12) is None, "another report is under way"
    assert beat(plans, 0.7, stepped_seq=12) is None and isinstance(beat(plans, 0.8, stepped_seq=12), Trouble)


def test_a_plan_that_the_worker_never_saw_is_trouble_after_a_moment() -> None:
    plans = outstanding(DECODES)
    assert beat(plans, 0.9, plan_seq=0) is None and beat(plans, 1.1, plan_seq=1) is None
    assert isinstance(beat(plans, 1.1, plan_seq=0), Trouble)


def test_an_engine_that_hangs_is_trouble() -> None:
    plans = outstanding(DECODES)
    assert plans.on_tick(14.0, 0.0) is None and isinstance(plans.on_tick(16.0, 0.0), Trouble)
    assert plans.on_tick(16.0, 2.0) is None and isinstance(plans.on_tick(18.0, 2.0), Trouble)
    assert OutstandingPlans(RULES, 3, 10, 0.0).on_tick(100.0, 0.0) is None
