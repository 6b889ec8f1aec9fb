"""What holds for every policy that ships: never more than there is, never a wedge, the same calls the same
batches."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy import BUILT_IN
from services.scheduler.policy.contract import PolicySettings, Task, WorkerShape
from tests.services.scheduler.policy.batch_rig import (
    BLOCK_TOKENS,
    CAPACITY_BLOCKS,
    Jobs,
    guesses_of,
    in_turn,
    jobs_of,
    play,
    rig,
    settings_of,
    truth,
)

every_policy = pytest.mark.parametrize("name", sorted(BUILT_IN))


@every_policy
@settings(max_examples=100, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of, lag=st.integers(0, 3))
def test_every_request_ends_within_every_limit(
    name: str, jobs: Jobs, policy_settings: PolicySettings, lag: int
) -> None:
    play(rig(BUILT_IN[name], policy_settings, lag=lag), jobs)


@every_policy
@settings(max_examples=60, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of, guesses=guesses_of, lag=st.integers(0, 2))
def test_whatever_is_predicted_every_request_ends(
    name: str, jobs: Jobs, policy_settings: PolicySettings, guesses: list[int | None], lag: int
) -> None:
    bench = rig(BUILT_IN[name], policy_settings, lag=lag)
    bench.predict = in_turn(guesses)
    play(bench, jobs)


@every_policy
@settings(max_examples=60, deadline=None)
@given(
    jobs=jobs_of,
    policy_settings=settings_of,
    stored=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    lag=st.integers(0, 3),
)
def test_whatever_is_stored_every_request_ends(
    name: str, jobs: Jobs, policy_settings: PolicySettings, stored: list[int], lag: int
) -> None:
    bench = rig(BUILT_IN[name], policy_settings, lag=lag)
    bench.stored = lambda job: stored[int(job.task.key[0][1:]) % len(stored)]
    play(bench, jobs)


@every_policy
def test_a_chunk_after_a_hit_starts_behind_it(name: str) -> None:
    bench = rig(BUILT_IN[name], PolicySettings(token_budget=8, max_batch_sequences=8), lag=0)
    bench.stored = lambda job: 36
    bench.arrive("r0", 40, 2, 4)
    bench.turn()
    bench.turn()
    (chunk,) = bench.batches[1].prefills
    assert (chunk.first_token, chunk.end_token) == (36, 40)


@every_policy
@settings(max_examples=30, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_true_predictions_break_nothing(name: str, jobs: Jobs, policy_settings: PolicySettings) -> None:
    bench = rig(BUILT_IN[name], policy_settings, blocks=2 * CAPACITY_BLOCKS)
    bench.predict = truth
    play(bench, jobs)


@every_policy
@settings(max_examples=50, deadline=None)
@given(
    jobs=jobs_of,
    policy_settings=settings_of,
    sizes=st.lists(st.integers(CAPACITY_BLOCKS, 2 * CAPACITY_BLOCKS), min_size=1, max_size=6),
    cancels=st.lists(st.integers(0, 24), max_size=8),
)
def test_resizes_and_cancels_wedge_nothing(
    name: str, jobs: Jobs, policy_settings: PolicySettings, sizes: list[int], cancels: list[int]
) -> None:
    bench = rig(BUILT_IN[name], policy_settings)
    for number, (prompt, length, limit, pause) in enumerate(jobs):
        bench.arrive(f"r{number:02}", prompt, length, limit)
        for _ in range(pause):
            bench.turn()
        bench.resize(sizes[number % len(sizes)])
        if number in cancels and bench.unfinished:
            bench.end(bench.unfinished[number % len(bench.unfinished)])
    bench.finish()


@settings(max_examples=100, deadline=None)
@given(
    jobs=jobs_of,
    policy_settings=settings_of,
    names=st.lists(st.sampled_from(sorted(BUILT_IN)), min_size=2, max_size=6),
)
def test_a_policy_goes_on_with_what_another_one_left(
    jobs: Jobs, policy_settings: PolicySettings, names: list[str]
) -> None:
    bench = rig(BUILT_IN[names[0]], policy_settings)
    for number, (prompt, length, limit, pause) in enumerate(jobs):
        bench.arrive(f"r{number:02}", prompt, length, limit)
        for _ in range(pause):
            bench.turn()
        bench.swap(BUILT_IN[names[number % len(names)]])
    bench.finish()


@every_policy
@settings(max_examples=30, deadline=None)
@given(jobs=jobs_of)
def test_equal_calls_make_equal_batches(name: str, jobs: Jobs) -> None:
    first, second = rig(BUILT_IN[name]), rig(BUILT_IN[name])
    play(first, jobs)
    play(second, jobs)
    assert first.batches == second.batches


def planning_ms(name: str, waiting: int) -> float:
    """CPU time of an arrival, an end and a plan with that many waiting: the least of some."""
    policy = BUILT_IN[name](WorkerShape(16, 400), PolicySettings(max_steps=1))
    for number in range(waiting):
        policy.on_arrival(Task((f"r{number:06}", 0), 20 + number % 300, 500, 0.001 * number), 0.0)
    least = math.inf
    for turn in range(60):
        begin = time.process_time()
        policy.on_arrival(Task((f"s{turn:06}", 0), 20 + turn, 500, 100.0 + turn), 100.0)
        batch = policy.plan(100.0 + 0.01 * turn)
        policy.on_ended((f"s{turn:06}", 0), 100.0)
        least = min(least, time.process_time() - begin) if batch is not None and turn > 10 else least
    return least * 1000


@every_policy
def test_a_plan_hardly_costs_more_where_a_hundred_times_as_many_wait(name: str) -> None:
    planning_ms(name, 10)
    assert planning_ms(name, 10_000) <= max(0.3, 4 * planning_ms(name, 100))


@every_policy
def test_events_of_unknown_keys_are_ignored(name: str) -> None:
    policy = BUILT_IN[name](WorkerShape(BLOCK_TOKENS, 8), PolicySettings())
    policy.on_ended(("a", 0), 0.0)
    policy.on_short(("a", 0), 1, 0.0)
    assert policy.plan(0.0) is None
    policy.check_integrity()
