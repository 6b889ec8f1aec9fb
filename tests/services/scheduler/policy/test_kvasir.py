"""`kvasir`: least work first, admitted by the profile, and nobody starves."""

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
    priority_in,
)
from services.scheduler.policy.kvasir import KvasirPolicy
from services.scheduler.policy.research.ecoserve.profile import EcoServeProfile
from services.scheduler.policy.waiting_queue import PassingBudget
from shared.messages.sequence import SequenceKey, ServiceClass
from tests.services.scheduler.policy.batch_rig import (
    BLOCK_TOKENS,
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

ONE_AT_A_TIME = PolicySettings(max_batch_sequences=1, max_steps=1)


def arriving(policy: KvasirPolicy, *tasks: tuple[str, int, int, float]) -> None:
    """(name, prompt tokens, predicted answer, deadline)"""
    for name, prompt, answer, deadline_s in tasks:
        policy.on_arrival(
            Task((name, 0), prompt, 200, 0.0, deadline_s=deadline_s, prediction=predicted(answer)), 0.0
        )


def policy_with(policy_settings: PolicySettings, blocks: int = 100) -> KvasirPolicy:
    return KvasirPolicy(WorkerShape(BLOCK_TOKENS, blocks), policy_settings)


def starts(batch: PlannedBatch | None) -> list[str]:
    assert batch is not None
    return [item.key[0] for item in batch.prefills if item.first_token == 0]


def test_the_least_remaining_work_goes_first_prefill_included() -> None:
    policy = policy_with(ONE_AT_A_TIME)
    policy.on_measured(100.0, 0.01, 0.0)
    arriving(policy, ("long", 10, 90, 99.0), ("wordy", 100, 5, 99.0), ("short", 10, 20, 99.0))
    order = []
    for turn in range(3):
        started = starts(policy.plan(0.1 * turn))
        order += started
        policy.on_ended((started[0], 0), 0.1 * turn)
    assert order == ["short", "long", "wordy"]


def test_a_request_starts_where_as_predicted_there_will_be_enough_until_its_end() -> None:
    bench = rig(KvasirPolicy, PolicySettings(max_steps=1), blocks=60, lag=0)
    bench.predict = truth
    bench.arrive("long", 4, 200, 200)
    bench.arrive("guest", 4, 60, 200)
    bench.arrive("other", 4, 190, 200)
    bench.turn()
    assert starts(bench.batches[0]) == ["guest", "other"], "least work first; the longest would not fit"
    bench.finish()
    assert not any(batch.preemptions for batch in bench.batches)


def test_one_that_does_not_fit_is_passed_over() -> None:
    policy = policy_with(PolicySettings(), 100)
    arriving(policy, ("a", 20, 100, 99.0), ("b", 200, 110, 99.0), ("c", 4, 150, 99.0), ("d", 8, 30, 99.0))
    assert starts(policy.plan(0.0)) == ["d", "a", "c"]


def test_when_blocks_run_out_the_one_with_the_most_left_gives_up_its_own() -> None:
    bench = rig(KvasirPolicy, PolicySettings(max_steps=1), blocks=18, lag=0)
    bench.predict = lambda job, generated: predicted({"a": 8, "b": 30}[job.task.key[0]])
    bench.arrive("a", 8, 60, 60)
    bench.arrive("b", 8, 30, 60)
    bench.finish()
    assert any(batch.preemptions for batch in bench.batches)
    assert any(batch.questions for batch in bench.batches)


def starved() -> bool:
    """Whether a long one still waits after 400 steps of short ones that never stop coming."""
    policy_settings = PolicySettings(max_batch_sequences=1, max_steps=1)
    bench = rig(KvasirPolicy, policy_settings, blocks=60)
    bench.predict = truth
    bench.policy.on_measured(10_000.0, 0.001, 0.0)
    patient = bench.arrive("patient", 30, 40, 60)
    for number in range(400):
        bench.arrive(f"r{number:03}", 4, 2, 60)
        bench.turn()
    return not patient.over


def test_nobody_starves_where_only_a_share_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not starved()
    monkeypatch.setattr(PassingBudget, "may_pass", lambda budget, waiting: True)
    assert starved()


def test_as_few_may_pass_as_wait() -> None:
    budget = PassingBudget(0.5)
    for passed in range(1, 9):
        budget.start(1.0, passes=True)
        assert [budget.may_pass(waiting) for waiting in (2, 8, 100)] == [passed <= 2, True, True]
    budget.start(1.0, passes=True)
    assert not budget.may_pass(100)


def test_a_prompt_that_is_mostly_cached_goes_before_a_shorter_one() -> None:
    def first(cached_tokens: int) -> SequenceKey:
        policy = KvasirPolicy(WorkerShape(16, 64), PolicySettings(token_budget=32))
        policy.on_arrival(Task(("long", 0), 640, 8, 1.0, cached_tokens=cached_tokens), 1.0)
        policy.on_arrival(Task(("short", 0), 320, 8, 0.0), 1.0)
        batch = policy.plan(1.0)
        assert batch is not None
        return batch.prefills[0].key

    assert (first(0), first(600)) == (("short", 0), ("long", 0))


def test_lengths_that_are_always_wrong_are_corrected() -> None:
    """Four times too long: after some have ended, as many run at once as with the truth."""

    def running(predict_factor: int) -> int:
        bench = rig(KvasirPolicy, PolicySettings(max_steps=1), blocks=100)
        bench.predict = lambda job, generated: predicted(predict_factor * job.length)
        for number in range(200):
            bench.arrive(f"r{number:03}", 4, 20, 390)
        most = 0
        while len(bench.unfinished) > 60:
            bench.turn()
            most = max(most, len(bench.batches[-1].decodes) if len(bench.unfinished) < 120 else 0)
        return most

    assert running(4) >= 0.6 * running(1) > 0


def test_answers_that_end_within_a_plan_teach_their_own_length_and_not_the_plans() -> None:
    """Predicted exactly, answers of two tokens counted as the five and more that were planned for them, and
    were "corrected". What is cancelled teaches nothing."""

    def most_at_once(*, ended: int = 0, cancelled: int = 0) -> int:
        bench = rig(KvasirPolicy, PolicySettings(max_steps=16), blocks=60, lag=1)
        bench.predict = truth
        for number in range(ended):
            bench.arrive(f"r{number:02}", 4, 2, 100)
            bench.finish()
        for number in range(cancelled):
            bench.policy.on_arrival(Task((f"c{number}", 0), 4, 100, 9.0, prediction=predicted(90)), 9.0)
            bench.policy.plan(9.0)
            bench.policy.on_ended((f"c{number}", 0), 9.0)
        before = len(bench.batches)
        for number in range(30):
            bench.arrive(f"s{number:02}", 4, 20, 100)
        bench.turn()
        return len(bench.batches[before].prefills)

    assert most_at_once(ended=60) == most_at_once(cancelled=60) == most_at_once() > 4


TOLD_LATE = [KvasirPolicy, EcoServeProfile]


@pytest.mark.parametrize("make_policy", TOLD_LATE)
def test_a_prediction_moves_the_end_of_what_runs(make_policy: PolicyFactory) -> None:
    """It was ignored once its prompt was computed, so a short answer kept the room of a long one."""
    policy = make_policy(WorkerShape(BLOCK_TOKENS, 160), PolicySettings(max_steps=1))
    policy.on_arrival(Task(("late", 0), 20, 600, 0.0), 0.0)
    policy.plan(0.0)
    policy.on_arrival(Task(("next", 0), 20, 600, 0.0, prediction=predicted(300)), 0.1)

    def decoding() -> set[str]:
        batches = [policy.plan(0.2), policy.plan(0.3)]
        return {item.key[0] for batch in batches if batch is not None for item in batch.decodes}

    assert decoding() == {"late"}, "as long as it may get there is no room for both"
    policy.on_predicted(("late", 0), predicted(8), 0.4)
    assert decoding() == {"late", "next"}


def test_a_prediction_moves_the_end_of_what_is_partly_prefilled() -> None:
    policy = policy_with(PolicySettings(max_steps=1, token_budget=16), 160)
    policy.on_arrival(Task(("late", 0), 40, 600, 0.0), 0.0)
    policy.plan(0.0)
    policy.on_predicted(("late", 0), predicted(8), 0.1)
    policy.on_arrival(Task(("next", 0), 8, 600, 0.0, prediction=predicted(450)), 0.1)
    assert [starts(policy.plan(turn)) for turn in (0.2, 0.3)] == [[], ["next"]], "beside what is left of it"


@pytest.mark.parametrize("make_policy", TOLD_LATE)
def test_the_answer_to_its_own_question_moves_the_end(make_policy: PolicyFactory) -> None:
    """It asks when an answer outlives its prediction, and never used what it was told."""
    policy = make_policy(WorkerShape(BLOCK_TOKENS, 160), PolicySettings(max_steps=1))
    policy.on_arrival(Task(("long", 0), 20, 600, 0.0, prediction=predicted(4)), 0.0)
    batches = (policy.plan(0.01 * turn) for turn in range(30))
    assert next(batch.questions for batch in batches if batch is not None and batch.questions)
    policy.on_predicted(("long", 0), predicted(550), 1.0)
    policy.on_arrival(Task(("next", 0), 20, 600, 0.0, prediction=predicted(300)), 1.0)
    later = [policy.plan(1.0 + 0.1 * turn) for turn in range(3)]
    assert not any(item.key[0] == "next" for batch in later if batch is not None for item in batch.decodes)


def crowded() -> KvasirPolicy:
    """`a` runs, `b` does not fit beside it."""
    policy = policy_with(PolicySettings(max_steps=8), 88)
    arriving(policy, ("a", 150, 118, 99.0), ("b", 100, 195, 99.0))
    assert starts(policy.plan(0.0)) == ["a"]
    return policy


def planned_steps(policy: KvasirPolicy) -> int:
    batch = policy.plan(0.0)
    assert batch is not None
    return batch.steps


def test_steps_are_planned_ahead_while_nobody_else_fits() -> None:
    policy = crowded()
    assert [planned_steps(policy) for _ in range(15)] == [8] * 14 + [6], "not beyond a predicted end"


def test_adopted_ones_resume_before_any_prompt_starts() -> None:
    policy = policy_with(ONE_AT_A_TIME)
    arriving(policy, ("a", 4, 4, 99.0))
    task = Task(("there", 0), 8, 100, 5.0, generated_tokens=1, prediction=predicted(90))
    policy.on_adopted(task, Holding(8, 2, decoding=True), 5.0)
    batch = policy.plan(5.0)
    assert batch is not None and [item.key[0] for item in batch.decodes] == ["there"] and not batch.prefills


@settings(max_examples=80)
@given(jobs=jobs_of, policy_settings=settings_of, guesses=guesses_of, blocks=st.integers(24, 60))
def test_own_blocks_are_those_held(
    jobs: Jobs, policy_settings: PolicySettings, guesses: list[int | None], blocks: int
) -> None:
    bench = rig(KvasirPolicy, policy_settings, blocks=blocks)
    bench.predict = in_turn(guesses)

    def check(batch: PlannedBatch) -> None:
        policy = bench.policy
        assert isinstance(policy, KvasirPolicy)
        assert all(job.own_blocks == job.held_blocks for job in policy._table.jobs.values())

    bench.on_batch = check
    play(bench, jobs)


@settings(max_examples=80)
@given(jobs=jobs_of, guesses=guesses_of, blocks=st.integers(24, 60))
def test_while_somebody_waits_no_plan_reaches_beyond_a_predicted_end(
    jobs: Jobs, guesses: list[int | None], blocks: int
) -> None:
    bench = rig(KvasirPolicy, PolicySettings(max_batch_sequences=4, token_budget=64), blocks=blocks)
    bench.predict = in_turn(guesses)

    def check(batch: PlannedBatch) -> None:
        policy = bench.policy
        assert isinstance(policy, KvasirPolicy)
        if batch.steps > 1 and len(policy._prompts):
            assert all(job.computed_tokens <= job.end_tokens for job in policy._running.values())

    bench.on_batch = check
    play(bench, jobs)


def of_class(name: str, service_class: ServiceClass, prompt: int, answer: int) -> Task:
    priority = priority_in(service_class, 0)
    return Task(
        (name, 0), prompt, answer, 0.0, deadline_s=99.0, prediction=predicted(answer), priority=priority
    )


def test_what_is_left_over_gives_way_to_a_better_class_that_finds_no_room() -> None:
    policy = policy_with(PolicySettings(max_steps=1), blocks=10)
    policy.on_arrival(of_class("left", ServiceClass.SHEDDABLE, 5 * BLOCK_TOKENS, 4), 0.0)
    policy.on_arrival(of_class("over", ServiceClass.SHEDDABLE, 2 * BLOCK_TOKENS, 4), 0.0)
    started = [name for turn in range(2) for name in starts(policy.plan(0.1 * turn))]
    assert sorted(started) == ["left", "over"]
    policy.on_arrival(of_class("sure", ServiceClass.GUARANTEED, 5 * BLOCK_TOKENS, 4), 0.5)
    first, second = policy.plan(0.5), policy.plan(0.6)
    assert first is not None and ("left", 0) in [item.key for item in first.preemptions]
    assert starts(second)[0] == "sure"
    policy.check_integrity()


def test_nobody_gives_way_where_it_would_not_be_enough_or_to_ones_equals() -> None:
    policy = policy_with(PolicySettings(max_steps=1), blocks=10)
    policy.on_arrival(of_class("held", ServiceClass.STANDARD, 6 * BLOCK_TOKENS, 6), 0.0)
    policy.on_arrival(of_class("left", ServiceClass.SHEDDABLE, BLOCK_TOKENS, 6), 0.0)
    for turn in range(3):
        policy.plan(0.1 * turn)
    policy.on_arrival(of_class("wide", ServiceClass.GUARANTEED, 8 * BLOCK_TOKENS, 4), 0.5)
    policy.on_arrival(of_class("equal", ServiceClass.SHEDDABLE, 8 * BLOCK_TOKENS, 4), 0.5)
    batch = policy.plan(0.5)
    assert batch is not None and not batch.preemptions


def test_a_long_prompt_of_what_is_left_over_goes_on_with_what_others_leave_of_a_step() -> None:
    policy = policy_with(PolicySettings(token_budget=64, max_steps=1), blocks=100)
    policy.on_arrival(of_class("left", ServiceClass.SHEDDABLE, 300, 8), 0.0)
    assert starts(policy.plan(0.0)) == ["left"]
    policy.on_arrival(of_class("sure", ServiceClass.GUARANTEED, 40, 8), 0.1)
    batch = policy.plan(0.1)
    assert batch is not None
    chunks = {item.key[0]: item.end_token - item.first_token for item in batch.prefills}
    assert chunks == {"sure": 40, "left": 24}
