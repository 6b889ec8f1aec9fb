"""Remaining lengths, what is learned about predictions, and the profile of usage over time."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import PolicySettings, Task, WorkerShape
from services.scheduler.policy.estimates import (
    BUCKET_TOKENS,
    MAX_BUCKETS,
    Calibration,
    LengthEstimates,
    UsageProfile,
    bucket_tokens,
    expected_rest_tokens,
)
from services.scheduler.policy.kvasir import KvasirPolicy
from services.scheduler.policy.options import TwoQueueOptions
from services.worker.core.costs import find_cost
from shared.messages.commands import LengthPrediction
from sim.predictors import find_predictor
from sim.requests import SimRequest
from sim.setup import Setup
from sim.simulation import Simulation
from tests.shared.messages.builders import predicted


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
    assert lengths.rest_tokens(guess, 95, 500) == 16 and lengths.rest_tokens(guess, 95, 100) == 5


def test_without_a_prediction_the_default_counts() -> None:
    lengths = LengthEstimates(TwoQueueOptions(pad=0.0, default_tokens=200), block_tokens=16)
    assert lengths.rest_tokens(None, 0, 1000) == 200 and lengths.rest_tokens(None, 0, 50) == 50
    assert lengths.rest_tokens(None, 400, 1000) == 100, "a quarter of what there is"


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
def test_nonsense_stays_in_bounds(
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


PROMPT, MOST, BLOCK = 40, 600, 4


def policy_of(**options: Any) -> KvasirPolicy:
    return KvasirPolicy(WorkerShape(BLOCK, 1024), PolicySettings(**options))


def revised(tokens: int) -> LengthPrediction:
    told = predicted(tokens)
    return LengthPrediction(
        **{name: getattr(told, name) for name in told.__struct_fields__ if name != "is_calibrated"},
        is_calibrated=True,
    )


@settings(max_examples=150)
@given(
    budget=st.sampled_from([16, 1024]),
    steps=st.sampled_from([1, 8]),
    events=st.lists(st.one_of(st.none(), st.integers(1, MOST)), min_size=1, max_size=25),
    is_revised=st.booleans(),
)
def test_whenever_a_prediction_comes_the_end_is_where_it_says(
    budget: int, steps: int, events: list[int | None], is_revised: bool
) -> None:
    """None: a plan; a number: a prediction, while it waits, prefills or runs. Early or late is the same."""
    policy, key = policy_of(token_budget=budget, max_steps=steps), ("a", 0)
    policy.on_arrival(Task(key, PROMPT, MOST, 0.0), 0.0)
    for turn, event in enumerate(events):
        if event is None:
            policy.plan(0.1 * turn)
        else:
            policy.on_predicted(key, revised(event) if is_revised else predicted(event), 0.1 * turn)
        policy.check_integrity()
        job = policy._table.jobs[key]
        if event is None or not (key in policy._running or key in policy._partial):
            continue
        ends = job.end_tokens - PROMPT
        assert job.generated_tokens <= ends <= MOST
        if event >= job.generated_tokens + BLOCK:
            assert event - 1 <= ends <= event, "where it says: the last token's KV is never needed"


def test_a_prediction_that_came_late_is_as_good_as_one_that_was_there() -> None:
    """The same batches from then on, to where it is expected to end."""
    early, late = policy_of(max_steps=1), policy_of(max_steps=1)
    for policy, told in ((early, predicted(30)), (late, None)):
        policy.on_arrival(Task(("a", 0), PROMPT, MOST, 0.0, prediction=told), 0.0)
        policy.plan(0.0)
    late.on_predicted(("a", 0), predicted(30), 0.01)
    for policy in (early, late):
        policy.on_arrival(Task(("b", 0), 3500, 500, 0.02, prediction=predicted(400)), 0.02)
    for turn in range(25):
        assert early.plan(0.1 + turn) == late.plan(0.1 + turn)


@pytest.mark.parametrize("ahead_s", [0.0, 0.008])
@pytest.mark.parametrize("length", [3, 6, 90])
def test_an_oracle_needs_no_correction(length: int, ahead_s: float) -> None:
    """It was corrected by the lengths that plans had reached beyond the end: by 2.97 on six tokens."""
    requests = [SimRequest(index, 0.05 * index, 50, length, 1024) for index in range(200)]
    setup = Setup(
        "kvasir",
        WorkerShape(32, 480),
        PolicySettings(token_budget=1024, max_steps=16, start_tokens=1 << 30),
        find_cost("llama2-7b-a100"),
        find_predictor("oracle"),
        ahead_s=ahead_s,
    )
    simulation = Simulation(setup, requests)
    simulation.run()
    policy = simulation._workers[0].policy
    assert isinstance(policy, KvasirPolicy)
    calibration = policy._lengths._calibration
    assert calibration is not None and calibration._actual_tokens == pytest.approx(length)
    assert calibration.factor == 1.0


@given(factor=st.floats(0.3, 3.5), whole=st.integers(10, 500), share=st.floats(0, 0.9))
def test_what_is_calibrated_already_is_taken_as_it_is(factor: float, whole: int, share: float) -> None:
    """And teaches nothing: else the correction of the others would drift to 1."""
    calibration = Calibration()
    estimates = LengthEstimates(TwoQueueOptions(pad=0.0), 1, calibration)
    for _ in range(64):
        estimates.learn(predicted(100), max(1, round(100 * factor)))
    before = calibration.factor
    for _ in range(64):
        estimates.learn(revised(100), 7)
    assert calibration.factor == before
    generated = int(share * whole)
    assert estimates.rest_tokens(revised(whole), generated, 4096) == whole - generated
    scaled = max(1, round(whole * before)) - generated
    if scaled > 0:
        assert estimates.rest_tokens(predicted(whole), generated, 4096) == scaled


BLOCK_TOKENS = 4
Growing = tuple[int, int, int]


def growing_of(rest: int) -> st.SearchStrategy[Growing]:
    return st.tuples(st.integers(1, 200), st.integers(0, rest), st.integers(0, 3)).map(
        lambda drawn: (drawn[0], drawn[0] + drawn[1], -(-drawn[0] // BLOCK_TOKENS) + drawn[2])
    )


def most_used(growing: list[Growing], constant: int) -> int:
    """Step by step, with ends as predicted."""
    most = 0
    for step in range(max((end - now for now, end, _ in growing), default=0) + 1):
        used = constant
        for now, end, held in growing:
            if now + step <= end:
                used += max(held, -(-(now + step) // BLOCK_TOKENS))
        most = max(most, used)
    return most


@given(growing=st.lists(growing_of(150), max_size=8), constant=st.integers(0, 40), limit=st.integers(0, 300))
def test_what_it_admits_fits_at_every_step(growing: list[Growing], constant: int, limit: int) -> None:
    admitted: list[Growing] = []
    for now, end, held in growing:
        profile = UsageProfile(list(admitted), constant + held, limit, BLOCK_TOKENS)
        fits = profile.fits(now, end, held)
        assert fits == profile.which_fit([(now, end, held)])[0]
        if fits:
            admitted.append((now, end, held))
            profile.start(now, end, held)
            assert profile.free_blocks >= 0
        assert not admitted or most_used(admitted, constant) <= limit


@given(growing=st.lists(growing_of(400), min_size=1, max_size=6), constant=st.integers(0, 40))
def test_starting_one_by_one_is_like_all_at_once(growing: list[Growing], constant: int) -> None:
    held = sum(item[2] for item in growing)
    one_by_one = UsageProfile([], constant + held, 1000, BLOCK_TOKENS)
    for item in growing:
        one_by_one.start(*item)
    at_once = UsageProfile(growing, constant, 1000, BLOCK_TOKENS)
    assert one_by_one.free_blocks == at_once.free_blocks


def test_one_that_ends_early_fits_into_what_another_needs_later() -> None:
    """A pipelined guest: exact allocations would refuse it."""
    host = (0, 640, 0)
    profile = UsageProfile([host], 0, 160, BLOCK_TOKENS)
    assert profile.fits(0, 256, 0) and not profile.fits(0, 384, 0)


def test_beyond_the_last_bucket_lengths_still_count() -> None:
    longest = BUCKET_TOKENS * MAX_BUCKETS
    profile = UsageProfile([], 10, 3000, BLOCK_TOKENS)
    assert profile.fits(0, longest, 0) and not profile.fits(0, 2 * longest, 0)


@pytest.mark.parametrize(
    ("rests", "kv_tokens", "expected"),
    [
        ([], 1600, 32),
        ([400] * 30, 16 * 32 * 30, 32),
        ([400] * 31, 16 * 32 * 30, 16),
        ([60] * 136, 480 * 32, 4),
        ([60] * 135 + [2000], 480 * 32, 8),
        ([60] * 135 + [1 << 20], 480 * 32, 32),
    ],
)
def test_buckets_are_as_short_as_lengths_allow(rests: list[int], kv_tokens: int, expected: int) -> None:
    assert bucket_tokens(rests, kv_tokens) == expected
