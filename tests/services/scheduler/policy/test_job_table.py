"""Where tasks stand: each event moves one, and the books balance after it."""

import pytest

from services.scheduler.policy.batch_builder import Job, JobStage
from services.scheduler.policy.contract import Holding, PolicySettings, Task, WorkerShape
from services.scheduler.policy.first_come import VllmPolicy

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
def test_what_a_sequence_holds_says_where_it_stands(
    generated: int, holding: Holding, stage: JobStage
) -> None:
    policy = books()
    policy.on_adopted(Task(KEY, 8, 5, 0.0, generated), holding, 0.0)
    assert job_of(policy).stage is stage
    assert policy._table.held_blocks == holding.allocated_blocks


def test_missing_tokens_of_a_complete_sequence_make_it_decode_again() -> None:
    policy = books()
    policy.on_adopted(Task(KEY, 8, 5, 0.0, 5), Holding(12, 3, decoding=True), 0.0)
    policy.on_short(KEY, 2, 0.0)
    assert (job_of(policy).stage, job_of(policy).missing_tokens) == (JobStage.DECODING, 2)


def test_an_end_gives_back_what_was_held() -> None:
    policy = books()
    policy.on_adopted(Task(KEY, 8, 5, 0.0, 1), Holding(8, 2, decoding=True), 0.0)
    policy.on_ended(KEY, 0.0)
    policy.on_ended(KEY, 0.0)
    policy.check_integrity()
    assert policy._table.held_blocks == 0


def test_a_second_arrival_or_adoption_of_a_key_changes_nothing() -> None:
    policy = books()
    policy.on_arrival(Task(KEY, 8, 5, 0.0), 0.0)
    policy.on_arrival(Task(KEY, 9, 5, 0.0), 0.0)
    policy.on_adopted(Task(KEY, 8, 5, 0.0, 1), Holding(8, 2, decoding=True), 0.0)
    assert (job_of(policy).stage, job_of(policy).task.prompt_tokens) == (JobStage.WAITING, 8)


def test_books_that_do_not_balance_are_found() -> None:
    policy = books()
    policy.on_adopted(Task(KEY, 8, 5, 0.0, 1), Holding(8, 2, decoding=True), 0.0)
    policy._table.held_blocks -= 1
    with pytest.raises(AssertionError):
        policy.check_integrity()


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


def test_a_hit_of_one_that_does_not_prefill_changes_nothing() -> None:
    policy = books()
    policy.on_prefix_hit(KEY, 4, 0.0)
    policy.on_arrival(Task(KEY, 8, 5, 0.0), 0.0)
    policy.on_prefix_hit(KEY, 4, 0.0)
    assert job_of(policy).computed_tokens == 0
