"""`fastgen`: every step at its target size, blocks as they are needed."""

import pytest
from hypothesis import given, settings

from services.scheduler.policy.contract import PlannedBatch, PolicySettings
from services.scheduler.policy.first_come import FastGenPolicy
from shared.errors import ConfigError
from tests.services.scheduler.policy.batch_rig import BLOCK_TOKENS, Jobs, jobs_of, play, rig, settings_of


def tokens_of(batch: PlannedBatch) -> int:
    return sum(item.end_token - item.first_token for item in batch.prefills) + len(batch.decodes)


@settings(max_examples=60, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_no_step_is_above_its_target_even_without_chunked_prefill(
    jobs: Jobs, policy_settings: PolicySettings
) -> None:
    bench = rig(FastGenPolicy, policy_settings)

    def check(batch: PlannedBatch) -> None:
        assert tokens_of(batch) <= policy_settings.token_budget

    bench.on_batch = check
    play(bench, jobs)


def test_prompts_fill_what_decodes_leave_of_the_target_exactly() -> None:
    bench = rig(FastGenPolicy, PolicySettings(options={"tfs_tokens": 20}), blocks=64, lag=0)
    for name in "abcd":
        bench.arrive(name, 15, 40, 40)
    for _ in range(3):
        bench.turn()
    assert [tokens_of(batch) for batch in bench.batches[:3]] == [20, 20, 20]
    assert [len(batch.decodes) for batch in bench.batches[:3]] == [0, 1, 2]
    bench.finish()


def test_a_prompt_starts_where_its_first_chunk_fits() -> None:
    bench = rig(FastGenPolicy, PolicySettings(options={"tfs_tokens": 16}), blocks=12, lag=0)
    bench.arrive("a", 20, 12, 12)
    for _ in range(2):
        bench.turn()
    late = bench.arrive("b", 40, 5, 5)
    bench.turn()
    assert bench.batches[-1].prefills[0].end_token == 15 and late.blocks * BLOCK_TOKENS >= 15
    bench.finish()


def test_the_target_is_at_most_the_budget_and_a_number() -> None:
    settings = PolicySettings(token_budget=32, options={"tfs_tokens": 1000})
    bench = rig(FastGenPolicy, settings, blocks=64, lag=0)
    bench.arrive("a", 100, 5, 5)
    bench.turn()
    assert tokens_of(bench.batches[0]) == 32
    with pytest.raises(ConfigError, match="tfs_tokens"):
        rig(FastGenPolicy, PolicySettings(options={"tfs_tokens": "large"}))
