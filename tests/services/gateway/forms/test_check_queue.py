"""Keys take turns at a few places."""

import pytest

from services.gateway.forms.checks import MOST_WAITING_OF_A_KEY, CheckQueue
from shared.errors import Overloaded


def begun(turns: CheckQueue[int]) -> list[tuple[str, int]]:
    found = []
    while (turn := turns.begin()) is not None:
        found.append((turn[0], turn[2]))
    return found


def test_a_key_has_one_place_and_waits_for_itself_alone() -> None:
    turns = CheckQueue[int](range(2))
    for item in (1, 2, 3):
        turns.ask("a", item)
    assert begun(turns) == [("a", 1)], "one place stays free for others"
    turns.ask("b", 4)
    turns.ask("c", 5)
    assert begun(turns) == [("b", 4)]
    turns.end("a")
    assert begun(turns) == [("c", 5)], "who was served last comes last"
    turns.end("b")
    turns.end("c")
    assert begun(turns) == [("a", 2)]


def test_what_waits_is_bounded() -> None:
    turns = CheckQueue[int](())
    for item in range(MOST_WAITING_OF_A_KEY):
        turns.ask("a", item)
    with pytest.raises(Overloaded):
        turns.ask("a", 0)
    turns.ask("b", 0)
