"""`orca` and `vllm` alike: in the order of arrival, within the budget, ahead while nothing can change."""

import pytest
from hypothesis import given, settings

from services.scheduler.policy.contract import Holding, PolicyFactory, PolicySettings, Task, WorkerShape
from services.scheduler.policy.first_come import OrcaPolicy, VllmPolicy
from tests.services.scheduler.policy.batch_rig import BLOCK_TOKENS, Jobs, jobs_of, play, rig, settings_of

both = pytest.mark.parametrize("make_policy", [OrcaPolicy, VllmPolicy])


@both
@settings(max_examples=60, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_no_later_arrival_starts_before_an_earlier_one(
    make_policy: PolicyFactory, jobs: Jobs, policy_settings: PolicySettings
) -> None:
    bench = rig(make_policy, policy_settings)
    play(bench, jobs)
    assert bench.started == sorted(bench.started)


@both
def test_plans_reach_ahead_only_while_nothing_can_change(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(max_steps=8), blocks=64, lag=0)
    bench.arrive("a", 10, 60, 60)
    bench.turn()
    bench.turn()
    assert [batch.steps for batch in bench.batches] == [1, 8]
    assert bench.batches[1].decodes[0].tokens == 8
    assert bench.batches[1].decodes[0].allocated_blocks * BLOCK_TOKENS >= 18
    bench.arrive("b", 10, 30, 30)
    bench.turn()
    assert bench.batches[2].steps == 1 and len(bench.batches[2].prefills) == 1
    bench.finish()


@both
def test_a_long_prompt_is_cut_to_the_budget_that_decodes_leave(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(token_budget=16), blocks=64, lag=0)
    bench.arrive("a", 4, 30, 30)
    bench.turn()
    bench.arrive("b", 40, 5, 5)
    for _ in range(3):
        bench.turn()
    chunks = [(item.first_token, item.end_token) for batch in bench.batches[1:] for item in batch.prefills]
    assert chunks == [(0, 15), (15, 30), (30, 40)]
    assert all(len(batch.decodes) == 1 for batch in bench.batches[1:4])


@both
def test_what_can_never_fit_holds_nobody_up(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, blocks=10)
    hopeless = bench.arrive("a", 20, 5, 22)
    bench.arrive("b", 20, 5, 21)
    while bench.turn():
        pass
    assert bench.unfinished == [hopeless] and not hopeless.started
    bench.resize(11)
    bench.finish()


@both
def test_a_short_batch_takes_its_tokens_back(make_policy: PolicyFactory) -> None:
    policy = make_policy(WorkerShape(BLOCK_TOKENS, 64), PolicySettings(max_steps=8))
    policy.on_adopted(Task(("a", 0), 4, 9, 0.0, generated_tokens=1), Holding(4, 1, decoding=True), 0.0)
    batch = policy.plan(0.0)
    assert batch is not None and batch.decodes[0].tokens == 8
    assert policy.plan(0.0) is None, "planned to its limit"
    policy.on_short(("a", 0), 3, 0.1)
    policy.check_integrity()
    rest = policy.plan(0.1)
    assert rest is not None and rest.decodes[0].tokens == 3


@both
def test_adoption_goes_on_where_the_worker_stands(make_policy: PolicyFactory) -> None:
    policy = make_policy(WorkerShape(BLOCK_TOKENS, 64), PolicySettings(max_steps=1))
    policy.on_adopted(Task(("a", 0), 10, 9, 0.0, generated_tokens=2), Holding(11, 3, decoding=True), 0.0)
    policy.on_adopted(Task(("b", 0), 10, 9, 1.0), Holding(6, 2), 0.0)
    policy.on_adopted(Task(("c", 0), 10, 9, 2.0, generated_tokens=3), Holding(0, 0), 0.0)
    policy.check_integrity()
    batch = policy.plan(0.0)
    assert batch is not None
    assert [item.key[0] for item in batch.decodes] == ["a"]
    assert [(item.key[0], item.first_token, item.end_token) for item in batch.prefills] == [
        ("b", 6, 10),
        ("c", 0, 13),
    ]
