"""Reports are numbered whatever they are about, tell what was computed once, and how fast that was."""

import pytest

from services.worker.core.plans import GivenUpPlan, QueuedPlan, StepWork
from services.worker.core.reports import WEIGHT, Identity, SpeedMeter, StepReports
from services.worker.core.sequence import HeldSequence
from services.worker.kv.core.block_pool import BlockPool
from shared.messages.plans import ShortStart, StepOutcome
from shared.messages.sequence import FinishReason
from tests.shared.messages.builders import plan, ref, spec

WORK = StepWork(QueuedPlan(plan(7, epoch=3, steps=2), 0.0, steps_done=1), (), (), ())


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(12, 4)


@pytest.fixture
def reports(pool: BlockPool) -> StepReports:
    return StepReports(Identity("worker-0", 42, "model", 64, "host"), pool)


def test_what_was_computed_is_told_once(reports: StepReports) -> None:
    reports.on_step(5, 0)
    reports.on_step(0, 2)
    told = [reports.of_step(WORK, (), plan_over=False, step_s=0.01) for _ in range(2)]
    assert [(event.prefilled_tokens, event.decoded_tokens) for event in told] == [(5, 2), (0, 0)]
    assert (told[0].epoch, told[0].plan_seq, told[0].steps_done, told[0].step_s) == (3, 7, 1, 0.01)
    assert (told[0].worker_id, told[0].incarnation) == ("worker-0", 42)


def test_numbers_have_no_gap_across_kinds(reports: StepReports) -> None:
    plans = [GivenUpPlan(3, seq, 0, StepOutcome.EXPIRED) for seq in (8, 9)]
    events = [
        reports.of_step(WORK, (), plan_over=True),
        *reports.of_given_up(plans),
        reports.between_steps(3, (ShortStart(ref=ref(), missing_tokens=4),)),
    ]
    assert [event.seq for event in events] == [1, 2, 3, 4] and reports.last_seq == 4
    assert [event.plan_seq for event in events] == [7, 8, 9, 0]
    assert [event.outcome for event in events[1:3]] == [StepOutcome.EXPIRED] * 2
    assert reports.of_given_up([]) == () and reports.last_seq == 4


def test_what_is_allocated_is_not_told_as_free(pool: BlockPool, reports: StepReports) -> None:
    pool.allocate(5)
    assert reports.between_steps(3, ()).free_blocks == 7


def test_an_end_is_told_with_its_reason_and_length(reports: StepReports) -> None:
    held = HeldSequence.from_spec(spec(ref(), [1, 2, 3], generated=[5, 6]), 64, now_s=0.0)
    held.finish_reason = FinishReason.STOP
    (ended,) = reports.of_step(WORK, [held], plan_over=True).ended
    assert (ended.ref, ended.finish_reason, ended.generated_tokens) == (ref(), FinishReason.STOP, 2)


def test_the_first_measurement_counts_whole_and_later_ones_by_weight() -> None:
    meter = SpeedMeter()
    meter.on_step(prefilled_tokens=0, decoded_tokens=4, step_s=0.010)
    assert meter.decode_step_s == 0.010
    meter.on_step(prefilled_tokens=0, decoded_tokens=4, step_s=0.020)
    assert meter.decode_step_s == pytest.approx(0.010 + WEIGHT * 0.010)


def test_prefill_is_measured_beside_decodes_without_their_share() -> None:
    meter = SpeedMeter()
    meter.on_step(prefilled_tokens=0, decoded_tokens=4, step_s=0.010)
    meter.on_step(prefilled_tokens=100, decoded_tokens=4, step_s=0.060)
    assert meter.prefill_tokens_per_s == pytest.approx(100 / 0.050)


def test_what_was_profiled_at_the_start_holds_until_steps_refresh_it() -> None:
    meter = SpeedMeter(1000.0)
    assert meter.prefill_tokens_per_s == 1000.0
    meter.on_step(prefilled_tokens=100, decoded_tokens=0, step_s=0.05)
    assert meter.prefill_tokens_per_s == pytest.approx(1000 + WEIGHT * 1000)


def test_a_few_tokens_say_nothing() -> None:
    meter = SpeedMeter()
    meter.on_step(prefilled_tokens=3, decoded_tokens=0, step_s=0.010)
    meter.on_step(prefilled_tokens=0, decoded_tokens=0, step_s=0.010)
    assert (meter.prefill_tokens_per_s, meter.decode_step_s) == (0.0, 0.0)
