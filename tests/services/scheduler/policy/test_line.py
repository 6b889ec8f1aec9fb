"""A line stays in order, and notices when it could not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.policy.waiting_queue import Line


@given(numbers=st.sets(st.integers()), gone=st.sets(st.integers()))
def test_what_was_added_and_not_removed_stands_in_order(numbers: set[int], gone: set[int]) -> None:
    line: Line[int] = Line(lambda number: -number, numbers)
    for number in sorted(gone):
        line.discard(number)
    left = sorted(numbers - gone, reverse=True)
    assert list(line) == left and len(line) == len(left)
    assert (line.first(), line.last()) == ((left[0], left[-1]) if left else (None, None))


def test_it_is_walked_from_a_key_that_need_not_be_there() -> None:
    line: Line[int] = Line(lambda number: number, [1, 4, 6, 9])
    assert list(line.starting_at(5)) == [6, 9]
    assert list(line.downwards_from(5)) == [4, 1]
    assert list(line.starting_at(10)) == list(line.downwards_from(0)) == []


def test_removing_what_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError):
        Line(lambda number: number, [1]).remove(2)


def test_a_key_that_changed_is_found() -> None:
    keys = {"a": 1, "b": 2}
    line = Line(lambda name: keys[name], keys)
    line.check_integrity()
    keys["a"] = 3
    with pytest.raises(AssertionError):
        line.check_integrity()
