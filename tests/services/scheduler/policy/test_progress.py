"""Where tasks stand: each event moves one, and the books balance after it."""

import pytest

from services.scheduler.policy.contract import Holding, PolicySettings, Task, WorkerShape
from services.scheduler.policy.progress import Projection, TaskEntry, TaskStage

KEY = ("a", 0)


def books() -> Projection:
    return Projection(WorkerShape(block_tokens=4, capacity_blocks=16), PolicySettings())


def entry(projection: Projection) -> TaskEntry:
    projection.check_integrity()
    return projection._entries[KEY]


@pytest.mark.parametrize(
    ("generated", "holding", "stage"),
    [
        (0, Holding(0, 0), TaskStage.WAITING),
        (3, Holding(0, 0), TaskStage.WAITING),
        (0, Holding(4, 1), TaskStage.PREFILLING),
        (0, Holding(0, 2), TaskStage.PREFILLING),
        (1, Holding(8, 2, decoding=True), TaskStage.DECODING),
        (5, Holding(12, 3, decoding=True), TaskStage.COMPLETE),
    ],
)
def test_what_a_sequence_holds_says_where_it_stands(
    generated: int, holding: Holding, stage: TaskStage
) -> None:
    projection = books()
    projection.on_adopted(Task(KEY, 8, 5, 0.0, generated), holding, 0.0)
    assert entry(projection).stage is stage
    assert projection._used_blocks == holding.allocated_blocks


def test_missing_tokens_of_a_complete_sequence_make_it_decode_again() -> None:
    projection = books()
    projection.on_adopted(Task(KEY, 8, 5, 0.0, 5), Holding(12, 3, decoding=True), 0.0)
    projection.on_short(KEY, 2, 0.0)
    assert (entry(projection).stage, entry(projection).missing_tokens) == (TaskStage.DECODING, 2)


def test_an_end_gives_back_what_was_held() -> None:
    projection = books()
    projection.on_adopted(Task(KEY, 8, 5, 0.0, 1), Holding(8, 2, decoding=True), 0.0)
    projection.on_ended(KEY, 0.0)
    projection.on_ended(KEY, 0.0)
    projection.check_integrity()
    assert projection._used_blocks == 0


def test_a_second_arrival_or_adoption_of_a_key_changes_nothing() -> None:
    projection = books()
    projection.on_arrival(Task(KEY, 8, 5, 0.0), 0.0)
    projection.on_arrival(Task(KEY, 9, 5, 0.0), 0.0)
    projection.on_adopted(Task(KEY, 8, 5, 0.0, 1), Holding(8, 2, decoding=True), 0.0)
    assert (entry(projection).stage, entry(projection).task.prompt_tokens) == (TaskStage.WAITING, 8)


def test_books_that_do_not_balance_are_found() -> None:
    projection = books()
    projection.on_adopted(Task(KEY, 8, 5, 0.0, 1), Holding(8, 2, decoding=True), 0.0)
    projection._used_blocks -= 1
    with pytest.raises(AssertionError):
        projection.check_integrity()


def test_a_hit_moves_a_prefill_on_as_far_as_blocks_are_free() -> None:
    projection = books()
    projection.on_adopted(Task(KEY, 40, 5, 0.0), Holding(4, 1), 0.0)
    projection.on_prefix_hit(KEY, 30, 0.0)
    assert (entry(projection).computed_tokens, entry(projection).allocated_blocks) == (30, 8)
    projection.on_prefix_hit(KEY, 12, 0.0)
    assert entry(projection).computed_tokens == 30, "never back"
    projection.on_adopted(Task(("b", 0), 24, 5, 0.0), Holding(20, 6), 0.0)
    projection.on_prefix_hit(KEY, 40, 0.0)
    assert entry(projection).computed_tokens == 39, "the last token is always computed"
    assert projection._used_blocks == 16


def test_a_hit_of_one_that_does_not_prefill_changes_nothing() -> None:
    projection = books()
    projection.on_prefix_hit(KEY, 4, 0.0)
    projection.on_arrival(Task(KEY, 8, 5, 0.0), 0.0)
    projection.on_prefix_hit(KEY, 4, 0.0)
    assert entry(projection).computed_tokens == 0
