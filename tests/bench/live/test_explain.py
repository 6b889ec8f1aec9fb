"""What a run under load counts."""

from bench.kit.load import Answer
from bench.live.explain import counted


def test_what_is_refused_has_not_failed() -> None:
    """A prompt longer than what is left of the fleet is refused, as it has to be."""
    errors = ("", "status 400: context_length_exceeded", "status 500: internal_error", "connection: reset")
    answers = []
    for error in errors:
        answer = Answer(sent_s=0.0)
        answer.error = error
        answers.append(answer)
    assert counted(answers) == (1, 2)
