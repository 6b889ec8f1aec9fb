"""`multires` and `sync_coupled`: prompt and predicted answer in one allocation."""

from math import hypot

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import PlannedBatch, PolicyFactory, PolicySettings
from services.scheduler.policy.research.foresight import MultiResPolicy, SyncCoupledPolicy
from tests.services.scheduler.policy.batch_rig import (
    BLOCK_TOKENS,
    BatchRig,
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
@settings(max_examples=60)
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


BUDGET, BLOCKS = 64, 40


def first_started(demands: list[tuple[int, int]]) -> str:
    bench = rig(MultiResPolicy, PolicySettings(token_budget=BUDGET, max_steps=1), blocks=BLOCKS, lag=0)
    for number, (prompt, length) in enumerate(demands):
        bench.arrive(f"{number:02}", prompt, length, length, length)
    bench.turn()
    return bench.batches[0].prefills[0].key[0]


@given(demands=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 90)), min_size=1, max_size=12))
def test_the_first_is_nearly_as_close_as_the_closest(demands: list[tuple[int, int]]) -> None:
    def distance(prompt: int, length: int) -> float:
        blocks = -(-(prompt + length - 1) // 4)
        return hypot(1 - prompt / BUDGET, 1 - blocks / BLOCKS)

    chosen = distance(*demands[int(first_started(demands))])
    row_width_share = 2**0.25 - 1
    assert chosen <= min(distance(*demand) for demand in demands) + row_width_share


def bench_of(blocks: int, token_budget: int = 64, max_batch: int = 16) -> BatchRig:
    options = {"group_tokens": 8}
    settings = PolicySettings(True, max_batch, token_budget, max_steps=1, options=options)
    return rig(SyncCoupledPolicy, settings, blocks=blocks, lag=0)


def test_a_group_goes_before_those_that_came_between_its_members() -> None:
    bench = bench_of(64)
    for name, length in (("a", 16), ("b", 40), ("c", 14), ("d", 38), ("e", 13)):
        bench.arrive(name, 4, length, 40, length)
    bench.finish()
    assert [key[0] for key in bench.started] == ["a", "c", "e", "b", "d"]


def test_a_group_that_does_not_fit_is_split_and_nobody_else_slips_in() -> None:
    bench = bench_of(11)
    for name, length in (("a", 16), ("b", 16), ("c", 16), ("d", 3)):
        bench.arrive(name, 4, length, 40, length)
    bench.turn()
    assert [item.key[0] for item in bench.batches[0].prefills] == ["a", "b"], "5 + 5 of 11 blocks"
    bench.finish()
    assert [key[0] for key in bench.started] == ["a", "b", "c", "d"]


def test_members_that_the_budget_kept_back_start_before_another_group() -> None:
    bench = bench_of(64, token_budget=16)
    bench.arrive("a", 12, 16, 40, 16)
    bench.arrive("b", 12, 15, 40, 15)
    bench.arrive("c", 12, 14, 40, 14)
    bench.turn()
    bench.arrive("d", 2, 3, 40, 3)
    bench.finish()
    assert [key[0] for key in bench.started] == ["a", "b", "c", "d"]
