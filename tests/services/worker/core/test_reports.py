"""Reports are numbered whatever they are about, tell what was computed once, and how fast that was."""

import pytest

from services.worker.core.plans import QueuedPlan, StepWork
from services.worker.core.reports import WEIGHT, SpeedMeter
from tests.shared.messages.builders import plan

WORK = StepWork(QueuedPlan(plan(7, epoch=3, steps=2), 0.0, steps_done=1), (), (), ())


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
