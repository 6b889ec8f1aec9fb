"""Predicted lengths as policies use them."""

import pytest

from services.scheduler.policy.batch_builder import Job
from services.scheduler.policy.contract import Task
from services.scheduler.policy.research.foresight import Foresight
from tests.shared.messages.builders import predicted

KEY = ("a", 0)


def job_of(generated_tokens: int) -> Job:
    return Job(Task(KEY, 8, 50, 0.0), generated_tokens)


def test_without_a_prediction_an_answer_counts_as_long_as_it_may_get() -> None:
    assert Foresight().length_tokens(job_of(3)) == 50


@pytest.mark.parametrize(
    ("guess", "generated", "length"), [(20, 0, 20), (20, 30, 31), (90, 0, 50), (20, 50, 50)]
)
def test_a_length_is_above_what_is_there_and_within_the_limit(
    guess: int, generated: int, length: int
) -> None:
    foresight = Foresight()
    foresight.note(KEY, predicted(guess))
    assert foresight.length_tokens(job_of(generated)) == length
    assert foresight.remaining_tokens(job_of(generated)) == length - generated


def test_an_outgrown_prediction_is_asked_for_once_until_there_is_a_new_one() -> None:
    foresight = Foresight()
    foresight.note(KEY, predicted(20))
    assert foresight.questions([job_of(19)]) == ()
    (question,) = foresight.questions([job_of(20)])
    assert (question.key, question.generated_tokens) == (KEY, 20)
    assert foresight.questions([job_of(21)]) == ()
    foresight.note(KEY, predicted(30))
    assert len(foresight.questions([job_of(30)])) == 1
    assert foresight.questions([job_of(50)]) == (), "over"


def test_what_is_forgotten_is_gone() -> None:
    foresight = Foresight()
    foresight.note(KEY, predicted(20))
    foresight.questions([job_of(20)])
    with pytest.raises(AssertionError):
        foresight.check_integrity([])
    foresight.forget(KEY)
    foresight.check_integrity([])
