"""What is outstanding at a worker: reports that match, and every way in which they may not."""

import pytest

from services.scheduler.core.outstanding import OutstandingPlans, Progress, Trouble
from services.scheduler.core.rules import Rules
from services.scheduler.policy.contract import PlannedBatch, PlannedDecode, PlannedPrefill
from shared.messages.plans import BatchPlan, SkippedItem, SkipReason, StepOutcome, WorkerStepped
from tests.shared.messages.builders import ref, worker_report

RULES = Rules(outstanding_steps=2, report_grace_s=0.25, plan_grace_s=1.0, snapshot_patience_s=10.0)
REF = ref("a")
DECODES = PlannedBatch(steps=4, decodes=(PlannedDecode(("a", 0), 4, 2),))
PREFILL = PlannedBatch(prefills=(PlannedPrefill(("a", 0), 0, 4, 1),))


def outstanding(*batches: PlannedBatch, supersedes: bool = False) -> OutstandingPlans:
    plans = OutstandingPlans(RULES, 3, 10, 0.0)
    for seq, batch in enumerate(batches, start=1):
        last = seq == len(batches)
        plan = BatchPlan(epoch=3, seq=seq, steps=batch.steps, supersedes=supersedes and last)
        plans.add(batch, plan, 0.0)
        plans.check_integrity()
    return plans


def stepped(
    seq: int,
    plan_seq: int = 1,
    done: int = 1,
    *,
    over: bool = False,
    epoch: int = 3,
    outcome: StepOutcome = StepOutcome.RAN,
    skipped: tuple[SkippedItem, ...] = (),
) -> WorkerStepped:
    return WorkerStepped(
        worker_id="worker-0",
        incarnation=1,
        seq=seq,
        epoch=epoch,
        plan_seq=plan_seq,
        steps_done=done,
        plan_over=over,
        outcome=outcome,
        skipped=skipped,
    )


def hear(
    plans: OutstandingPlans, event: WorkerStepped, *, known_to_be_over: bool = False
) -> Progress | Trouble:
    result = plans.on_stepped(event, lambda ref: known_to_be_over, 1.0)
    plans.check_integrity()
    return result


def beat(
    plans: OutstandingPlans, now_s: float, *, stepped_seq: int = 10, plan_seq: int = 1
) -> Trouble | None:
    report = worker_report(stepped_seq=stepped_seq, epoch=3, plan_seq=plan_seq)
    return plans.on_heartbeat(report, now_s)


def test_steps_count_down_and_a_finished_plan_leaves() -> None:
    plans = outstanding(DECODES)
    assert plans.steps == 4
    first = hear(plans, stepped(11, done=1))
    assert isinstance(first, Progress) and first.ran is not None and first.over == ()
    assert plans.steps == 3
    last = hear(plans, stepped(12, done=4, over=True))
    assert isinstance(last, Progress) and [sent.plan.seq for sent in last.over] == [1]
    assert len(plans) == 0


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
    assert outstanding(DECODES).is_pliable
    assert not outstanding(DECODES, PREFILL).is_pliable


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
    assert beat(plans, 0.7, stepped_seq=12) is None
    assert isinstance(beat(plans, 0.8, stepped_seq=12), Trouble)


def test_a_plan_that_the_worker_never_saw_is_trouble_after_a_moment() -> None:
    plans = outstanding(DECODES)
    assert beat(plans, 0.9, plan_seq=0) is None
    assert beat(plans, 1.1, plan_seq=1) is None
    assert isinstance(beat(plans, 1.1, plan_seq=0), Trouble)


def test_an_engine_that_hangs_is_trouble() -> None:
    plans = outstanding(DECODES)
    assert plans.on_tick(14.0) is None
    assert isinstance(plans.on_tick(16.0), Trouble)
    assert OutstandingPlans(RULES, 3, 10, 0.0).on_tick(100.0) is None
