"""`vllm`: never more than there is, never a wedge, first come first served, the newest goes first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import Holding, PlannedBatch, PolicySettings, Task, WorkerShape
from services.scheduler.policy.vllm import VllmPolicy
from tests.services.scheduler.policy.batch_rig import BatchRig

CAPACITY_BLOCKS = 24
BLOCK_TOKENS = 4

jobs_of = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(1, 50), st.integers(0, 12)),
    min_size=1,
    max_size=25,
)
"""(prompt tokens, natural answer tokens, max tokens, batches before the next arrival)"""
settings_of = st.builds(
    PolicySettings,
    chunked_prefill=st.booleans(),
    max_batch_sequences=st.integers(1, 8),
    token_budget=st.integers(8, 64),
    max_steps=st.integers(1, 8),
    start_tokens=st.integers(8, 200),
)


def rig(
    policy_settings: PolicySettings | None = None, *, blocks: int = CAPACITY_BLOCKS, lag: int = 1
) -> BatchRig:
    return BatchRig(VllmPolicy, WorkerShape(BLOCK_TOKENS, blocks), policy_settings or PolicySettings(), lag)


def play(bench: BatchRig, jobs: list[tuple[int, int, int, int]]) -> None:
    for number, (prompt, length, limit, pause) in enumerate(jobs):
        bench.arrive(f"r{number:02}", prompt, length, limit)
        for _ in range(pause):
            bench.turn()
    bench.finish()


@settings(max_examples=150, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of, lag=st.integers(0, 3))
def test_every_request_ends_within_every_limit(
    jobs: list[tuple[int, int, int, int]], policy_settings: PolicySettings, lag: int
) -> None:
    bench = rig(policy_settings, lag=lag)
    play(bench, jobs)
    assert bench.started == sorted(bench.started), "a later arrival started before an earlier one"


@settings(max_examples=50, deadline=None)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_the_oldest_is_never_preempted(
    jobs: list[tuple[int, int, int, int]], policy_settings: PolicySettings
) -> None:
    bench = rig(policy_settings)

    def check(batch: PlannedBatch) -> None:
        oldest = min(bench.unfinished, key=lambda job: job.task.order)
        assert oldest.task.key not in {item.key for item in batch.preemptions}

    bench.on_batch = check
    play(bench, jobs)


@settings(max_examples=50, deadline=None)
@given(
    jobs=jobs_of,
    sizes=st.lists(st.integers(CAPACITY_BLOCKS, 2 * CAPACITY_BLOCKS), min_size=1, max_size=6),
    cancels=st.lists(st.integers(0, 24), max_size=8),
)
def test_resizes_and_cancels_wedge_nothing(
    jobs: list[tuple[int, int, int, int]], sizes: list[int], cancels: list[int]
) -> None:
    bench = rig(PolicySettings(max_batch_sequences=8, token_budget=32))
    for number, (prompt, length, limit, pause) in enumerate(jobs):
        bench.arrive(f"r{number:02}", prompt, length, limit)
        for _ in range(pause):
            bench.turn()
        bench.resize(sizes[number % len(sizes)])
        if number in cancels and bench.unfinished:
            bench.end(bench.unfinished[number % len(bench.unfinished)])
    bench.finish()


@settings(max_examples=30, deadline=None)
@given(jobs=jobs_of)
def test_equal_calls_make_equal_batches(jobs: list[tuple[int, int, int, int]]) -> None:
    first, second = rig(), rig()
    play(first, jobs)
    play(second, jobs)
    assert first.batches == second.batches


def test_plans_reach_ahead_only_while_nothing_can_change() -> None:
    bench = rig(PolicySettings(max_steps=8), blocks=64, lag=0)
    bench.arrive("a", 10, 60, 60)
    bench.turn()
    bench.turn()
    assert [batch.steps for batch in bench.batches] == [1, 8]
    assert bench.batches[1].decodes[0].tokens == 8
    assert bench.batches[1].decodes[0].allocated_blocks * BLOCK_TOKENS >= 18
    bench.arrive("b", 10, 30, 30)
    bench.turn()
    assert bench.batches[2].steps == 1 and len(bench.batches[2].prefills) == 1
    bench.finish()


def test_a_long_prompt_is_cut_to_the_budget_that_decodes_leave() -> None:
    bench = rig(PolicySettings(token_budget=16), blocks=64, lag=0)
    bench.arrive("a", 4, 30, 30)
    bench.turn()
    bench.arrive("b", 40, 5, 5)
    for _ in range(3):
        bench.turn()
    chunks = [(item.first_token, item.end_token) for batch in bench.batches[1:] for item in batch.prefills]
    assert chunks == [(0, 15), (15, 30), (30, 40)]
    assert all(len(batch.decodes) == 1 for batch in bench.batches[1:4])


def test_without_chunks_prompts_go_whole_even_one_beyond_the_budget() -> None:
    bench = rig(
        PolicySettings(token_budget=64, max_batch_sequences=8, chunked_prefill=False), blocks=64, lag=0
    )
    bench.arrive("a", 80, 5, 5)
    bench.arrive("b", 40, 5, 5)
    bench.turn()
    assert [(item.key[0], item.end_token) for item in bench.batches[0].prefills] == [("a", 80)]
    bench.finish()


def test_what_can_never_fit_holds_nobody_up() -> None:
    bench = rig(blocks=10)
    hopeless = bench.arrive("a", 20, 5, 22)
    bench.arrive("b", 20, 5, 21)
    while bench.turn():
        pass
    assert bench.unfinished == [hopeless] and not hopeless.started
    bench.resize(11)
    bench.finish()


def test_a_preempted_sequence_is_computed_again_with_what_it_generated() -> None:
    bench = rig(PolicySettings(max_steps=1), blocks=10, lag=0)
    bench.arrive("a", 15, 20, 20)
    newest = bench.arrive("b", 15, 20, 20)
    while not any(batch.preemptions for batch in bench.batches):
        bench.turn()
    assert newest.blocks == 0 and newest.generated > 1
    again = newest.total
    bench.finish()
    resumed = [item for batch in bench.batches for item in batch.prefills if item.key == ("b", 0)]
    assert (resumed[1].first_token, resumed[1].end_token) == (0, again)


def test_a_short_batch_takes_its_tokens_back() -> None:
    policy = VllmPolicy(WorkerShape(BLOCK_TOKENS, 64), PolicySettings(max_steps=8))
    policy.on_adopted(Task(("a", 0), 4, 9, 0.0, generated_tokens=1), Holding(4, 1, decoding=True), 0.0)
    batch = policy.plan(0.0)
    assert batch is not None and batch.decodes[0].tokens == 8
    assert policy.plan(0.0) is None, "planned to its limit"
    policy.on_short(("a", 0), 3, 0.1)
    policy.check_integrity()
    rest = policy.plan(0.1)
    assert rest is not None and rest.decodes[0].tokens == 3


def test_adoption_goes_on_where_the_worker_stands() -> None:
    policy = VllmPolicy(WorkerShape(BLOCK_TOKENS, 64), PolicySettings(max_steps=1))
    policy.on_adopted(Task(("a", 0), 10, 9, 0.0, generated_tokens=2), Holding(11, 3, decoding=True), 0.0)
    policy.on_adopted(Task(("b", 0), 10, 9, 1.0), Holding(6, 2), 0.0)
    policy.on_adopted(Task(("c", 0), 10, 9, 2.0, generated_tokens=3), Holding(0, 0), 0.0)
    policy.check_integrity()
    batch = policy.plan(0.0)
    assert batch is not None
    assert [item.key[0] for item in batch.decodes] == ["a"]
    assert [(item.key[0], item.first_token, item.end_token) for item in batch.prefills] == [
        ("b", 6, 10),
        ("c", 0, 13),
    ]


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


def test_events_of_unknown_keys_are_ignored() -> None:
    policy = VllmPolicy(WorkerShape(BLOCK_TOKENS, 8), PolicySettings())
    policy.on_ended(("a", 0), 0.0)
    policy.on_short(("a", 0), 1, 0.0)
    assert policy.plan(0.0) is None
