"""`orca`: the maximum is reserved at the start, so nothing that started here runs out or is preempted."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import Holding, PlannedBatch, PolicySettings, Task, WorkerShape
from services.scheduler.policy.first_come import OrcaPolicy
from tests.services.scheduler.policy.batch_rig import BLOCK_TOKENS, Jobs, jobs_of, play, rig, settings_of


def maximum_blocks(task: Task) -> int:
    return -(-(task.prompt_tokens + task.max_tokens - 1) // BLOCK_TOKENS)


@settings(max_examples=100, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of, lag=st.integers(0, 3))
def test_every_item_has_its_maximum_and_nothing_is_preempted(
    jobs: Jobs, policy_settings: PolicySettings, lag: int
) -> None:
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
    assert [(item.key[0], item.allocated_blocks) for item in bench.batches[0].prefills] == [
        ("a", 10),
        ("b", 10),
    ]
    bench.turn()
    assert bench.batches[1].prefills == (), "a and b hold 20 of 24 until one of them is over"
    bench.finish()
    assert len(bench.batches) == 6, "c starts in the step after their last"


def test_the_batch_cap_holds_back_what_would_fit() -> None:
    bench = rig(OrcaPolicy, PolicySettings(max_batch_sequences=2), blocks=64, lag=0)
    for name in "abc":
        bench.arrive(name, 4, 9, 9)
    bench.turn()
    assert [item.key[0] for item in bench.batches[0].prefills] == ["a", "b"]
    bench.finish()


def test_a_chunked_prompt_has_its_maximum_from_the_first_chunk() -> None:
    bench = rig(OrcaPolicy, PolicySettings(token_budget=16), blocks=24, lag=0)
    job = bench.arrive("a", 40, 5, 30)
    bench.finish()
    chunks = [(item.end_token, item.allocated_blocks) for batch in bench.batches for item in batch.prefills]
    assert chunks == [(end, maximum_blocks(job.task)) for end in (16, 32, 40)]


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


def test_a_worker_that_shrank_takes_back_from_the_newest() -> None:
    bench = rig(OrcaPolicy, PolicySettings(max_steps=1), blocks=20, lag=0)
    bench.arrive("a", 8, 25, 25)
    bench.arrive("b", 8, 25, 25)
    bench.turn()
    bench.resize(12)
    bench.turn()
    assert [item.key[0] for item in bench.batches[-1].preemptions] == ["b"]
    bench.finish()
    assert not any(batch.preemptions for batch in bench.batches[2:])
