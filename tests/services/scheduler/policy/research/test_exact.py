"""Exact allocation: prompt and predicted answer at once; what outgrows it asks and takes what it needs."""

import pytest
from hypothesis import given, settings

from services.scheduler.policy.contract import PlannedBatch, PolicyFactory, PolicySettings
from services.scheduler.policy.research.multires import MultiResPolicy
from services.scheduler.policy.research.sync_coupled import SyncCoupledPolicy
from tests.services.scheduler.policy.batch_rig import (
    BLOCK_TOKENS,
    Jobs,
    items_of,
    jobs_of,
    play,
    rig,
    settings_of,
    truth,
)

both = pytest.mark.parametrize("make_policy", [MultiResPolicy, SyncCoupledPolicy])


@both
@settings(max_examples=60, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_with_true_lengths_nothing_grows_and_nothing_is_preempted(
    make_policy: PolicyFactory, jobs: Jobs, policy_settings: PolicySettings
) -> None:
    bench = rig(make_policy, policy_settings)
    bench.predict = truth
    held: dict[object, int] = {}

    def check(batch: PlannedBatch) -> None:
        assert batch.preemptions == () and batch.questions == ()
        for item in items_of(batch):
            tokens = bench.jobs[item.key].task.prompt_tokens + bench.jobs[item.key].length - 1
            assert item.allocated_blocks == held.setdefault(item.key, -(-tokens // BLOCK_TOKENS))

    bench.on_batch = check
    true_jobs = [(prompt, min(length, 50), min(length, 50), pause) for prompt, length, _, pause in jobs]
    play(bench, true_jobs)


@both
def test_one_that_outgrows_its_prediction_asks_once_and_takes_a_block(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(max_steps=1), blocks=64, lag=0)
    bench.arrive("a", 8, 20, 40, 8)
    bench.finish()
    blocks = [item.allocated_blocks for batch in bench.batches for item in batch.decodes]
    assert blocks[0] == 4 and blocks[-1] == 7, "8 + 8 - 1 tokens at first, 27 in the end"
    questions = [question.generated_tokens for batch in bench.batches for question in batch.questions]
    assert questions == [8], "nobody answers, and it is not asked again"


@both
def test_it_starts_where_the_predicted_answer_fits_not_the_longest(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(max_steps=1), blocks=12, lag=0)
    for name in "abc":
        bench.arrive(name, 8, 9, 40, 9)
    bench.turn()
    assert [item.allocated_blocks for item in bench.batches[0].prefills] == [4, 4, 4]
    bench.finish()
