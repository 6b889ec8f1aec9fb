"""`fastserve`: levels and quanta."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.policy.contract import Holding, PlannedBatch, PolicySettings, Task, WorkerShape
from services.scheduler.policy.research.fastserve import FastServePolicy
from tests.services.scheduler.policy.batch_rig import (
    BLOCK_TOKENS,
    Jobs,
    items_of,
    jobs_of,
    play,
    rig,
    settings_of,
)


def one_at_a_time(**options: object) -> PolicySettings:
    return PolicySettings(max_batch_sequences=1, max_steps=1, options={"quantum_steps": 2, **options})


def served(batches: list[PlannedBatch]) -> str:
    """Who was in each batch of one."""
    return "".join(item.key[0] for batch in batches for item in items_of(batch))


@settings(max_examples=80, deadline=None)
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


def test_measured_speeds_say_how_long_a_prompt_takes() -> None:
    policy = FastServePolicy(WorkerShape(BLOCK_TOKENS, 64), one_at_a_time())
    policy.on_measured(100.0, 0.1, 0.0)
    policy.on_arrival(Task(("a", 0), 40, 9, 0.0), 0.0)
    policy.on_arrival(Task(("b", 0), 4, 9, 1.0), 1.0)
    batch = policy.plan(1.0)
    assert batch is not None and batch.prefills[0].key[0] == "b", "40 tokens at 10 a step are four steps"


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


def test_one_that_was_found_at_the_worker_has_a_level_of_its_own() -> None:
    policy = FastServePolicy(WorkerShape(BLOCK_TOKENS, 64), one_at_a_time())
    policy.on_adopted(Task(("a", 0), 8, 9, 0.0, 1), Holding(8, 4, decoding=True), 0.0)
    policy.check_integrity()
    batch = policy.plan(0.0)
    assert batch is not None and batch.decodes[0].key[0] == "a"
