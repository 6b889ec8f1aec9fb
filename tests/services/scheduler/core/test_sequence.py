"""The table of a sequence's phases, and the diagram made from it."""

import pytest

from services.scheduler.core.sequence import HELD, OVER, TRANSITIONS, Phase, Sequence, mermaid
from shared.errors import InternalError
from tests.shared.messages.builders import ref, spec


def sequence() -> Sequence:
    submitted = spec(
        ref("a", 3, 2),
        [7] * 4,
        generated=[1, 2],
        max_tokens=20,
        gateway_incarnation=5,
        waited_s=1.5,
        deadline_in_s=2.0,
    )
    return Sequence.from_spec(submitted, 10.0)


def test_a_submitted_sequence_keeps_its_place_in_time() -> None:
    task = sequence().task()
    assert (task.arrival_s, task.deadline_s) == (8.5, 12.0)
    assert (task.prompt_tokens, task.generated_tokens, task.max_tokens) == (4, 2, 20)
    assert task.limit_tokens == 23 and sequence().limit_tokens == 24


def test_only_listed_transitions_are_legal() -> None:
    for old in Phase:
        for new in Phase:
            item = sequence()
            item.phase = old
            if old is new or (old, new) in TRANSITIONS:
                item.move_to(new)
                assert item.phase is new
            else:
                with pytest.raises(InternalError):
                    item.move_to(new)


def test_what_is_over_stays_over_and_everything_else_can_end() -> None:
    assert not any(old in OVER for old, _ in TRANSITIONS)
    for phase in set(Phase) - OVER:
        assert {new for old, new in TRANSITIONS if old is phase} >= OVER


def test_the_diagram_shows_every_transition() -> None:
    lines = mermaid().splitlines()
    assert lines[0] == "stateDiagram-v2"
    for (old, new), why in TRANSITIONS.items():
        shared_way = old in HELD and (new in OVER or new is Phase.PLACED)
        assert f"    {'held' if shared_way else old} --> {new}: {why}" in lines
    assert len(lines) == len(set(lines))
