"""Those that run by rank: with the blocks of their longest answer, the first always served."""

import pytest
from hypothesis import given, settings

from services.scheduler.policy.contract import (
    Holding,
    PlannedBatch,
    PolicyFactory,
    PolicySettings,
    Task,
    WorkerShape,
)
from services.scheduler.policy.research.fastserve import FastServePolicy
from services.scheduler.policy.research.ranked import RankedPolicy, SrtfPolicy
from tests.services.scheduler.policy.batch_rig import (
    BLOCK_TOKENS,
    Jobs,
    items_of,
    jobs_of,
    play,
    rig,
    settings_of,
)
from tests.services.scheduler.policy.test_orca import maximum_blocks

both = pytest.mark.parametrize("make_policy", [FastServePolicy, SrtfPolicy])


@both
@settings(max_examples=60, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_every_item_has_the_blocks_of_its_longest_answer(
    make_policy: PolicyFactory, jobs: Jobs, policy_settings: PolicySettings
) -> None:
    bench = rig(make_policy, policy_settings)

    def check(batch: PlannedBatch) -> None:
        items = [(item.key, item.allocated_blocks) for item in batch.prefills]
        items += [(item.key, item.allocated_blocks) for item in batch.decodes]
        assert all(blocks == maximum_blocks(bench.jobs[key].task) for key, blocks in items)

    bench.on_batch = check
    play(bench, jobs)


@settings(max_examples=60, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_whoever_ranks_first_is_in_the_batch_or_held_up_by_ends_to_come(
    jobs: Jobs, policy_settings: PolicySettings
) -> None:
    bench = rig(SrtfPolicy, policy_settings, lag=0)
    policy = bench.policy
    assert isinstance(policy, RankedPolicy)

    def check(batch: PlannedBatch) -> None:
        keys = {item.key for item in items_of(batch)}
        preempted = {item.key for item in batch.preemptions}
        decoding = [job for job in bench.unfinished if job.decoding and job.task.key not in preempted]
        first = min(
            decoding, key=lambda job: (job.task.max_tokens - job.generated, job.task.order), default=None
        )
        if first is not None and len(keys) < policy_settings.max_batch_sequences:
            assert first.task.key in keys or policy._releasing_blocks()

    bench.on_batch = check
    play(bench, jobs)


@both
def test_one_found_with_less_than_its_maximum_comes_first(make_policy: PolicyFactory) -> None:
    policy = make_policy(WorkerShape(BLOCK_TOKENS, 12), PolicySettings(max_steps=1))
    policy.on_adopted(Task(("a", 0), 8, 25, 0.0, 1), Holding(8, 2, decoding=True), 0.0)
    policy.on_arrival(Task(("b", 0), 4, 1, 1.0), 0.0)
    first = policy.plan(0.0)
    assert first is not None and first.prefills == () and first.decodes[0].allocated_blocks == 8
    second = policy.plan(0.0)
    assert second is not None and [item.key[0] for item in second.prefills] == ["b"]


@both
def test_it_waits_for_blocks_about_to_be_free_rather_than_take_them(make_policy: PolicyFactory) -> None:
    policy = make_policy(WorkerShape(BLOCK_TOKENS, 8), PolicySettings(max_steps=1))
    policy.on_adopted(Task(("a", 0), 8, 2, 0.0, 1), Holding(8, 3, decoding=True), 0.0)
    policy.on_adopted(Task(("b", 0), 8, 13, 0.0, 1), Holding(8, 5, decoding=True), 0.0)
    policy.plan(0.0)
    policy.on_arrival(Task(("c", 0), 4, 1, 1.0), 0.0)
    batch = policy.plan(0.0)
    assert batch is not None and batch.preemptions == () and batch.prefills == ()
    policy.on_ended(("a", 0), 0.1)
    after = policy.plan(0.1)
    assert after is not None and [item.key[0] for item in after.prefills] == ["c"]
