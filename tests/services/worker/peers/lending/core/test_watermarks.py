"""Two marks: no borrowing and returning in turn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.peers.lending.core.watermarks import Marks, Memory, blocks_to_borrow, blocks_to_return

MARKS = Marks(low_blocks=4, high_blocks=12)


def test_below_the_low_mark_up_to_the_middle() -> None:
    assert blocks_to_borrow(Memory(own_free=4), MARKS) == 0
    assert blocks_to_borrow(Memory(own_free=3), MARKS) == 5
    assert blocks_to_borrow(Memory(own_free=1, borrowed_free=2), MARKS) == 5
    assert blocks_to_borrow(Memory(own_free=10, wanted=30), MARKS) == 28


def test_above_the_high_mark_what_is_not_used_goes_back() -> None:
    assert blocks_to_return(Memory(own_free=10, borrowed_free=2), MARKS) == 0
    assert blocks_to_return(Memory(own_free=10, borrowed_free=5), MARKS) == 3
    assert blocks_to_return(Memory(own_free=99, borrowed_free=5), MARKS) == 5


def test_a_creditor_in_need_gets_more_but_not_below_the_low_mark() -> None:
    assert blocks_to_return(Memory(own_free=3, borrowed_free=5), MARKS, wanted_back_blocks=9) == 4


def test_marks_in_the_wrong_order() -> None:
    with pytest.raises(ValueError, match="above"):
        Marks(5, 4)


@settings(deadline=None)
@given(
    own=st.integers(0, 100),
    borrowed=st.integers(0, 100),
    wanted=st.integers(0, 100),
    low=st.integers(0, 50),
    gap=st.integers(0, 50),
)
def test_what_was_just_borrowed_is_not_returned(
    own: int, borrowed: int, wanted: int, low: int, gap: int
) -> None:
    marks, memory = Marks(low, low + gap), Memory(own, borrowed, wanted)
    more = blocks_to_borrow(memory, marks)
    after = Memory(own, borrowed + more, wanted)
    assert blocks_to_borrow(after, marks) == 0
    assert not more or blocks_to_return(after, marks) == 0
    back = blocks_to_return(memory, marks, wanted_back_blocks=1000)
    assert 0 <= back <= borrowed
    assert blocks_to_borrow(Memory(own, borrowed - back, wanted), marks) == 0 or back == 0
