"""`ecoserve_d`, `_sd`, `_sdo`, `_profile`: exact allocations, groups, order, aging, pauses."""

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
from services.scheduler.policy.research.ecoserve.planner import (
    EcoServe,
    EcoServeD,
    EcoServeSD,
    EcoServeSDO,
    groups_of,
)
from services.scheduler.policy.research.ecoserve.profile import EcoServeProfile
from tests.services.scheduler.policy.batch_rig import (
    BLOCK_TOKENS,
    BatchRig,
    Jobs,
    guesses_of,
    in_turn,
    jobs_of,
    play,
    rig,
    settings_of,
    truth,
)
from tests.shared.messages.builders import predicted

EXACT = {"pad": 0.0, "reserve_ratio": 0.0}
variants = pytest.mark.parametrize("make_policy", [EcoServeD, EcoServeSD, EcoServeSDO, EcoServe])


def batch_of(policy: EcoServeD, now_s: float = 0.0) -> PlannedBatch:
    batch = policy.plan(now_s)
    policy.check_integrity()
    assert batch is not None
    return batch


def decoding(batch: PlannedBatch) -> list[str]:
    return sorted(item.key[0] for item in batch.decodes)


def waiting(policy: EcoServeD, *tasks: tuple[str, int, int, float]) -> None:
    """(name, tokens in the cache, predicted rest, deadline): prefilled elsewhere, in the generation queue."""
    for number, (name, tokens, rest, deadline_s) in enumerate(tasks):
        task = Task(
            (name, 0),
            tokens,
            1 + rest,
            float(number),
            generated_tokens=1,
            deadline_s=deadline_s,
            prediction=predicted(1 + rest),
        )
        policy.on_adopted(task, Holding(tokens, -(-tokens // BLOCK_TOKENS), decoding=True), 0.0)


def policy_with(
    make_policy: type[EcoServeD], blocks: int, policy_settings: PolicySettings | None = None
) -> EcoServeD:
    return make_policy(WorkerShape(BLOCK_TOKENS, blocks), policy_settings or PolicySettings(options=EXACT))


def test_a_prompt_becomes_a_generation_task_that_starts_where_all_of_it_fits() -> None:
    bench = rig(EcoServeD, PolicySettings(options=EXACT, max_steps=1), blocks=12, lag=0)
    bench.predict = truth
    bench.arrive("a", 8, 20, 20)
    bench.arrive("b", 8, 20, 20)
    bench.turn()
    assert [item.key[0] for item in bench.batches[0].prefills] == ["a", "b"]
    bench.turn()
    assert decoding(bench.batches[1]) == ["a"], "7 blocks for a, 2 for b's prompt, and 5 more do not fit"
    bench.finish()
    assert not any(batch.preemptions for batch in bench.batches)


def test_first_come_first_served_stops_at_the_first_that_does_not_fit() -> None:
    policy = policy_with(EcoServeD, 20)
    waiting(policy, ("a", 4, 20, 9.0), ("b", 4, 60, 9.0), ("c", 4, 4, 9.0))
    assert decoding(batch_of(policy)) == ["a"]


def test_groups_start_together_and_are_split_where_they_do_not_fit() -> None:
    policy = policy_with(EcoServeSD, 24)
    waiting(policy, ("a", 4, 20, 9.0), ("b", 4, 40, 9.0), ("c", 4, 24, 9.0), ("d", 4, 28, 9.0))
    # a, c and d end within 32 tokens: 5 + 6 of the 20 free blocks are taken before b's 10; d's 7 also fit
    assert decoding(batch_of(policy)) == ["a", "c", "d"]


def test_order_is_by_slack_then_occupied_then_length_and_what_fits_is_filled_in() -> None:
    tight = PolicySettings(max_batch_sequences=1, options=EXACT)
    for tasks, first in (
        ((("a", 4, 200, 9.0), ("b", 4, 20, 0.1)), "b"),
        ((("a", 4, 200, 9.0), ("b", 140, 20, 9.0)), "b"),
        ((("a", 4, 20, 9.0), ("b", 4, 200, 9.0)), "b"),
        ((("a", 4, 20, 9.0), ("b", 4, 20, 9.0)), "a"),
    ):
        policy = policy_with(EcoServeSDO, 200, tight)
        waiting(policy, *tasks)
        assert decoding(batch_of(policy)) == [first]
    policy = policy_with(EcoServeSDO, 20)
    waiting(policy, ("a", 4, 100, 9.0), ("b", 4, 40, 9.0), ("c", 4, 8, 9.0))
    assert decoding(batch_of(policy)) == ["b", "c"], "a does not fit: the longest that still fits goes"


def test_the_reserve_is_for_prompts_and_for_answers_longer_than_predicted() -> None:
    policy_settings = PolicySettings(max_steps=1, options={"pad": 0.0, "reserve_ratio": 0.25})
    bench = rig(EcoServeD, policy_settings, blocks=12, lag=0)
    bench.predict = lambda job, generated: predicted(20)
    bench.arrive("a", 8, 29, 40)
    bench.finish()
    assert not any(batch.preemptions or batch.questions for batch in bench.batches)
    assert max(item.allocated_blocks for batch in bench.batches for item in batch.decodes) == 9
    policy = policy_with(EcoServeD, 12, policy_settings)
    waiting(policy, ("a", 4, 36, 9.0))
    assert decoding(batch_of(policy)) == ["a"], "clamped to what an empty worker gives"
    policy.on_arrival(Task(("p", 0), 12, 4, 1.0), 1.0)
    assert [item.key[0] for item in batch_of(policy).prefills] == ["p"], "three blocks, all of the reserve"


def test_without_a_block_left_it_pauses_keeps_its_kv_and_asks_anew() -> None:
    bench = rig(EcoServeD, PolicySettings(max_steps=1, options=EXACT), blocks=12, lag=0)
    bench.predict = lambda job, generated: predicted({"a": 12, "b": 25}[job.task.key[0]])
    bench.arrive("a", 4, 30, 30)
    bench.arrive("b", 4, 25, 25)
    for _ in range(60):
        bench.turn()
    questions = [item for batch in bench.batches for item in batch.questions]
    assert questions and questions[0].key == ("a", 0) and questions[0].generated_tokens >= 12
    bench.finish()
    assert not any(batch.preemptions for batch in bench.batches)
    starts = [item for batch in bench.batches for item in batch.prefills if item.first_token == 0]
    assert len(starts) == 2, "nothing was computed twice"


def test_prompts_fill_the_forward_size_and_the_last_is_cut_to_land_exactly() -> None:
    policy_settings = PolicySettings(token_budget=64, options={**EXACT, "tfs_tokens": 20})
    bench = rig(EcoServeD, policy_settings, blocks=100, lag=0)
    bench.arrive("a", 12, 9, 9)
    bench.arrive("b", 30, 9, 9)
    for _ in range(3):
        bench.turn()
    sizes = [len(b.decodes) + sum(i.end_token - i.first_token for i in b.prefills) for b in bench.batches]
    assert sizes == [20, 20, 4], "12 + 8, then a decode and 19 of b, then the rest"


def test_prompts_wait_while_the_head_generation_would_not_fit_beside_them() -> None:
    policy = policy_with(EcoServeD, 19)
    waiting(policy, ("a", 4, 40, 9.0), ("b", 4, 30, 9.0))
    policy.on_arrival(Task(("p", 0), 8, 4, 5.0), 5.0)
    batch = batch_of(policy)
    assert decoding(batch) == ["a"] and not batch.prefills
    policy.on_ended(("a", 0), 6.0)
    batch = batch_of(policy)
    assert decoding(batch) == ["b"] and [item.key[0] for item in batch.prefills] == ["p"]


@variants
def test_where_nothing_fits_the_oldest_is_pinned_and_others_give_up(make_policy: PolicyFactory) -> None:
    policy = make_policy(WorkerShape(BLOCK_TOKENS, 8), PolicySettings(options=EXACT))
    assert isinstance(policy, EcoServeD)
    waiting(policy, ("a", 16, 12, 9.0), ("b", 16, 12, 9.0))
    batch = batch_of(policy)
    assert [item.key[0] for item in batch.preemptions] == ["b"] and decoding(batch) == ["a"]
    assert policy._table.jobs[("b", 0)].stage is JobStage.WAITING


def test_without_aging_a_long_prompt_starves_behind_short_ones_and_with_it_does_not() -> None:
    """Shortest-first by deadline: tight ones keep coming."""

    def started_after(aging_s: float, turns: int) -> bool:
        options = {**EXACT, "aging_s": aging_s}
        bench = rig(
            EcoServeSDO, PolicySettings(token_budget=8, max_steps=1, options=options), blocks=40, lag=0
        )
        policy = bench.policy
        policy.on_arrival(Task(("patient", 0), 4, 4, 0.0, deadline_s=0.25), 0.0)
        seen = []
        for number in range(turns):
            bench.now_s += 0.01
            task = Task((f"r{number:04}", 0), 140, 1, bench.now_s, deadline_s=-1.0)
            policy.on_arrival(task, bench.now_s)
            batch = policy.plan(bench.now_s)
            policy.check_integrity()
            if batch is not None:
                seen += [item.key[0] for item in batch.prefills]
                for item in batch.prefills:
                    if item.end_token == 140:
                        policy.on_ended(item.key, bench.now_s)
        return "patient" in seen

    assert not started_after(1e9, 300) and started_after(0.0, 300)


def test_a_new_prediction_moves_a_waiting_one() -> None:
    policy = policy_with(EcoServeSDO, 12)
    waiting(policy, ("a", 4, 60, 9.0), ("b", 4, 60, 9.0))
    policy.on_predicted(("b", 0), predicted(9), 0.0)
    policy.check_integrity()
    policy.on_predicted(("nobody", 0), predicted(9), 0.0)
    batch = batch_of(policy)
    assert decoding(batch) == ["b"]


@variants
@settings(max_examples=40)
@given(jobs=jobs_of, policy_settings=settings_of)
def test_true_lengths_pause_nobody(
    make_policy: PolicyFactory, jobs: Jobs, policy_settings: PolicySettings
) -> None:
    """Exact allocation keeps what it promises (papers/003: no allocation failures)."""
    bench: BatchRig = rig(make_policy, policy_settings, blocks=60, lag=0)
    bench.predict = truth
    play(bench, jobs)
    assert not any(batch.questions for batch in bench.batches)


def job_of(number: int, rest: int, *, due_s: float = 9.0, computed: int = 10) -> Job:
    task = Task((f"r{number}", 0), 10, 500, float(number))
    return Job(task, 1, None, computed_tokens=computed, due_s=due_s, rest_tokens=rest)


def names(groups: list[list[Job]]) -> list[list[str]]:
    return [[job.task.key[0] for job in group] for group in groups]


def urgency(due_s: float) -> int:
    return 0 if due_s < 1.0 else 1


def test_lengths_within_32_tokens_start_together() -> None:
    jobs = [job_of(0, 33), job_of(1, 64), job_of(2, 32), job_of(3, 65), job_of(4, 1)]
    assert names(groups_of(jobs)) == [["r0", "r1"], ["r2", "r4"], ["r3"]]


def test_a_group_is_as_urgent_as_its_most_urgent_and_as_large_as_its_largest() -> None:
    jobs = [
        job_of(0, 500),  # long
        job_of(1, 40, computed=300),  # occupies most
        job_of(2, 64),
        job_of(3, 96),
        job_of(4, 128, due_s=0.5),  # urgent
    ]
    assert names(groups_of(jobs, urgency)) == [["r4"], ["r1", "r2"], ["r0"], ["r3"]]


ONE_STEP = PolicySettings(max_steps=1, options=EXACT)


def batches_of(make_policy: type[EcoServeProfile] | type[EcoServeSDO]) -> int:
    """One long answer and short ones in little memory: how many batches it takes."""
    bench = rig(make_policy, ONE_STEP, blocks=70, lag=0)
    bench.predict = truth
    play(bench, [(4, 240, 240, 3), *[(4, 60, 60, 0)] * 6])
    assert not any(batch.preemptions or batch.questions for batch in bench.batches)
    return len(bench.batches)


def test_the_profile_lets_more_run_at_once_than_exact_allocation() -> None:
    assert batches_of(EcoServeProfile) < 0.75 * batches_of(EcoServeSDO)


def check_nothing_set_aside(bench: BatchRig) -> None:
    policy = bench.policy
    assert isinstance(policy, EcoServeProfile)
    for job in policy._table.jobs.values():
        assert job.own_blocks == job.held_blocks and not policy._hosting.is_guest(job)


@settings(max_examples=80)
@given(jobs=jobs_of, policy_settings=settings_of, guesses=guesses_of, blocks=st.integers(24, 60))
def test_own_blocks_are_those_held(
    jobs: Jobs, policy_settings: PolicySettings, guesses: list[int | None], blocks: int
) -> None:
    bench = rig(EcoServeProfile, policy_settings, blocks=blocks)
    bench.predict = in_turn(guesses)
    bench.on_batch = lambda batch: check_nothing_set_aside(bench)
    play(bench, jobs)
