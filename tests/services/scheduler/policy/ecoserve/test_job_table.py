"""The events of one worker: adoption, ends, predictions, sizes; books that balance after each."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import Holding, PolicySettings, Task, WorkerShape
from services.scheduler.policy.ecoserve.planner import EcoServe, EcoServeD, EcoServeSDO
from services.scheduler.policy.job_table import JobStage
from tests.services.scheduler.policy.batch_rig import BLOCK_TOKENS, predicted


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


events_of = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "adopt", "end", "short", "predict", "resize", "plan", "plan"]),
        st.integers(0, 15),
        st.integers(0, 40),
    ),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
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
