"""Exact allocation: prompt and predicted answer at once; what outgrows it asks and takes what it needs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import PlannedBatch, PolicyFactory, PolicySettings
from services.scheduler.policy.multires import MultiResPolicy
from services.scheduler.policy.sync_coupled import SyncCoupledPolicy
from tests.services.scheduler.policy.batch_rig import BLOCK_TOKENS, rig, settings_of
from tests.services.scheduler.policy.foreseen import (
    Guesses,
    arrive_foreseen,
    guesses_of,
    items_of,
    play_foreseen,
)

both = pytest.mark.parametrize("make_policy", [MultiResPolicy, SyncCoupledPolicy])


@both
@settings(max_examples=80, deadline=None)
@given(guesses=guesses_of, policy_settings=settings_of, lag=st.integers(0, 3))
def test_every_request_ends_however_wrong_the_predictions(
    make_policy: PolicyFactory, guesses: Guesses, policy_settings: PolicySettings, lag: int
) -> None:
    play_foreseen(rig(make_policy, policy_settings, lag=lag), guesses)


@both
@settings(max_examples=60, deadline=None)
@given(guesses=guesses_of, policy_settings=settings_of)
def test_with_true_lengths_nothing_grows_and_nothing_is_preempted(
    make_policy: PolicyFactory, guesses: Guesses, policy_settings: PolicySettings
) -> None:
    bench = rig(make_policy, policy_settings)
    held: dict[object, int] = {}

    def check(batch: PlannedBatch) -> None:
        assert batch.preemptions == () and batch.questions == ()
        for item in items_of(batch):
            tokens = bench.jobs[item.key].task.prompt_tokens + bench.jobs[item.key].length - 1
            assert item.allocated_blocks == held.setdefault(item.key, -(-tokens // BLOCK_TOKENS))

    bench.on_batch = check
    lengths = [min(length, 50) for (_, length, _, _), _ in guesses]
    jobs = [(prompt, pause) for (prompt, _, _, pause), _ in guesses]
    play_foreseen(
        bench,
        [
            ((prompt, length, length, pause), length)
            for (prompt, pause), length in zip(jobs, lengths, strict=True)
        ],
    )


@both
def test_one_that_outgrows_its_prediction_asks_once_and_takes_a_block(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(max_steps=1), blocks=64, lag=0)
    arrive_foreseen(bench, "a", 8, 20, 40, 8)
    bench.finish()
    blocks = [item.allocated_blocks for batch in bench.batches for item in batch.decodes]
    assert blocks[0] == 4 and blocks[-1] == 7, "8 + 8 - 1 tokens at first, 27 in the end"
    questions = [question.generated_tokens for batch in bench.batches for question in batch.questions]
    assert questions == [8], "nobody answers, and it is not asked again"


@both
def test_it_starts_where_the_predicted_answer_fits_not_the_longest(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(max_steps=1), blocks=12, lag=0)
    for name in "abc":
        arrive_foreseen(bench, name, 8, 9, 40, 9)
    bench.turn()
    assert [item.allocated_blocks for item in bench.batches[0].prefills] == [4, 4, 4]
    bench.finish()
