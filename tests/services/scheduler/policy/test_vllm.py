"""`vllm`: blocks on demand; the newest goes first when there are none."""

from hypothesis import given, settings

from services.scheduler.policy.contract import Holding, PlannedBatch, PolicySettings, Task, WorkerShape
from services.scheduler.policy.first_come import VllmPolicy
from tests.services.scheduler.policy.batch_rig import BLOCK_TOKENS, Jobs, jobs_of, play, rig, settings_of


@settings(max_examples=50, deadline=None)
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
    assert after is not None and [item.key[0] for item in after.decodes] == ["b"]
    assert after.preemptions == ()


def test_a_start_leaves_headroom_to_those_that_run() -> None:
    policy = VllmPolicy(WorkerShape(BLOCK_TOKENS, 200), PolicySettings(token_budget=1000))
    policy.on_adopted(Task(("a", 0), 4, 90, 0.0, generated_tokens=1), Holding(4, 2, decoding=True), 0.0)
    policy.on_arrival(Task(("b", 0), 4 * 197, 1, 1.0), 0.0)
    crowded = policy.plan(0.0)
    assert crowded is not None and crowded.prefills == ()
    policy.on_arrival(Task(("c", 0), 4 * 196, 1, 0.5), 0.0)
    roomy = policy.plan(0.0)
    assert roomy is not None and [item.key[0] for item in roomy.prefills] == ["c"]
