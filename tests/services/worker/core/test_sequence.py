"""A sequence moves only along the table, and says the truth about itself."""

from itertools import product

import pytest

from services.worker.core.sequence import TRANSITIONS, HeldSequence
from shared.errors import InternalError
from shared.messages.reports import SequenceState
from shared.messages.sequence import FinishReason, SequenceSpec
from tests.services.worker.builders import ref, spec


def held(source: SequenceSpec, max_context_tokens: int = 64) -> HeldSequence:
    return HeldSequence.from_spec(source, max_context_tokens, now_s=100.0)


@pytest.mark.parametrize(("before", "after"), list(product(SequenceState, SequenceState)))
def test_only_listed_transitions_happen(before: SequenceState, after: SequenceState) -> None:
    sequence = held(spec(ref(), [1, 2]))
    sequence.state = before
    if after in TRANSITIONS[before]:
        sequence.move_to(after)
        assert sequence.state is after
    else:
        with pytest.raises(InternalError, match="cannot go"):
            sequence.move_to(after)


def test_every_state_can_end_and_no_end_is_left() -> None:
    for state, following in TRANSITIONS.items():
        assert (SequenceState.ENDED in following) is (state is not SequenceState.ENDED)


@pytest.mark.parametrize(
    ("generated", "max_tokens", "max_context_tokens", "reason"),
    [
        ([], 4, 64, None),
        ([5, 6], 4, 64, None),
        ([5, 9], 4, 64, FinishReason.STOP),
        ([5, 6, 7, 8], 4, 64, FinishReason.LENGTH),
        ([5, 6, 7, 9], 4, 64, FinishReason.STOP),
        ([5], 40, 4, FinishReason.LENGTH),
    ],
)
def test_an_answer_is_due_at_its_end_token_or_limit(
    generated: list[int], max_tokens: int, max_context_tokens: int, reason: FinishReason | None
) -> None:
    source = spec(ref(), [9, 1, 2], generated=generated, max_tokens=max_tokens, end_token_ids=(9,))
    assert held(source, max_context_tokens).due_reason() is reason


def test_a_report_ages_what_the_gateway_said() -> None:
    source = spec(ref(), [1, 2, 3], generated=[4])
    sequence = held(source)
    sequence.waited_s, sequence.deadline_in_s = 2.0, 5.0
    report = sequence.report(now_s=101.5)
    assert (report.waited_s, report.deadline_in_s) == (3.5, 3.5)
    assert (report.prompt_tokens, report.generated_tokens, report.computed_tokens) == (3, 1, 0)
