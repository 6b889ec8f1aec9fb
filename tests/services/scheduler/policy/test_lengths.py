"""Padded remaining lengths, what is learned about predictions, and deadlines by measured speeds.

Whatever a predictor says, a rest is between one token and what the limit leaves. Systematic errors are
learned, small ones and single ones are not, and old ones are forgotten.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.contract import Task
from services.scheduler.policy.lengths import Calibration, LengthEstimates, WorkerSpeeds, expected_rest_tokens
from services.scheduler.policy.options import TwoQueueOptions
from shared.messages.commands import LengthPrediction


def quantiles(*tokens: int) -> LengthPrediction:
    """rl, p50, p80, p90, p95."""
    rl, p50, p80, p90, p95 = tokens
    return LengthPrediction(
        rl_tokens=rl, p50_tokens=p50, p80_tokens=p80, p90_tokens=p90, p95_tokens=p95, model_version="t"
    )


def test_the_rest_is_padded_and_at_least_a_block() -> None:
    lengths = LengthEstimates(TwoQueueOptions(pad=0.15), block_tokens=16)
    guess = quantiles(100, 90, 120, 140, 160)
    assert lengths.rest_tokens(guess, 1, 500) == 114  # ceil(99 * 1.15)
    assert lengths.rest_tokens(guess, 95, 500) == 16
    assert lengths.rest_tokens(guess, 95, 100) == 5


def test_without_a_prediction_the_default_counts() -> None:
    lengths = LengthEstimates(TwoQueueOptions(pad=0.0, default_tokens=200), block_tokens=16)
    assert lengths.rest_tokens(None, 0, 1000) == 200
    assert lengths.rest_tokens(None, 0, 50) == 50
    assert lengths.rest_tokens(None, 400, 1000) == 100, "a quarter of what there is"


def test_a_quantile_may_be_allocated_instead_of_the_mean() -> None:
    lengths = LengthEstimates(TwoQueueOptions(pad=0.0, length="p90"), block_tokens=16)
    assert lengths.rest_tokens(quantiles(100, 90, 120, 140, 160), 0, 500) == 140


def test_beyond_the_prediction_the_quantiles_say_how_much_is_expected() -> None:
    guess = quantiles(100, 100, 200, 300, 400)
    assert expected_rest_tokens(guess, 400) == pytest.approx(50)  # the tail [400, 500]
    assert expected_rest_tokens(guess, 600) == pytest.approx(150)
    # [200,300] 10 %, [300,400] 5 %, [400,500] 5 %
    assert expected_rest_tokens(guess, 200) == pytest.approx((0.1 * 50 + 0.05 * 150 + 0.05 * 250) / 0.2)


def test_a_calibration_scales_the_rest_alike() -> None:
    calibration = Calibration()
    for _ in range(64):
        calibration.learn(400, 100)
    lengths = LengthEstimates(TwoQueueOptions(pad=0.0), 1, calibration)
    guess = quantiles(400, 400, 800, 1200, 1600)
    assert lengths.whole_tokens(guess, 5000) == 100
    assert lengths.rest_tokens(guess, 400, 5000) == math.ceil(expected_rest_tokens(guess, 1600) / 4)


@given(
    guess=st.none() | st.builds(quantiles, *[st.integers(-(10**6), 10**9)] * 5),
    limit=st.integers(1, 10_000),
    share=st.floats(0, 1),
    name=st.sampled_from(["mean", "p50", "p95"]),
)
def test_nonsense_never_leaves_the_bounds(
    guess: LengthPrediction | None, limit: int, share: float, name: str
) -> None:
    generated = int(share * (limit - 1))
    rest = LengthEstimates(TwoQueueOptions(length=name), 16).rest_tokens(guess, generated, limit)
    assert 1 <= rest <= limit - generated


def test_nothing_is_corrected_before_enough_is_known() -> None:
    calibration = Calibration()
    for _ in range(31):
        calibration.learn(1000, 100)
    assert calibration.factor == 1.0
    calibration.learn(1000, 100)
    assert calibration.factor == 0.25, "bounded"


def test_a_small_error_is_none() -> None:
    calibration = Calibration()
    for number in range(200):
        calibration.learn(100, 90 if number % 2 else 120)
    assert calibration.factor == 1.0


def test_it_forgets() -> None:
    calibration = Calibration()
    for _ in range(500):
        calibration.learn(1000, 500)
    for _ in range(2000):
        calibration.learn(100, 200)
    assert calibration.factor > 1.8


def test_the_default_becomes_what_unpredicted_answers_were() -> None:
    calibration = Calibration()
    assert calibration.default_tokens(512) == 512
    for _ in range(40):
        calibration.learn(None, 80)
    assert calibration.default_tokens(512) == 80 and calibration.factor == 1.0


def test_the_first_measurement_counts_whole_later_ones_are_smoothed() -> None:
    speeds = WorkerSpeeds()
    speeds.on_measured(0.0, 0.0)
    before = speeds.work_s(100, 100)
    speeds.on_measured(1000.0, 0.010)
    assert speeds.work_s(100, 100) == pytest.approx(1.1) and before != speeds.work_s(100, 100)
    speeds.on_measured(0.0, 0.020)
    assert speeds.decode_step_s == pytest.approx(0.012) and speeds.prefill_tokens_per_s == 1000.0


def test_a_deadline_is_the_scale_times_the_work_unless_the_task_has_its_own() -> None:
    speeds = WorkerSpeeds()
    speeds.on_measured(1000.0, 0.010)
    task = Task(("a", 0), 500, 100, 7.0)
    assert speeds.deadline_s(task, 50, 2.0) == pytest.approx(7 + 2 * (0.5 + 0.5))
    assert speeds.deadline_s(Task(("a", 0), 500, 100, 7.0, deadline_s=9.0), 50, 2.0) == 9.0
