"""`srtf` and `fastserve`: by rank, with the blocks of their longest answers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import (
    Holding,
    PlannedBatch,
    PolicyFactory,
    PolicySettings,
    Task,
    WorkerShape,
)
from services.scheduler.policy.research.ranked import FastServePolicy, RankedPolicy, SrtfPolicy
from tests.services.scheduler.policy.batch_rig import (
    BLOCK_TOKENS,
    Jobs,
    items_of,
    jobs_of,
    play,
    rig,
    settings_of,
)
from tests.services.scheduler.policy.test_first_come import maximum_blocks

both = pytest.mark.parametrize("make_policy", [FastServePolicy, SrtfPolicy])


@both
@settings(max_examples=60)
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


@settings(max_examples=60)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_the_first_is_in_the_batch_or_held_up_by_ends(jobs: Jobs, policy_settings: PolicySettings) -> None:
    bench = rig(SrtfPolicy, policy_settings, lag=0)
    policy = bench.policy
    assert isinstance(policy, RankedPolicy)

    def check(batch: PlannedBatch) -> None:
        keys = {item.key for item in items_of(batch)}
        preempted = {item.key for item in batch.preemptions}
        decoding = [job for job in bench.unfinished if job.decoding and job.task.key not in preempted]
        first = min(decoding, key=lambda j: (j.task.max_tokens - j.generated, j.task.order), default=None)
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


def test_the_shorter_starts_first_however_late_it_came() -> None:
    bench = rig(SrtfPolicy, PolicySettings(max_batch_sequences=1, max_steps=1), blocks=64, lag=0)
    for name, length in (("a", 20), ("b", 10), ("c", 5)):
        bench.arrive(name, 8, length, 40, length)
    bench.finish()
    assert [key[0] for key in bench.started] == ["c", "b", "a"]


def test_a_shorter_one_takes_the_place_and_the_other_goes_on_where_it_was() -> None:
    bench = rig(SrtfPolicy, PolicySettings(max_batch_sequences=1, max_steps=1), blocks=64, lag=0)
    long = bench.arrive("a", 8, 20, 40, 20)
    for _ in range(4):
        bench.turn()
    bench.arrive("b", 8, 3, 40, 3)
    bench.turn()
    held = long.blocks
    assert bench.batches[-1].prefills[0].key[0] == "b" and bench.batches[-1].decodes == ()
    assert bench.batches[-1].preemptions == () and held > 0, "it pauses with its blocks"
    bench.finish()
    assert sum(len(batch.prefills) for batch in bench.batches) == 2, "nothing is computed twice"


def test_where_blocks_are_short_the_longest_gives_up_its_own() -> None:
    bench = rig(SrtfPolicy, PolicySettings(max_steps=1), blocks=24, lag=0)
    bench.arrive("a", 8, 30, 33, 30)
    bench.arrive("b", 8, 25, 33, 25)
    bench.turn()
    bench.arrive("c", 8, 3, 33, 3)
    bench.turn()
    assert [item.key[0] for item in bench.batches[-1].preemptions] == ["a"]
    assert [item.key[0] for item in bench.batches[-1].prefills] == ["c"]
    assert [item.key[0] for item in bench.batches[-1].decodes] == ["b"]
    bench.finish()


def test_nobody_gives_up_blocks_for_one_that_would_not_fit_even_so() -> None:
    bench = rig(SrtfPolicy, PolicySettings(max_steps=1), blocks=24, lag=0)
    bench.arrive("a", 8, 4, 65, 4)
    bench.arrive("b", 8, 30, 17, 30)
    bench.turn()
    bench.arrive("c", 8, 5, 41, 5)
    bench.turn()
    assert bench.batches[-1].preemptions == (), "b's 6 blocks would not be enough for c's 12"
    bench.finish()


def test_a_new_prediction_reorders_those_that_wait() -> None:
    bench = rig(SrtfPolicy, PolicySettings(max_batch_sequences=1, max_steps=1), blocks=64, lag=0)
    bench.arrive("a", 8, 5, 40, 5)
    bench.turn()
    bench.arrive("b", 8, 9, 40)
    bench.arrive("c", 8, 20, 40, 20)
    bench.arrive("d", 8, 30, 40, 30)
    bench.finish()
    assert [key[0] for key in bench.started] == ["a", "c", "d", "b"], "b counts as its limit of 40"


def test_a_prompt_that_is_found_stored_comes_nearer() -> None:
    """Keeps the order of those that run from being that of before the hit."""
    bench = rig(SrtfPolicy, PolicySettings(max_batch_sequences=2, token_budget=8, max_steps=1), lag=0)
    bench.stored = lambda job: 8 if job.task.prompt_tokens == 39 else 0
    bench.arrive("a", 1, 7, 7, 7)
    bench.turn()
    bench.arrive("b", 39, 1, 1, 1)
    bench.finish()


def one_at_a_time(**options: object) -> PolicySettings:
    return PolicySettings(max_batch_sequences=1, max_steps=1, options={"quantum_steps": 2, **options})


def served(batches: list[PlannedBatch]) -> str:
    """Who was in each batch of one."""
    return "".join(item.key[0] for batch in batches for item in items_of(batch))


@settings(max_examples=80)
@given(
    jobs=jobs_of,
    policy_settings=settings_of,
    quantum=st.integers(1, 9),
    levels=st.integers(1, 6),
    starve_s=st.floats(0.01, 2.0),
)
def test_every_request_ends_with_any_options(
    jobs: Jobs, policy_settings: PolicySettings, quantum: int, levels: int, starve_s: float
) -> None:
    options = {"quantum_steps": quantum, "levels": levels, "starve_s": starve_s}
    limits = PolicySettings(
        policy_settings.chunked_prefill,
        policy_settings.max_batch_sequences,
        policy_settings.token_budget,
        policy_settings.max_steps,
        policy_settings.start_tokens,
        options,
    )
    play(rig(FastServePolicy, limits), jobs)


def test_a_quantum_used_up_gives_way_and_doubles() -> None:
    bench = rig(FastServePolicy, one_at_a_time(), blocks=64, lag=0)
    bench.arrive("a", 4, 9, 9)
    bench.arrive("b", 4, 9, 9)
    bench.finish()
    assert served(bench.batches) == "aabb" + "aaaabbbb" + "aaabbb"


def test_a_long_prompt_does_not_start_at_the_top() -> None:
    settings = PolicySettings(
        token_budget=16, max_batch_sequences=1, max_steps=1, options={"quantum_steps": 2}
    )
    bench = rig(FastServePolicy, settings, blocks=64, lag=0)
    bench.arrive("a", 40, 1, 1)
    bench.arrive("b", 4, 2, 2)
    bench.finish()
    assert [key[0] for key in bench.started] == ["b", "a"], "a's 40 tokens take 2.5 steps of 16"


def test_a_newcomer_takes_the_place_of_one_further_down_which_keeps_its_blocks() -> None:
    bench = rig(FastServePolicy, one_at_a_time(), blocks=64, lag=0)
    older = bench.arrive("a", 4, 9, 9)
    for _ in range(4):
        bench.turn()
    bench.arrive("b", 4, 2, 2)
    bench.turn()
    assert served(bench.batches) == "aaaab" and older.blocks > 0
    bench.finish()
    assert not any(batch.preemptions for batch in bench.batches)


def test_where_blocks_are_short_the_lowest_gives_up_its_own() -> None:
    settings = PolicySettings(max_steps=1, options={"quantum_steps": 2})
    bench = rig(FastServePolicy, settings, blocks=24, lag=0)
    bench.arrive("a", 8, 9, 40)
    bench.arrive("b", 8, 9, 40)
    for _ in range(3):
        bench.turn()
    bench.arrive("c", 8, 9, 40)
    bench.turn()
    assert [item.key[0] for item in bench.batches[-1].preemptions] == ["b"], "a joined the level before b"
    bench.finish()


def test_one_not_served_for_long_returns_to_the_top() -> None:
    bench = rig(FastServePolicy, one_at_a_time(starve_s=0.2), blocks=64, lag=0)
    bench.arrive("a", 4, 6, 6)
    for _ in range(3):
        bench.turn()
    for _ in range(40):
        bench.arrive(f"n{len(bench.jobs):02}", 4, 2, 2)
        bench.turn()
        bench.turn()
    first_again = [items_of(batch)[0].key[0] for batch in bench.batches[3:]].index("a")
    assert 19 <= first_again <= 23, "0.2 s of 0.01 s each, behind who is at the top then"
