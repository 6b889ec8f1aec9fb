"""What policies with two queues share: events, batches, and what is done where nothing moves.

Books balance after any events; no workload wedges in the least memory there can be.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.batch_builder import JobStage
from services.scheduler.policy.contract import (
    BatchPolicy,
    Holding,
    PlannedBatch,
    PolicyFactory,
    PolicySettings,
    Task,
    WorkerShape,
)
from services.scheduler.policy.kvasir import KvasirPolicy
from services.scheduler.policy.research.ecoserve.planner import EcoServe, EcoServeD, EcoServeSDO
from services.scheduler.policy.research.ecoserve.profile import EcoServeProfile
from services.scheduler.policy.two_queues import TwoQueuePolicy
from tests.services.scheduler.policy.batch_rig import (
    BLOCK_TOKENS,
    guesses_of,
    in_turn,
    play,
    rig,
    settings_of,
    truth,
)
from tests.shared.messages.builders import predicted


def policy_of(blocks: int = 40) -> EcoServeD:
    return EcoServeSDO(WorkerShape(BLOCK_TOKENS, blocks), PolicySettings())


def test_adopted_ones_go_on_where_the_worker_stands() -> None:
    policy = policy_of()
    policy.on_adopted(Task(("partly", 0), 12, 9, 0.0), Holding(4, 2), 0.0)
    policy.on_adopted(Task(("decodes", 0), 8, 9, 1.0, generated_tokens=2), Holding(9, 3, decoding=True), 0.0)
    policy.on_adopted(Task(("over", 0), 8, 2, 2.0, generated_tokens=2), Holding(9, 3, decoding=True), 0.0)
    policy.on_adopted(Task(("over", 0), 8, 2, 2.0, generated_tokens=2), Holding(9, 3, decoding=True), 0.0)
    policy.check_integrity()
    stages = {job.task.key[0]: job.stage for job in policy._table.jobs.values()}
    assert stages == {"partly": JobStage.PREFILLING, "decodes": JobStage.READY, "over": JobStage.COMPLETE}
    batch = policy.plan(0.0)
    assert batch is not None
    assert [(item.key[0], item.first_token, item.end_token) for item in batch.prefills] == [("partly", 4, 12)]
    assert [item.key[0] for item in batch.decodes] == ["decodes"]


def test_ends_may_come_at_any_stage_and_twice() -> None:
    policy = policy_of()
    for name in ("a", "b", "c"):
        policy.on_arrival(Task((name, 0), 8, 9, 0.0), 0.0)
    policy.on_ended(("b", 0), 0.0)
    policy.plan(0.0)
    policy.plan(0.1)
    for name in ("a", "a", "c"):
        policy.on_ended((name, 0), 0.2)
        policy.check_integrity()
    assert policy._table.free_blocks == 40 and policy.plan(0.3) is None


def test_the_deadline_follows_the_first_prediction_only() -> None:
    policy = policy_of()
    policy.on_measured(1000.0, 0.01, 0.0)
    policy.on_arrival(Task(("a", 0), 100, 1000, 5.0), 5.0)
    job = policy._table.jobs[("a", 0)]
    assert job.deadline_s == 5.0 + 2 * (0.1 + 5.12)
    policy.on_predicted(("a", 0), predicted(100), 5.1)
    assert job.deadline_s == 5.0 + 2 * (0.1 + 1.0)
    policy.on_predicted(("a", 0), predicted(900), 5.2)
    assert job.deadline_s == 5.0 + 2 * (0.1 + 1.0)
    policy.check_integrity()


def test_one_that_can_never_fit_holds_nobody_up_until_the_worker_grows() -> None:
    policy = policy_of(10)
    policy.on_arrival(Task(("large", 0), 30, 20, 0.0), 0.0)
    policy.on_arrival(Task(("small", 0), 8, 1, 1.0), 1.0)
    batch = policy.plan(1.0)
    assert batch is not None and [item.key[0] for item in batch.prefills] == ["small"]
    policy.on_ended(("small", 0), 1.1)
    assert policy.plan(1.2) is None
    policy.on_resized(13, 1.3)
    batch = policy.plan(1.4)
    assert batch is not None and [item.key[0] for item in batch.prefills] == ["large"]


def test_a_worker_that_lost_blocks_gets_them_back_newest_first() -> None:
    policy = policy_of(40)
    for number in range(4):
        task = Task((f"r{number}", 0), 32, 20, float(number), generated_tokens=1)
        policy.on_adopted(task, Holding(32, 8, decoding=True), 0.0)
    policy.plan(0.0)
    policy.on_resized(20, 0.1)
    policy.check_integrity()
    batch = policy.plan(0.2)
    assert batch is not None and [item.key[0] for item in batch.preemptions] == ["r3", "r2"]
    policy.check_integrity()


def test_one_that_comes_short_where_blocks_were_lost_runs_with_what_it_holds() -> None:
    """All its tokens were planned, one was not computed, and meanwhile the worker has less than is held: the
    books were said to promise more than there is."""
    policy = policy_of(40)
    policy.on_adopted(Task(("over", 0), 8, 2, 0.0, generated_tokens=2), Holding(9, 3, decoding=True), 0.0)
    policy.on_resized(2, 0.1)
    policy.on_short(("over", 0), 1, 0.2)
    assert ("over", 0) in policy._running and policy._table.own_blocks == policy._table.held_blocks == 3
    policy.check_integrity()


events_of = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "adopt", "end", "short", "predict", "resize", "plan", "plan"]),
        st.integers(0, 15),
        st.integers(0, 40),
    ),
    max_size=80,
)


@settings(max_examples=200)
@given(events=events_of)
def test_the_books_balance_after_any_events(events: list[tuple[str, int, int]]) -> None:
    """Events in no sensible order: ends of what never arrived, shortfalls after preemptions."""
    policy = EcoServe(WorkerShape(BLOCK_TOKENS, 40), PolicySettings(token_budget=32))
    now_s, planned = 0.0, 0
    for event, number, size in events:
        now_s += 0.05
        key = (f"r{number}", 0)
        job = policy._table.jobs.get(key)
        if event == "arrive":
            policy.on_arrival(Task(key, 1 + size, 30, now_s), now_s)
        elif event == "adopt" and policy._table.free_blocks >= 12:
            task = Task(key, 1 + size, 30, now_s, generated_tokens=1)
            policy.on_adopted(task, Holding(1 + size, 12, decoding=True), now_s)
        elif event == "end":
            policy.on_ended(key, now_s)
        elif event == "short" and job is not None and job.stage in (JobStage.DECODING, JobStage.COMPLETE):
            policy.on_short(key, min(1, job.generated_tokens - 1), now_s)
        elif event == "predict":
            policy.on_predicted(key, predicted(size), now_s)
        elif event == "resize":
            policy.on_resized(24 + size, now_s)
        elif event == "plan":
            planned += policy.plan(now_s) is not None
            assert policy._table.held_blocks <= policy._table.capacity_blocks or policy._complete
        policy.check_integrity()


every = pytest.mark.parametrize("make_policy", [EcoServeD, EcoServe, EcoServeProfile, KvasirPolicy])


def prefills(batch: PlannedBatch) -> list[tuple[str, int, int]]:
    return [(item.key[0], item.first_token, item.end_token) for item in batch.prefills]


@every
def test_plans_reach_ahead_while_nothing_waits(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(max_steps=8, options={"pad": 0.0}), blocks=64, lag=0)
    bench.predict = truth
    bench.arrive("a", 10, 60, 60)
    for _ in range(3):
        bench.turn()
    assert [batch.steps for batch in bench.batches][-1] == 8
    bench.arrive("b", 10, 30, 30)
    bench.turn()
    assert bench.batches[-1].steps == 1 and prefills(bench.batches[-1]) == [("b", 0, 10)]
    bench.finish()


@every
def test_no_plan_reaches_beyond_what_was_set_aside(make_policy: PolicyFactory) -> None:
    """Predicted to end after 11: the batch that gets there is cut, and the next one asks."""
    bench = rig(make_policy, PolicySettings(max_steps=8, options={"pad": 0.0}), blocks=8, lag=0)
    bench.predict = lambda job, generated: predicted(11)
    bench.arrive("a", 4, 25, 28)
    bench.finish()
    steps = [batch.steps for batch in bench.batches]
    assert max(steps) == 8 and sum(steps) < len(steps) * 8


@every
def test_a_plan_carries_no_more_text_than_allowed(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(start_tokens=25), blocks=64, lag=0)
    for name in ("a", "b", "c"):
        bench.arrive(name, 10, 5, 5)
    bench.turn()
    assert len(bench.batches[0].prefills) == 2
    bench.finish()


@every
def test_one_prompt_at_most_is_partly_prefilled(make_policy: PolicyFactory) -> None:
    bench = rig(make_policy, PolicySettings(token_budget=16), blocks=64, lag=0)
    for name in ("a", "b", "c"):
        bench.arrive(name, 40, 5, 5)
    while bench.unfinished:
        bench.turn()
        assert sum(0 < job.computed < job.total for job in bench.jobs.values() if not job.decoding) <= 1


whole_family = pytest.mark.parametrize(
    "make_policy", [EcoServeD, EcoServeSDO, EcoServe, EcoServeProfile, KvasirPolicy]
)


@whole_family
@settings(max_examples=60)
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


@whole_family
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
