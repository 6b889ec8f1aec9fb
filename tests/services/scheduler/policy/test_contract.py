"""What holds for every policy that ships: never more than there is, never a wedge, the same calls the same
batches."""

import math
import time
from typing import Any

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
from tests.shared.messages.builders import predicted

every_policy = pytest.mark.parametrize("name", sorted(BUILT_IN))


@every_policy
@settings(max_examples=80)
@given(
    jobs=jobs_of,
    policy_settings=settings_of,
    guesses=st.just("the truth") | st.just([None]) | guesses_of,
    stored=st.just([0]) | st.lists(st.integers(0, 60), min_size=1, max_size=8),
    sizes=st.lists(st.integers(CAPACITY_BLOCKS, 2 * CAPACITY_BLOCKS), max_size=6),
    cancels=st.lists(st.integers(0, 24), max_size=8),
    priorities=st.just([0]) | st.lists(st.integers(-2, 2), min_size=1, max_size=5),
    lag=st.integers(0, 3),
)
def test_every_request_ends_within_every_limit(
    name: str,
    jobs: Jobs,
    policy_settings: PolicySettings,
    guesses: Any,
    stored: list[int],
    sizes: list[int],
    cancels: list[int],
    priorities: list[int],
    lag: int,
) -> None:
    """Whatever is predicted, stored already or cancelled, and however large the worker is by then."""
    bench = rig(BUILT_IN[name], policy_settings, lag=lag)
    bench.predict = truth if guesses == "the truth" else in_turn(guesses)
    bench.stored = lambda job: stored[int(job.task.key[0][1:]) % len(stored)]

    def disturb(number: int) -> None:
        if sizes:
            bench.resize(sizes[number % len(sizes)])
        if number in cancels and bench.unfinished:
            bench.end(bench.unfinished[number % len(bench.unfinished)])

    play(bench, jobs, disturb, priorities)


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"fastgen"}))
def test_without_chunks_prompts_go_whole_even_one_beyond_the_budget(name: str) -> None:
    """But for `fastgen`, whose steps are never above their target."""
    limits = PolicySettings(token_budget=64, max_batch_sequences=8, chunked_prefill=False)
    bench = rig(BUILT_IN[name], limits, blocks=64, lag=0)
    bench.predict = truth
    bench.arrive("a", 80, 5, 5)
    bench.arrive("b", 40, 5, 5)
    bench.turn()
    assert len(bench.batches[0].prefills) == 1
    bench.finish()
    whole = {(i.key[0], i.first_token, i.end_token) for b in bench.batches for i in b.prefills}
    assert whole == {("a", 0, 80), ("b", 0, 40)}


@every_policy
def test_a_chunk_after_a_hit_starts_behind_it(name: str) -> None:
    bench = rig(BUILT_IN[name], PolicySettings(token_budget=8, max_batch_sequences=8), lag=0)
    bench.stored = lambda job: 36
    bench.arrive("r0", 40, 2, 4)
    bench.turn()
    bench.turn()
    (chunk,) = bench.batches[1].prefills
    assert (chunk.first_token, chunk.end_token) == (36, 40)


@given(
    jobs=jobs_of,
    policy_settings=settings_of,
    names=st.lists(st.sampled_from(sorted(BUILT_IN)), min_size=2, max_size=6),
)
def test_a_policy_takes_over_from_another(
    jobs: Jobs, policy_settings: PolicySettings, names: list[str]
) -> None:
    bench = rig(BUILT_IN[names[0]], policy_settings)
    play(bench, jobs, lambda number: bench.swap(BUILT_IN[names[number % len(names)]]))


@every_policy
@settings(max_examples=30)
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
    for turn in range(40):
        begin = time.process_time()
        policy.on_arrival(Task((f"s{turn:06}", 0), 20 + turn, 500, 100.0 + turn), 100.0)
        batch = policy.plan(100.0 + 0.01 * turn)
        policy.on_ended((f"s{turn:06}", 0), 100.0)
        least = min(least, time.process_time() - begin) if batch is not None and turn > 10 else least
    return least * 1000


def looking_ms(waiting: int) -> float:
    """CPU time of a bare look at each of that many: what a plan must not do, in this machine's time."""
    tasks = [Task((f"r{number:06}", 0), 20 + number % 300, 500, 0.001 * number) for number in range(waiting)]
    least = math.inf
    for _ in range(20):
        begin = time.process_time()
        sum(task.prompt_tokens for task in tasks)
        least = min(least, time.process_time() - begin)
    return least * 1000


@every_policy
def test_a_plan_looks_at_few_of_those_that_wait(name: str) -> None:
    """Four times as many make trees deeper and caches colder, and cost far less than a look at each.

    Others on the machine make any of these times longer, so that one try of three has to show it.
    """
    planning_ms(name, 10)
    tries = [(planning_ms(name, 20_000), planning_ms(name, 5_000), looking_ms(20_000)) for _ in range(3)]
    assert any(many <= few + looking / 2 for many, few, looking in tries), tries


@every_policy
def test_events_of_unknown_keys_are_ignored(name: str) -> None:
    policy = BUILT_IN[name](WorkerShape(BLOCK_TOKENS, 8), PolicySettings())
    policy.on_ended(("a", 0), 0.0)
    policy.on_predicted(("a", 0), predicted(3), 0.0)
    policy.on_short(("a", 0), 1, 0.0)
    assert policy.plan(0.0) is None
    policy.on_arrival(Task(("b", 0), 4, 1, 0.0), 0.0)
    policy.on_short(("b", 0), 1, 0.0)
    policy.check_integrity()
