"""`orca`, `vllm` and `fastgen`: in one order, within the budget, ahead while nothing can change."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.batch_builder import Job, JobStage
from services.scheduler.policy.contract import (
    Holding,
    PlannedBatch,
    PolicyFactory,
    PolicySettings,
    Task,
    WorkerShape,
)
from services.scheduler.policy.first_come import FastGenPolicy, OrcaPolicy, VllmPolicy
from shared.errors import ConfigError
from tests.services.scheduler.policy.batch_rig import BLOCK_TOKENS, Jobs, jobs_of, play, rig, settings_of

both = pytest.mark.parametrize("make_policy", [OrcaPolicy, VllmPolicy])


@both
@settings(max_examples=60)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_nobody_overtakes(make_policy: PolicyFactory, jobs: Jobs, policy_settings: PolicySettings) -> None:
    bench = rig(make_policy, policy_settings)
    play(bench, jobs)
    assert bench.started == sorted(bench.started)


@both
def test_plans_reach_ahead_only_while_nothing_can_change(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(max_steps=8), blocks=64, lag=0)
    bench.arrive("a", 10, 60, 60)
    bench.turn()
    bench.turn()
    assert [batch.steps for batch in bench.batches] == [1, 8] and bench.batches[1].decodes[0].tokens == 8
    assert bench.batches[1].decodes[0].allocated_blocks * BLOCK_TOKENS >= 18
    bench.arrive("b", 10, 30, 30)
    bench.turn()
    assert bench.batches[2].steps == 1 and len(bench.batches[2].prefills) == 1
    bench.finish()


@both
@pytest.mark.parametrize(("max_tokens", "steps"), [(20, 8), (3, 2)])
def test_beside_a_prompt_that_does_not_fit_no_plan_reaches_beyond_a_known_end(
    make_policy: PolicyFactory, max_tokens: int, steps: int
) -> None:
    policy = make_policy(WorkerShape(BLOCK_TOKENS, 64 // BLOCK_TOKENS), PolicySettings(max_steps=8))
    held = Holding(30, -(-30 // BLOCK_TOKENS), decoding=True)
    policy.on_adopted(Task(("a", 0), 30, max_tokens, 0.0, generated_tokens=1), held, 0.0)
    policy.on_arrival(Task(("b", 0), 50, 10, 0.0), 0.0)
    batch = policy.plan(0.0)
    assert batch is not None and (batch.steps, len(batch.decodes)) == (steps, 1)


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
    assert batch is not None and [item.key[0] for item in batch.decodes] == ["a"]
    assert [(i.key[0], i.first_token, i.end_token) for i in batch.prefills] == [("b", 6, 10), ("c", 0, 13)]


KEY = ("a", 0)


def books() -> VllmPolicy:
    return VllmPolicy(WorkerShape(block_tokens=4, capacity_blocks=16), PolicySettings())


def job_of(policy: VllmPolicy) -> Job:
    policy.check_integrity()
    return policy._table.jobs[KEY]


@pytest.mark.parametrize(
    ("generated", "holding", "stage"),
    [
        (0, Holding(0, 0), JobStage.WAITING),
        (3, Holding(0, 0), JobStage.WAITING),
        (0, Holding(4, 1), JobStage.PREFILLING),
        (0, Holding(0, 2), JobStage.PREFILLING),
        (1, Holding(8, 2, decoding=True), JobStage.DECODING),
        (5, Holding(12, 3, decoding=True), JobStage.COMPLETE),
    ],
)
def test_what_a_sequence_holds_says_its_stage(generated: int, holding: Holding, stage: JobStage) -> None:
    policy = books()
    policy.on_adopted(Task(KEY, 8, 5, 0.0, generated), holding, 0.0)
    assert job_of(policy).stage is stage and policy._table.held_blocks == holding.allocated_blocks


def test_a_hit_moves_a_prefill_on_as_far_as_blocks_are_free() -> None:
    policy = books()
    policy.on_adopted(Task(KEY, 40, 5, 0.0), Holding(4, 1), 0.0)
    policy.on_prefix_hit(KEY, 30, 0.0)
    assert (job_of(policy).computed_tokens, job_of(policy).held_blocks) == (30, 8)
    policy.on_prefix_hit(KEY, 12, 0.0)
    assert job_of(policy).computed_tokens == 30, "never back"
    policy.on_adopted(Task(("b", 0), 24, 5, 0.0), Holding(20, 6), 0.0)
    policy.on_prefix_hit(KEY, 40, 0.0)
    assert job_of(policy).computed_tokens == 39, "the last token is always computed"
    assert policy._table.held_blocks == 16


def maximum_blocks(task: Task) -> int:
    return -(-(task.prompt_tokens + task.max_tokens - 1) // BLOCK_TOKENS)


@given(jobs=jobs_of, policy_settings=settings_of, lag=st.integers(0, 3))
def test_every_item_has_its_maximum(jobs: Jobs, policy_settings: PolicySettings, lag: int) -> None:
    bench = rig(OrcaPolicy, policy_settings, lag=lag)

    def check(batch: PlannedBatch) -> None:
        assert batch.preemptions == ()
        items = [(item.key, item.allocated_blocks) for item in batch.prefills]
        items += [(item.key, item.allocated_blocks) for item in batch.decodes]
        assert all(blocks == maximum_blocks(bench.jobs[key].task) for key, blocks in items)

    bench.on_batch = check
    play(bench, jobs)


def test_it_starts_as_many_as_their_maxima_allow_however_short_their_answers() -> None:
    bench = rig(OrcaPolicy, PolicySettings(max_steps=1), blocks=24, lag=0)
    for name in "abc":
        bench.arrive(name, prompt_tokens=8, length=3, max_tokens=33)
    bench.turn()
    assert [(i.key[0], i.allocated_blocks) for i in bench.batches[0].prefills] == [("a", 10), ("b", 10)]
    bench.turn()
    assert bench.batches[1].prefills == (), "a and b hold 20 of 24 until one of them is over"
    bench.finish()
    assert len(bench.batches) == 6, "c starts in the step after their last"


def test_an_adopted_sequence_gets_the_rest_of_its_maximum_before_anybody_starts() -> None:
    policy = OrcaPolicy(WorkerShape(BLOCK_TOKENS, 16), PolicySettings(max_steps=1))
    policy.on_adopted(Task(("a", 0), 8, 25, 0.0, generated_tokens=1), Holding(8, 2, decoding=True), 0.0)
    policy.on_adopted(Task(("b", 0), 8, 25, 1.0, generated_tokens=1), Holding(8, 3, decoding=True), 0.0)
    policy.on_arrival(Task(("c", 0), 4, 1, 2.0), 0.0)
    batch = policy.plan(0.0)
    policy.check_integrity()
    assert batch is not None and batch.preemptions == () and batch.prefills == ()
    assert [(item.key[0], item.allocated_blocks) for item in batch.decodes] == [("a", 8), ("b", 8)]
    after = policy.plan(0.0)
    assert after is not None and after.prefills == (), "all is reserved: c has to wait for an end"
    policy.on_ended(("a", 0), 0.1)
    last = policy.plan(0.1)
    assert last is not None and [item.key[0] for item in last.prefills] == ["c"]


def test_adopted_sequences_that_cannot_all_have_their_maximum_run_on_what_there_is() -> None:
    policy = OrcaPolicy(WorkerShape(BLOCK_TOKENS, 8), PolicySettings(max_steps=1))
    for name, at_s in (("a", 0.0), ("b", 1.0)):
        policy.on_adopted(Task((name, 0), 8, 25, at_s, 1), Holding(8, 3, decoding=True), 0.0)
    policy.on_arrival(Task(("c", 0), 4, 1, 2.0), 0.0)
    first = policy.plan(0.0)
    assert first is not None and first.preemptions == () and first.prefills == ()
    assert [(item.key[0], item.allocated_blocks) for item in first.decodes] == [("a", 3), ("b", 3)]
    batches: list[PlannedBatch] = [first]
    while not batches[-1].preemptions:
        batch = policy.plan(0.0)
        policy.check_integrity()
        assert batch is not None and batch.prefills == (), "c would take what a needs"
        batches.append(batch)
    assert [item.key[0] for item in batches[-1].preemptions] == ["b"]
    assert [item.key[0] for item in batches[-1].decodes] == ["a"]
    topped_up = policy.plan(0.0)
    assert topped_up is not None and topped_up.decodes[0].allocated_blocks == 8


@settings(max_examples=50)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_the_oldest_is_never_preempted(jobs: Jobs, policy_settings: PolicySettings) -> None:
    bench = rig(VllmPolicy, policy_settings)

    def check(batch: PlannedBatch) -> None:
        oldest = min(bench.unfinished, key=lambda job: job.task.order)
        assert oldest.task.key not in {item.key for item in batch.preemptions}

    bench.on_batch = check
    play(bench, jobs)


def test_a_preempted_sequence_is_computed_again_with_what_it_generated() -> None:
    bench = rig(VllmPolicy, PolicySettings(max_steps=1), blocks=10, lag=0)
    bench.arrive("a", 15, 20, 20)
    newest = bench.arrive("b", 15, 20, 20)
    while not any(batch.preemptions for batch in bench.batches):
        bench.turn()
    assert newest.blocks == 0 and newest.generated > 1
    again = newest.total
    bench.finish()
    resumed = [item for batch in bench.batches for item in batch.prefills if item.key == ("b", 0)]
    assert (resumed[1].first_token, resumed[1].end_token) == (0, again)


def test_it_waits_for_blocks_about_to_be_free_rather_than_preempt() -> None:
    policy = VllmPolicy(WorkerShape(BLOCK_TOKENS, 4), PolicySettings(max_steps=1))
    policy.on_adopted(Task(("a", 0), 4, 5, 0.0, generated_tokens=4), Holding(7, 2, decoding=True), 0.0)
    policy.on_adopted(Task(("b", 0), 4, 9, 1.0, generated_tokens=4), Holding(7, 2, decoding=True), 0.0)
    last = policy.plan(0.0)
    assert last is not None and [item.key[0] for item in last.decodes] == ["a", "b"]
    assert policy.plan(0.0) is None, "a keeps its blocks until its end is confirmed"
    policy.on_ended(("a", 0), 0.1)
    after = policy.plan(0.1)
    assert after is not None and [item.key[0] for item in after.decodes] == ["b"] and after.preemptions == ()


def test_a_start_leaves_headroom_to_those_that_run() -> None:
    policy = VllmPolicy(WorkerShape(BLOCK_TOKENS, 200), PolicySettings(token_budget=1000, max_steps=1))
    policy.on_adopted(Task(("a", 0), 4, 90, 0.0, generated_tokens=1), Holding(4, 2, decoding=True), 0.0)
    policy.on_arrival(Task(("b", 0), 4 * 197, 1, 1.0), 0.0)
    crowded = policy.plan(0.0)
    assert crowded is not None and crowded.prefills == ()
    policy.on_arrival(Task(("c", 0), 4 * 196, 1, 0.5), 0.0)
    roomy = policy.plan(0.0)
    assert roomy is not None and [item.key[0] for item in roomy.prefills] == ["c"]


def tokens_of(batch: PlannedBatch) -> int:
    return sum(item.end_token - item.first_token for item in batch.prefills) + len(batch.decodes)


@settings(max_examples=60)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_no_step_is_above_its_target_even_unchunked(jobs: Jobs, policy_settings: PolicySettings) -> None:
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
