"""Where nothing moves: the oldest goes on, and no workload wedges in the least memory there can be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import (
    BatchPolicy,
    Holding,
    PolicyFactory,
    PolicySettings,
    Task,
    WorkerShape,
)
from services.scheduler.policy.ecoserve.planner import EcoServe, EcoServeD, EcoServeProfile, EcoServeSDO
from services.scheduler.policy.kvasir import KvasirPolicy
from services.scheduler.policy.two_queues import TwoQueuePolicy
from tests.services.scheduler.policy.batch_rig import (
    BLOCK_TOKENS,
    guesses_of,
    in_turn,
    play,
    rig,
    settings_of,
)

every = pytest.mark.parametrize(
    "make_policy", [EcoServeD, EcoServeSDO, EcoServe, EcoServeProfile, KvasirPolicy]
)


@every
@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 60), st.integers(1, 40), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    policy_settings=settings_of,
    guesses=guesses_of,
)
def test_nothing_wedges_where_one_alone_just_fits(
    make_policy: PolicyFactory,
    jobs: list[tuple[int, int, int, int]],
    policy_settings: PolicySettings,
    guesses: list[int | None],
) -> None:
    most = max(-(-(prompt + limit - 1) // BLOCK_TOKENS) for prompt, _, limit, _ in jobs)
    bench = rig(make_policy, policy_settings, blocks=most)
    bench.predict = in_turn(guesses)
    play(bench, jobs)


@every
def test_half_prefilled_prompts_give_up_too(make_policy: PolicyFactory) -> None:
    """All that was adopted is half-way, and nothing is free."""
    policy = make_policy(WorkerShape(BLOCK_TOKENS, 9), PolicySettings())
    assert isinstance(policy, TwoQueuePolicy) and isinstance(policy, BatchPolicy)
    for number in range(3):
        policy.on_adopted(Task((f"r{number}", 0), 24, 8, float(number)), Holding(12, 3), 0.0)
    done: set[str] = set()
    for turn in range(200):
        batch = policy.plan(0.1 * turn)
        policy.check_integrity()
        if batch is None:
            for key in list(policy._complete):
                done.add(key[0])
                policy.on_ended(key, 0.1 * turn)
    assert done == {"r0", "r1", "r2"}


def test_the_pinned_one_stays_pinned_until_it_ends() -> None:
    policy = EcoServeD(WorkerShape(BLOCK_TOKENS, 8), PolicySettings(max_steps=1))
    for number in range(2):
        task = Task((f"r{number}", 0), 14, 15, float(number), generated_tokens=1)
        policy.on_adopted(task, Holding(14, 4, decoding=True), 0.0)
    batch = policy.plan(0.0)
    assert batch is not None and [item.key[0] for item in batch.preemptions] == []
    for turn in range(40):
        batch = policy.plan(0.1 * turn)
        if batch is not None:
            assert ("r0", 0) not in [item.key for item in batch.preemptions]
    assert list(policy._complete) == [("r0", 0)]
